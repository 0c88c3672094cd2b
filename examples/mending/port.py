"""A small encoder in PyTorch and its port to JAX, with four mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stablenum_jax
import stablenum_torch

WIDTH, HEADS, CLASSES = 32, 4, 7


def batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 12, WIDTH)).astype(np.float32)
    return x, rng.integers(0, CLASSES, 8)


# --- the original, in PyTorch ------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, t, WIDTH))
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(x.mean(1))


def left():
    torch.manual_seed(0)
    model = Encoder()
    x, y = batch()

    def loss(x, y):
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    return stablenum_torch.program(loss, torch.tensor(x), torch.tensor(y), model=model, optimizer=optimizer)


# --- the port, in JAX --------------------------------------------------------------------------------------


def norm(p, x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-6) * p["scale"] + p["bias"]


def linear(p, x):
    return x @ p["kernel"] + p["bias"]


def encode(p, x):
    n, t, _ = x.shape
    qkv = linear(p["qkv"], norm(p["norm"], x)).reshape(n, t, 3, HEADS, -1)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / (WIDTH // HEADS) ** 0.5, axis=-2)
    x = x + linear(p["out"], (weights @ v).swapaxes(1, 2).reshape(n, t, WIDTH))
    x = x + linear(p["down"], jax.nn.gelu(linear(p["up"], x)))
    return linear(p["head"], x.mean(1))


def loss_of(p, x, y):
    targets = optax.smooth_labels(jax.nn.one_hot(y, CLASSES), 0.1)
    return optax.softmax_cross_entropy(encode(p, x), targets).mean()


def right():
    rng = np.random.default_rng(1)

    def layer(rows, columns):
        kernel = rng.normal(size=(rows, columns), scale=0.1)
        return {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.zeros(columns)}

    params = {
        "norm": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
        "qkv": layer(WIDTH, 3 * WIDTH),
        "out": layer(WIDTH, WIDTH),
        "up": layer(WIDTH, 4 * WIDTH),
        "down": layer(4 * WIDTH, WIDTH),
        "head": layer(WIDTH, CLASSES),
    }
    x, y = batch()
    optimizer = optax.adamw(1e-3)
    return stablenum_jax.program(loss_of, params, jnp.asarray(x), jnp.asarray(y), optimizer=optimizer)
