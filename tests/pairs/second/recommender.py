"""Two-tower recommender with quantised item codes and a pairwise ranking loss: PyTorch and flax nnx."""
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from flax import nnx

import stablenum_jax
import stablenum_torch

USERS, ITEMS, DENSE = 12, 15, 5
EMBED, WIDTH, HIDDEN = 8, 12, 24
LEVELS = 4
BATCH, NEGATIVES = 8, 3


def make_batch():
    rng = np.random.default_rng(41)
    users = rng.integers(0, USERS, size=BATCH)
    dense = (rng.normal(size=(BATCH, DENSE)) * [1, 5, 0.5, 20, 2] + [0, 3, -1, 40, 1]).astype(np.float32)
    positives = rng.integers(0, ITEMS, size=BATCH)
    negatives = rng.integers(0, ITEMS, size=(BATCH, NEGATIVES))
    return users, dense, positives, negatives


# ---------------------------------------------------------------- PyTorch


def standardise(x):
    return (x - x.mean(dim=0)) / (x.std(dim=0) + 1e-6)


class Block(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias=False)
        self.norm = nn.BatchNorm1d(n_out)

    def forward(self, x):
        h = self.norm(self.linear(x))
        return F.gelu(h)


class UserTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(USERS, EMBED)
        self.blocks = nn.ModuleList([Block(EMBED + DENSE, HIDDEN), Block(HIDDEN, HIDDEN)])
        self.out = nn.Linear(HIDDEN, WIDTH)

    def forward(self, users, dense):
        x = torch.cat([self.table(users), standardise(dense)], dim=-1)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class ItemTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ITEMS, WIDTH)
        self.bias = nn.Embedding(ITEMS, 1)

    def forward(self, items):
        code = torch.tanh(self.table(items))
        quantised = torch.round(code * LEVELS) / LEVELS
        code = code + (quantised - code).detach()
        return code, self.bias(items).squeeze(-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_tower = UserTower()
        self.item_tower = ItemTower()

    def forward(self, users, dense, items):
        query = self.user_tower(users, dense)
        code, bias = self.item_tower(items)
        return torch.matmul(code, query.unsqueeze(-1)).squeeze(-1) / WIDTH**0.5 + bias


def left():
    torch.manual_seed(8)
    model = TwoTower().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    users, dense, positives, negatives = (torch.as_tensor(part) for part in make_batch())

    def loss_fn(users, dense, positives, negatives):
        scores = model(users, dense, torch.cat([positives[:, None], negatives], dim=1))
        margins = scores[:, :1] - scores[:, 1:]
        return -F.logsigmoid(margins).mean()

    return stablenum_torch.program(loss_fn, users, dense, positives, negatives, model=model)


# ---------------------------------------------------------------- flax nnx


@jax.custom_vjp
def gather_rows(table, ids):
    return jnp.take(table, ids, axis=0)


def gather_rows_forward(table, ids):
    return gather_rows(table, ids), (ids, table.shape)


def gather_rows_backward(residuals, g):
    ids, shape = residuals
    dense_gradient = jnp.zeros(shape, g.dtype).at[ids].add(g)
    return dense_gradient, None


gather_rows.defvjp(gather_rows_forward, gather_rows_backward)


def quantise(x):
    nearest = jnp.round(x * LEVELS) / LEVELS
    return jax.lax.stop_gradient(nearest) + (x - jax.lax.stop_gradient(x))


class HiddenBlock(nnx.Module):
    def __init__(self, n_in, n_out, rngs):
        self.linear = nnx.Linear(n_in, n_out, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(n_out, use_running_average=False, momentum=0.9, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.linear(x))
        return nnx.gelu(x, approximate=False)


class UserEncoder(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (USERS, EMBED)))
        self.blocks = nnx.List([HiddenBlock(EMBED + DENSE, HIDDEN, rngs), HiddenBlock(HIDDEN, HIDDEN, rngs)])
        self.out = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, users, dense):
        spread = jnp.std(dense, axis=0, ddof=1)
        dense = (dense - jnp.mean(dense, axis=0)) / (spread + 1e-6)
        x = jnp.concatenate([self.table[...][users], dense], axis=-1)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class ItemEncoder(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (ITEMS, WIDTH)))
        self.bias = nnx.Param(jax.random.normal(rngs.params(), (ITEMS,)))

    def __call__(self, items):
        code = quantise(jnp.tanh(gather_rows(self.table[...], items)))
        return code, self.bias[...][items]


class Recommender(nnx.Module):
    def __init__(self, rngs):
        self.user_encoder = UserEncoder(rngs)
        self.item_encoder = ItemEncoder(rngs)

    def __call__(self, users, dense, items):
        query = self.user_encoder(users, dense) * WIDTH**-0.5
        code, bias = self.item_encoder(items)
        return jnp.einsum("bd,bnd->bn", query, code) + bias


def ranking_loss(model, users, dense, positives, negatives):
    items = jnp.concatenate([positives[:, None], negatives], axis=1)
    scores = model(users, dense, items)
    wrong = scores[:, 1:] - scores[:, :1]
    return jnp.mean(jax.nn.softplus(wrong))


def right():
    model = Recommender(nnx.Rngs(9))
    rng = np.random.default_rng(10)
    for block in model.user_encoder.blocks:
        for vector in (block.norm.scale, block.norm.bias):
            vector[...] = vector[...] + jnp.asarray(0.1 * rng.normal(size=HIDDEN), jnp.float32)
    model.user_encoder.out.bias[...] = jnp.asarray(0.1 * rng.normal(size=WIDTH), jnp.float32)
    batch = (jnp.asarray(part) for part in make_batch())
    return stablenum_jax.program(ranking_loss, model, *batch)
