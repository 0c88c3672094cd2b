"""Decoder with interleaved rotary embeddings. PyTorch modules; plain JAX with stacked layers, lax.scan, complex rotation."""
import jax
import jax.numpy as jnp
import numpy as np
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, HEADS, LAYERS, THETA = 29, 24, 3, 3, 50.0
HEAD = DIM // HEADS


def make_batch():
    rng = np.random.default_rng(8)
    tokens = rng.integers(0, VOCAB, size=(3, 9))
    weights = (rng.random(size=(3, 8)) < 0.8).astype(np.float32)
    return tokens, weights


# ---------------------------------------------------------------- PyTorch


def rotate(x):
    """Rotates the pairs (0, 1), (2, 3), ... of the last axis."""
    length, width = x.shape[-2:]
    freqs = THETA ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angles = torch.arange(length, dtype=x.dtype)[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return rotated.flatten(-2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.v = nn.Linear(DIM, DIM, bias=False)
        self.o = nn.Linear(DIM, DIM, bias=False)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def attend(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q) / HEAD**0.5, rotate(k)
        scores = q @ k.transpose(-1, -2)
        future = torch.triu(torch.ones(t, t, dtype=torch.bool), diagonal=1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, t, DIM))

    def forward(self, x):
        h = self.norm(x)
        return x + self.attend(h) + self.down(F.relu(self.up(h)).square())


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def left():
    torch.manual_seed(18)
    model = Decoder()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    tokens, weights = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(tokens, weights):
        logits = model(tokens[:, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return (losses * weights).sum() / weights.sum()

    return stablenum_torch.program(loss_fn, tokens, weights, model=model)


# ---------------------------------------------------------------- JAX


def rotate_complex(x):
    """x: (batch, time, heads, width)."""
    time, width = x.shape[1], x.shape[-1]
    freqs = 1.0 / THETA ** (jnp.arange(0, width, 2, dtype=x.dtype) / width)
    turns = jnp.exp(1j * jnp.outer(jnp.arange(time), freqs))[:, None, :]
    z = jax.lax.complex(x[..., 0::2], x[..., 1::2]) * turns
    return jnp.stack([z.real, z.imag], axis=-1).reshape(x.shape)


def layer_norm(p, x):
    centered = x - x.mean(axis=-1, keepdims=True)
    return p["gain"] * centered / jnp.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5) + p["shift"]


def attention(p, h):
    q, k, v = jnp.einsum("btd,cdhe->cbthe", h, p["qkv"])
    scores = jnp.einsum("bqhe,bkhe->bhqk", rotate_complex(q), rotate_complex(k)) / np.sqrt(HEAD)
    bias = jnp.where(jnp.arange(h.shape[1])[:, None] >= jnp.arange(h.shape[1]), 0.0, -1e9)
    weights = jax.nn.softmax(scores + bias, axis=-1)
    return jnp.einsum("bhqk,bkhe,hed->bqd", weights, v, p["o"])


def layer(x, p):
    h = layer_norm(p, x)
    hidden = jnp.maximum(h @ p["up"] + p["up_b"], 0.0) ** 2
    return x + attention(p, h) + hidden @ p["down"] + p["down_b"], None


def loss_fn(params, tokens, weights):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x, _ = jax.lax.scan(layer, params["embed"][inputs], params["layers"])
    logits = x @ params["head"] + params["head_b"]
    correct = jnp.sum(jax.nn.one_hot(targets, VOCAB, dtype=x.dtype) * logits, axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - correct
    return jnp.vdot(losses, weights) / weights.sum()


def right():
    shapes = {"gain": (DIM,), "shift": (DIM,), "qkv": (3, DIM, HEADS, HEAD), "o": (HEADS, HEAD, DIM)}
    shapes |= {"up": (DIM, 2 * DIM), "up_b": (2 * DIM,), "down": (2 * DIM, DIM), "down_b": (DIM,)}
    keys = iter(jax.random.split(jax.random.key(70), 16))
    layers = {n: 0.15 * jax.random.normal(next(keys), (LAYERS, *s)) for n, s in shapes.items()}
    layers["gain"] = 1.0 + layers["gain"]
    params = {"layers": layers, "embed": jax.random.normal(next(keys), (VOCAB, DIM))}
    params["head"] = 0.2 * jax.random.normal(next(keys), (DIM, VOCAB))
    params["head_b"] = 0.2 * jax.random.normal(next(keys), (VOCAB,))
    tokens, weights = (jnp.asarray(a) for a in make_batch())
    return stablenum_jax.program(loss_fn, params, tokens, weights)
