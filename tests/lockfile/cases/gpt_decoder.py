"""Small GPT-style decoder: rotary positions, RMSNorm, SwiGLU, left-padded batches."""
import math
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import stablenum_torch

VOCAB, DIM, HEADS, LAYERS, SEQ, PAD = 61, 48, 4, 2, 24, 0


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        mean_square = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.eps) * self.weight


def rope_tables(seq, head_dim, base=10000.0):
    inv_freq = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(seq).to(inv_freq.dtype), inv_freq)
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def build_mask(tokens):
    t = tokens.size(1)
    causal = torch.tril(torch.ones(t, t, dtype=torch.bool))
    not_pad = (tokens != PAD)[:, None, None, :]
    mask = causal & not_pad  # padded queries see at least themselves
    return mask | torch.eye(t, dtype=torch.bool)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask, cos, sin):
        b, t, d = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~mask, float("-inf"))
        probs = torch.softmax(scores, dim=-1)
        y = (probs @ v).transpose(1, 2).reshape(b, t, d)
        return self.out(y)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.attn, self.norm2 = RMSNorm(dim), Attention(dim, heads), RMSNorm(dim)
        self.gate, self.up = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x, mask, cos, sin):
        x = x + self.attn(self.norm1(x), mask, cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.blocks = nn.ModuleList(Block(DIM, HEADS) for _ in range(LAYERS))
        self.norm = RMSNorm(DIM)

    def forward(self, tokens):
        x = self.embed(tokens)
        mask = build_mask(tokens)
        cos, sin = rope_tables(tokens.size(1), DIM // HEADS)
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        return self.norm(x) @ self.embed.weight.T


def make_batch(batch=6, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCAB, size=(batch, SEQ + 1))
    for row, pad in enumerate(rng.integers(0, SEQ // 2, size=batch)):
        tokens[row, :pad] = PAD
    return torch.from_numpy(tokens)


def program():
    torch.manual_seed(20)
    model = GPT()

    def loss_fn(tokens):
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:].reshape(-1)
        nll = F.cross_entropy(logits.reshape(-1, VOCAB), targets, reduction="none")
        keep = (targets != PAD).to(nll.dtype)
        return (nll * keep).sum() / keep.sum()

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return stablenum_torch.program(loss_fn, make_batch(), model=model, optimizer=optimizer)
