"""
Named-entity tagger with a small pre-norm transformer encoder.
First half: reference (PyTorch). Second half: port (Flax linen).
"""
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
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
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORE, label_smoothing=SMOOTHING)

    batch = map(torch.as_tensor, load_sentences())
    return stablenum_torch.program(loss_fn, *batch, model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))


class Attention(nn.Module):
    heads: int

    def split(self, x):
        b, t, d = x.shape
        return x.reshape(b, t, self.heads, d // self.heads).swapaxes(1, 2)

    @nn.compact
    def __call__(self, x, valid):
        d = x.shape[-1]
        query = self.split(nn.Dense(d, name="q")(x))
        key = self.split(nn.Dense(d, name="k")(x))
        value = self.split(nn.Dense(d, name="v")(x))
        logits = jnp.einsum("bhqd,bhkd->bhqk", query, key) / np.sqrt(d // self.heads)
        logits = jnp.where(valid[:, None, None, :], logits, -1e9)
        weights = jax.nn.softmax(logits, axis=-1)
        mixed = jnp.einsum("bhqk,bhkd->bqhd", weights, value)
        return nn.Dense(d, name="out")(mixed.reshape(x.shape))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, valid):
        h = nn.LayerNorm(epsilon=1e-5, name="norm1")(x)
        x = x + Attention(N_HEADS, name="attn")(h, valid)
        h = nn.LayerNorm(epsilon=1e-5, name="norm2")(x)
        h = nn.gelu(nn.Dense(D_FF, name="fc1")(h), approximate=False)
        return x + nn.Dense(D_MODEL, name="fc2")(h)


class TaggerModel(nn.Module):
    @nn.compact
    def __call__(self, tokens, valid):
        position = self.param("position", nn.initializers.normal(0.1), (MAX_LEN, D_MODEL))
        x = nn.Embed(VOCAB, D_MODEL, name="word")(tokens) + position[: tokens.shape[1]]
        for i in range(N_LAYERS):
            x = Layer(name=f"layer_{i}")(x, valid)
        x = nn.LayerNorm(epsilon=1e-5, name="final_norm")(x)
        return nn.Dense(NUM_TAGS, name="tagger")(x)


def tagging_loss(params, tokens, valid, tags):
    logits = TaggerModel().apply({"params": params}, tokens, valid)
    keep = tags != IGNORE
    onehot = jax.nn.one_hot(jnp.where(keep, tags, 0), NUM_TAGS)
    target = (1.0 - SMOOTHING) * onehot + SMOOTHING / NUM_TAGS
    per_token = optax.softmax_cross_entropy(logits, target)
    return jnp.sum(per_token * keep) / jnp.sum(keep)


def right():
    batch = [jnp.asarray(a) for a in load_sentences()]
    key, noise_key = jax.random.split(jax.random.key(1))
    params = TaggerModel().init(key, *batch[:2])["params"]
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(noise_key, len(leaves))
    leaves = [p + 0.05 * jax.random.normal(k, p.shape) if p.ndim == 1 else p for p, k in zip(leaves, keys)]
    return stablenum_jax.program(tagging_loss, treedef.unflatten(leaves), *batch, optimizer=optax.adam(1e-3))
