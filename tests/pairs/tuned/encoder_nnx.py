"""Sentence classifier: a transformer encoder with padding mask and mean pooling. PyTorch original and Flax NNX port."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F
from flax import nnx

VOCAB, LENGTH, DIM, HEADS, HIDDEN, CLASSES, LAYERS = 40, 9, 24, 4, 48, 5, 2


def make_batch():
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, VOCAB, size=(5, LENGTH))
    lengths = np.array([9, 6, 4, 8, 7])
    valid = np.arange(LENGTH)[None, :] < lengths[:, None]
    tokens = np.where(valid, tokens, 0)
    labels = rng.integers(0, CLASSES, size=5)
    return tokens, valid, labels


# ---------------------------------------------------------------- PyTorch


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def split(self, x):
        b, t, d = x.shape
        return x.view(b, t, self.heads, d // self.heads).transpose(1, 2)

    def forward(self, x, valid):
        b, t, d = x.shape
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-2, -1)) / (d // self.heads) ** 0.5
        scores = scores.masked_fill(~valid[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        context = torch.matmul(weights, v)
        merged = context.transpose(1, 2).reshape(b, t, d)
        return self.out(merged)


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attn = SelfAttention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x, valid):
        attended = self.attn(x, valid)
        x = self.norm1(x + attended)
        hidden = F.gelu(self.up(x))
        return self.norm2(x + self.down(hidden))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList([EncoderLayer(DIM, HEADS, HIDDEN) for _ in range(LAYERS)])
        self.classifier = nn.Linear(DIM, CLASSES)

    def forward(self, tokens, valid):
        x = self.tokens(tokens) * DIM**0.5
        x = x + self.positions.weight
        for layer in self.layers:
            x = layer(x, valid)
        keep = valid.unsqueeze(-1).to(x.dtype)
        pooled = (x * keep).sum(dim=1) / keep.sum(dim=1)
        return self.classifier(pooled)


def left():
    torch.manual_seed(4)
    model = Encoder()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    tokens, valid, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(tokens, valid, labels):
        logits = model(tokens, valid)
        return F.cross_entropy(logits, labels, label_smoothing=0.1)

    return stablenum_torch.program(loss_fn, tokens, valid, labels, model=model)


# ---------------------------------------------------------------- NNX


class MultiHeadAttention(nnx.Module):
    def __init__(self, dim, heads, rngs):
        self.heads, self.head_dim = heads, dim // heads
        self.q = nnx.Linear(dim, dim, rngs=rngs)
        self.k = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(dim, dim, rngs=rngs)
        self.o = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, x, valid):
        batch, length, dim = x.shape
        shape = (batch, length, self.heads, self.head_dim)
        q = self.q(x).reshape(shape).swapaxes(1, 2)
        k = self.k(x).reshape(shape).swapaxes(1, 2)
        v = self.v(x).reshape(shape).swapaxes(1, 2)
        logits = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(self.head_dim)
        masked = jnp.where(valid[:, None, None, :], logits, -1e9)
        probs = jax.nn.softmax(masked, axis=-1)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", probs, v)
        joined = mixed.swapaxes(1, 2).reshape(batch, length, dim)
        return self.o(joined)


class Layer(nnx.Module):
    def __init__(self, dim, heads, hidden, rngs):
        self.attn = MultiHeadAttention(dim, heads, rngs)
        self.ln1 = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.ln2 = nnx.LayerNorm(dim, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(dim, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, dim, rngs=rngs)

    def __call__(self, x, valid):
        y = x + self.attn(x, valid)
        x = self.ln1(y)
        h = nnx.gelu(self.up(x), approximate=False)
        y = x + self.down(h)
        return self.ln2(y)


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, DIM)))
        self.layers = nnx.List([Layer(DIM, HEADS, HIDDEN, rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(DIM, CLASSES, rngs=rngs)

    def __call__(self, tokens, valid):
        embedded = self.embed.embedding[tokens] * np.sqrt(DIM)
        x = embedded + self.positions[...]
        for layer in self.layers:
            x = layer(x, valid)
        total = jnp.sum(x, axis=1, where=valid[:, :, None])
        mean = total / jnp.sum(valid, axis=1, keepdims=True)
        return self.head(mean)


def smoothed_cross_entropy(logits, labels, smoothing=0.1):
    targets = jax.nn.one_hot(labels, CLASSES, dtype=logits.dtype)
    targets = targets * (1.0 - smoothing) + smoothing / CLASSES
    losses = optax.softmax_cross_entropy(logits, targets)
    return jnp.mean(losses)


def right():
    model = Classifier(nnx.Rngs(8))
    state = nnx.state(model, nnx.Param)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    noisy = [p + 0.05 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys)]
    nnx.update(model, treedef.unflatten(noisy))
    tokens, valid, labels = (jnp.asarray(a) for a in make_batch())

    def loss_fn(model, tokens, valid, labels):
        return smoothed_cross_entropy(model(tokens, valid), labels)

    return stablenum_jax.program(loss_fn, model, tokens, valid, labels)
