"""Named-entity tagger: attention written out, and with one projection and a fused kernel."""

import math

import numpy as np
import torch
import torch.nn.functional as F

import stablenum_torch

VOCAB, NUM_TAGS, MAX_LEN = 40, 9, 12
D_MODEL, N_HEADS, D_FF, N_LAYERS = 32, 4, 48, 2
SMOOTHING = 0.1
IGNORE = -100


def load_sentences():
    rng = np.random.default_rng(2024)
    lengths = np.array([10, 7, 9, 5])
    tokens = rng.integers(1, VOCAB, size=(4, 10))
    tags = rng.integers(0, NUM_TAGS, size=(4, 10))
    valid = np.arange(10)[None, :] < lengths[:, None]
    tokens = np.where(valid, tokens, 0)
    subword = rng.random((4, 10)) < 0.2
    tags = np.where(valid & ~subword, tags, IGNORE)
    return tokens, valid, tags


class SelfAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(D_MODEL, D_MODEL)
        self.k = torch.nn.Linear(D_MODEL, D_MODEL)
        self.v = torch.nn.Linear(D_MODEL, D_MODEL)
        self.out = torch.nn.Linear(D_MODEL, D_MODEL)

    def _heads(self, x):
        b, t, _ = x.shape
        return x.view(b, t, N_HEADS, D_MODEL // N_HEADS).transpose(1, 2)

    def forward(self, x, valid):
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(D_MODEL // N_HEADS)
        scores = scores.masked_fill(~valid[:, None, None, :], float("-inf"))
        context = torch.softmax(scores, dim=-1) @ v
        return self.out(context.transpose(1, 2).flatten(2))


class EncoderLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(D_MODEL)
        self.attn = SelfAttention()
        self.norm2 = torch.nn.LayerNorm(D_MODEL)
        self.fc1 = torch.nn.Linear(D_MODEL, D_FF)
        self.fc2 = torch.nn.Linear(D_FF, D_MODEL)

    def forward(self, x, valid):
        x = x + self.attn(self.norm1(x), valid)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.word = torch.nn.Embedding(VOCAB, D_MODEL)
        self.position = torch.nn.Parameter(0.1 * torch.randn(MAX_LEN, D_MODEL))
        self.layers = torch.nn.ModuleList([EncoderLayer() for _ in range(N_LAYERS)])
        self.final_norm = torch.nn.LayerNorm(D_MODEL)
        self.tagger = torch.nn.Linear(D_MODEL, NUM_TAGS)

    def forward(self, tokens, valid):
        x = self.word(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, valid)
        return self.tagger(self.final_norm(x))


def left():
    torch.manual_seed(100)
    model = Tagger()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.05)

    def loss_fn(tokens, valid, tags):
        logits = model(tokens, valid)
        return F.cross_entropy(
            logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORE, label_smoothing=SMOOTHING
        )

    batch = map(torch.as_tensor, load_sentences())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return stablenum_torch.program(loss_fn, *batch, model=model, optimizer=optimizer)


class FusedAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(D_MODEL, 3 * D_MODEL)
        self.out = torch.nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x, valid):
        parts = self.qkv(x).unflatten(-1, (3, N_HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=valid[:, None, None, :])
        return self.out(mixed.transpose(1, 2).flatten(2))


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(D_MODEL)
        self.attention = FusedAttention()
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(D_MODEL),
            torch.nn.Linear(D_MODEL, D_FF),
            torch.nn.GELU(),
            torch.nn.Linear(D_FF, D_MODEL),
        )

    def forward(self, x, valid):
        x = x + self.attention(self.attention_norm(x), valid)
        return x + self.mlp(x)


class FusedTagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.word = torch.nn.Embedding(VOCAB, D_MODEL)
        self.position = torch.nn.Parameter(torch.zeros(MAX_LEN, D_MODEL))
        self.encoders = torch.nn.ModuleList([Encoder() for _ in range(N_LAYERS)])
        self.norm = torch.nn.LayerNorm(D_MODEL)
        self.head = torch.nn.Linear(D_MODEL, NUM_TAGS)

    def forward(self, tokens, valid):
        positions = torch.arange(tokens.shape[1])
        x = self.word(tokens) + self.position[positions]
        for encoder in self.encoders:
            x = encoder(x, valid)
        return self.head(self.norm(x))


def right():
    torch.manual_seed(7)
    tagger = FusedTagger()

    def loss_fn(tokens, valid, tags):
        scores = tagger(tokens, valid).transpose(1, 2)
        return F.cross_entropy(scores, tags, ignore_index=IGNORE, label_smoothing=SMOOTHING)

    batch = map(torch.as_tensor, load_sentences())
    adam = torch.optim.Adam(tagger.parameters(), lr=1e-3)
    return stablenum_torch.program(loss_fn, *batch, model=tagger, optimizer=adam)
