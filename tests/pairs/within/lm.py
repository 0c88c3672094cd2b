"""A decoder with rotary embeddings and grouped queries: a fused kernel, and written out."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_torch

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, DEPTH = 37, 32, 4, 2, 8, 40, 2
THETA, EPS = 10000.0, 1e-5


def make_batch():
    rng = np.random.default_rng(21)
    tokens = rng.integers(1, VOCAB, size=(3, 10))
    tokens[:, 4] = tokens[:, 1]
    labels = np.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    for row, length in enumerate((10, 7, 8)):
        labels[row, length - 1 :] = -100
        tokens[row, length:] = 0
    return tokens, labels


def rotary_tables(length, like):
    inverse = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=like.dtype) / HEAD_DIM)
    angles = torch.outer(torch.arange(length, dtype=like.dtype), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.RMSNorm(DIM, eps=EPS)
        self.attn = Attention()
        self.mlp_norm = nn.RMSNorm(DIM, eps=EPS)
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x, cos, sin):
        y = self.attn_norm(x)
        x = x + self.attn(y, cos, sin)
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(DEPTH)])
        self.norm = nn.RMSNorm(DIM, eps=EPS)

    def forward(self, tokens):
        x = self.embed(tokens)
        cos, sin = rotary_tables(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight)


def left():
    torch.manual_seed(4)
    model = LanguageModel()
    with torch.no_grad():
        model.embed.weight.mul_(0.3)
        for scale in (p for p in model.parameters() if p.ndim == 1):
            scale.add_(0.1 * torch.randn_like(scale))

    def loss_fn(tokens, labels):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    tokens, labels = make_batch()
    return stablenum_torch.program(loss_fn, torch.from_numpy(tokens), torch.from_numpy(labels), model=model)


class RootMeanSquare(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return self.gain * x / torch.sqrt(mean_square + EPS)


def turned(x, angles):
    first, second = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GroupedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.keys = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.values = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.output = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x, angles):
        queries = self.queries(x).unflatten(-1, (KV_HEADS, HEADS // KV_HEADS, HEAD_DIM))
        keys, values = (layer(x).unflatten(-1, (KV_HEADS, HEAD_DIM)) for layer in (self.keys, self.values))
        queries = turned(queries, angles[:, None, None])
        keys = turned(keys, angles[:, None])
        scores = torch.einsum("bqgrd,bkgd->bgrqk", queries, keys) / HEAD_DIM**0.5
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -1e9).softmax(dim=-1)
        mixed = torch.einsum("bgrqk,bkgd->bqgrd", weights, values)
        return self.output(mixed.flatten(2))


class GatedUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.both = nn.Linear(DIM, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        gate, value = self.both(x).chunk(2, dim=-1)
        return self.down(gate * gate.sigmoid() * value)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = RootMeanSquare(), GroupedAttention()
        self.norm2, self.unit = RootMeanSquare(), GatedUnit()

    def forward(self, x, angles):
        x = x + self.attention(self.norm1(x), angles)
        return x + self.unit(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCAB, DIM))
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])
        self.norm = RootMeanSquare()

    def forward(self, tokens):
        x = self.table[tokens]
        exponents = torch.arange(0, HEAD_DIM, 2, dtype=x.dtype) / HEAD_DIM
        angles = torch.arange(tokens.shape[1], dtype=x.dtype)[:, None] / THETA**exponents
        for layer in self.layers:
            x = layer(x, angles)
        return self.norm(x) @ self.table.T


def right():
    torch.manual_seed(5)
    decoder = Decoder()

    def loss_fn(tokens, labels):
        kept = labels >= 0
        logits = decoder(tokens)[kept]
        return F.cross_entropy(logits, labels[kept])

    tokens, labels = map(torch.from_numpy, make_batch())
    return stablenum_torch.program(loss_fn, tokens, labels, model=decoder)
