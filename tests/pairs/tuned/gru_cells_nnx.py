"""Bidirectional GRU sequence regression: nn.GRUCell in a python loop against an NNX cell with separate gate layers."""
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

INPUTS, HIDDEN, STEPS = 6, 12, 7


def make_batch():
    rng = np.random.default_rng(90)
    series = rng.normal(size=(5, STEPS, INPUTS)).astype(np.float32)
    target = np.tanh(series.sum(axis=-1)).astype(np.float32)
    return series, target


# ---------------------------------------------------------------- PyTorch


class BiGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.forward_cell = nn.GRUCell(INPUTS, HIDDEN)
        self.backward_cell = nn.GRUCell(INPUTS, HIDDEN)
        self.score = nn.Linear(2 * HIDDEN, 1)

    def scan(self, cell, series, order):
        h = series.new_zeros(series.shape[0], HIDDEN)
        states = {}
        for t in order:
            h = cell(series[:, t], h)
            states[t] = h
        return torch.stack([states[t] for t in range(len(states))], dim=1)

    def forward(self, series):
        ahead = self.scan(self.forward_cell, series, range(STEPS))
        back = self.scan(self.backward_cell, series, reversed(range(STEPS)))
        both = torch.cat([ahead, back], dim=-1)
        return self.score(both).squeeze(-1)


def left():
    torch.manual_seed(22)
    model = BiGRU()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    series, target = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(series, target):
        return F.huber_loss(model(series), target, delta=0.7)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, amsgrad=False)
    return stablenum_torch.program(loss_fn, series, target, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- NNX


class GateCell(nnx.Module):
    """One linear layer per gate and per source."""

    def __init__(self, rngs):
        def pair():
            return nnx.Linear(INPUTS, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)

        self.reset_x, self.reset_h = pair()
        self.update_x, self.update_h = pair()
        self.new_x, self.new_h = pair()

    def __call__(self, h, x):
        reset = nnx.sigmoid(self.reset_x(x) + self.reset_h(h))
        update = nnx.sigmoid(self.update_x(x) + self.update_h(h))
        candidate = jnp.tanh(self.new_x(x) + reset * self.new_h(h))
        return (1.0 - update) * candidate + update * h


class BiRecurrent(nnx.Module):
    def __init__(self, rngs):
        self.left_to_right = GateCell(rngs)
        self.right_to_left = GateCell(rngs)
        self.score_ahead = nnx.Linear(HIDDEN, 1, rngs=rngs)
        self.score_back = nnx.Linear(HIDDEN, 1, use_bias=False, rngs=rngs)

    def run(self, cell, series):
        h = jnp.zeros((series.shape[0], HIDDEN), series.dtype)
        states = []
        for t in range(series.shape[1]):
            h = cell(h, series[:, t])
            states.append(h)
        return jnp.stack(states, axis=1)

    def __call__(self, series):
        ahead = self.run(self.left_to_right, series)
        back = self.run(self.right_to_left, series[:, ::-1])[:, ::-1]
        score = self.score_ahead(ahead) + self.score_back(back)
        return score[..., 0]


def right():
    model = BiRecurrent(nnx.Rngs(23))
    leaves, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(24), len(leaves))
    nnx.update(model, treedef.unflatten([p + 0.1 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys)]))
    series, target = (jnp.asarray(a) for a in make_batch())

    def loss_fn(model, series, target):
        return optax.huber_loss(model(series), target, delta=0.7).mean()

    tx = optax.adamw(1e-2, weight_decay=0.01)
    return stablenum_jax.program(loss_fn, model, series, target, optimizer=tx)
