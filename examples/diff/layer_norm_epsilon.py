"""A transformer block ported from PyTorch to flax nnx. The two layer norms do not compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import nn

import stablenum_jax
import stablenum_torch

WIDTH, WIDE, HEADS = 32, 128, 4
x = np.random.default_rng(0).normal(size=(2, 8, WIDTH)).astype(np.float32)
y = np.roll(x, -1, axis=1)


class Block(nn.Module):
    """The original."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        up, down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Port(nnx.Module):
    """The port."""

    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDE, rngs=rngs)
        self.down = nnx.Linear(WIDE, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=False))


def left():
    torch.manual_seed(0)
    model = Block()

    def loss_fn(x, y):
        return nn.functional.mse_loss(model(x), y)

    return stablenum_torch.program(loss_fn, *map(torch.tensor, (x, y)), model=model)


def right():
    def loss_fn(model, x, y):
        return jnp.square(model(x) - y).mean()

    return stablenum_jax.program(loss_fn, Port(nnx.Rngs(0)), x, y)
