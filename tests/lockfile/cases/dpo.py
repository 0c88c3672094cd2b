"""Direct preference optimisation of a tiny causal language model against a frozen copy."""
import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_torch

VOCAB, DIM, HEADS, SEQ, PROMPT = 50, 40, 4, 18, 6
BETA, LABEL_SMOOTHING = 0.3, 0.05


class PolicyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Parameter(0.1 * torch.randn(SEQ, DIM))
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, HEADS, bias=False, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        t = ids.size(1)
        x = self.tokens(ids) + self.positions[:t]
        future = torch.ones(t, t, dtype=torch.bool).triu(diagonal=1)
        h = self.norm1(x)
        attended, _ = self.attn(h, h, h, attn_mask=future, need_weights=False)
        x = x + attended
        x = x + self.mlp(self.norm2(x))
        return self.head(x)


def completion_mask(ids, lengths):
    """1 for the tokens of the answer: after the prompt, before the padding."""
    position = torch.arange(ids.size(1))
    return (position >= PROMPT) & (position < lengths[:, None])


def sequence_log_prob(model, ids, lengths):
    logits = model(ids)[:, :-1]
    labels = ids[:, 1:]
    mask = completion_mask(ids, lengths)[:, 1:]
    log_probs = torch.log_softmax(logits, dim=-1)
    token_log_prob = log_probs.gather(2, labels[..., None]).squeeze(2)
    return (token_log_prob * mask).sum(dim=1)


def preference_loss(policy_margin, reference_margin):
    logits = BETA * (policy_margin - reference_margin)
    win = -F.logsigmoid(logits) * (1 - LABEL_SMOOTHING)
    lose = -F.logsigmoid(-logits) * LABEL_SMOOTHING
    return (win + lose).mean()


def make_pairs(batch=6, seed=7):
    rng = np.random.default_rng(seed)
    chosen = rng.integers(1, VOCAB, size=(batch, SEQ))
    rejected = rng.integers(1, VOCAB, size=(batch, SEQ))
    rejected[:, :PROMPT] = chosen[:, :PROMPT]
    lengths = rng.integers(PROMPT + 3, SEQ + 1, size=(2, batch))
    return [torch.from_numpy(a) for a in (chosen, rejected, lengths[0], lengths[1])]


def program():
    torch.manual_seed(7)
    policy = PolicyLM()
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.03 * torch.randn_like(p))

    def loss_fn(chosen, rejected, chosen_len, rejected_len):
        policy_chosen = sequence_log_prob(policy, chosen, chosen_len)
        policy_rejected = sequence_log_prob(policy, rejected, rejected_len)
        with torch.no_grad():
            ref_chosen = sequence_log_prob(reference, chosen, chosen_len)
            ref_rejected = sequence_log_prob(reference, rejected, rejected_len)
        return preference_loss(policy_chosen - policy_rejected, ref_chosen - ref_rejected)

    return stablenum_torch.program(loss_fn, *make_pairs(), model=policy)
