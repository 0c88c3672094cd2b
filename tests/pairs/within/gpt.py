"""A small GPT: a fused kernel, and attention written out."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_torch

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS, IGNORE = 41, 12, 32, 4, 2, -100
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 0.1


def make_batch():
    rng = np.random.default_rng(7)
    tokens = rng.integers(1, VOCAB, size=(4, 11))
    labels = tokens.copy()
    for row, length in enumerate((11, 8, 10, 6)):
        tokens[row, length:] = 0
        labels[row, length:] = IGNORE
    return tokens.astype(np.int64), labels.astype(np.int64)


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (m.view(B, T, self.heads, C // self.heads).transpose(1, 2) for m in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_out = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        inner = self.c_fc(self.ln_2(x))
        inner = F.gelu(inner)
        return x + self.c_out(inner)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, HEADS) for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() == 1:
                    p.add_(0.1 * torch.randn_like(p))
                elif name.startswith("w"):
                    p.mul_(0.4)

    def forward(self, idx):
        pos = torch.arange(idx.shape[1])
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        return x @ self.wte.weight.T


def left():
    torch.manual_seed(1)
    model = GPT()
    tokens, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(tokens, labels):
        logits = model(tokens)
        shift_logits = logits[:, :-1].reshape(-1, VOCAB)
        shift_labels = labels[:, 1:].reshape(-1)
        return F.cross_entropy(shift_logits, shift_labels, ignore_index=IGNORE)

    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    return stablenum_torch.program(loss_fn, tokens, labels, model=model, optimizer=optimizer)


class WrittenOutAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.merge = nn.Linear(width, width)

    def forward(self, x):
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value)
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        attended = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", attended, value)
        return self.merge(mixed.flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        hidden = self.up(x)
        hidden = F.gelu(hidden, approximate="none")
        return self.down(hidden)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = WrittenOutAttention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.layers = nn.Sequential(*[Layer(WIDTH, HEADS) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, idx):
        x = self.tokens(idx) + self.positions[: idx.shape[1]]
        x = self.norm(self.layers(x))
        return F.linear(x, self.tokens.weight)


def right():
    torch.manual_seed(2)
    model = LanguageModel()
    tokens, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(tokens, labels):
        following = labels[:, 1:]
        log_probabilities = model(tokens)[:, :-1].log_softmax(dim=-1)
        kept = following != IGNORE
        chosen = log_probabilities.gather(-1, following.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(chosen * kept).sum() / kept.sum()

    norms = [p for name, p in model.named_parameters() if p.dim() < 2]
    others = [p for name, p in model.named_parameters() if p.dim() >= 2]
    groups = [{"params": others}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    return stablenum_torch.program(loss_fn, tokens, labels, model=model, optimizer=optimizer)
