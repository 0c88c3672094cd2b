"""Tabular classifier with an auxiliary regression: PyTorch on batches, equinox with vmap over rows."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_jax
import stablenum_torch

CARDS = (7, 4, 11)
EMB, NUMERIC, WIDTH, BLOCKS = 6, 5, 20, 2
POS_WEIGHT = 3.0


def make_batch():
    rng = np.random.default_rng(21)
    cats = np.stack([rng.integers(0, c, 16) for c in CARDS], axis=1).astype(np.int32)
    nums = (rng.normal(size=(16, NUMERIC)) * np.array([1, 10, 0.1, 3, 50]) + 2.0).astype(np.float32)
    churned = (rng.random(16) < 0.3).astype(np.float32)
    spend = (2.0 * rng.normal(size=16)).astype(np.float32)
    return cats, nums, churned, spend


# ------------------------------------------------------------- PyTorch


class ResidualBlock(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear_in = nn.Linear(dim, hidden)
        self.linear_out = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.linear_out(F.silu(self.linear_in(self.norm(x))))


class TabularNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(sum(CARDS), EMB)
        self.register_buffer("offsets", torch.tensor([0, *CARDS[:-1]]).cumsum(0))
        self.first = nn.Linear(NUMERIC + EMB * len(CARDS), WIDTH)
        self.blocks = nn.Sequential(*(ResidualBlock(WIDTH, 2 * WIDTH) for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.aux_head = nn.Linear(WIDTH, 1)

    def forward(self, cats, nums):
        nums = (nums - nums.mean(0)) / (nums.std(0) + 1e-6)
        emb = self.embedding(cats + self.offsets).flatten(1)
        h = self.first(torch.cat([nums, emb], dim=1))
        h = F.relu(self.norm(self.blocks(h)))
        return self.head(h).squeeze(-1), self.aux_head(h.detach()).squeeze(-1)


# ------------------------------------------------------------- JAX


class Norm(eqx.Module):
    gain: jax.Array
    shift: jax.Array

    def __init__(self, dim):
        self.gain = jnp.ones(dim)
        self.shift = jnp.zeros(dim)

    def __call__(self, x):
        centred = x - jnp.mean(x)
        variance = jnp.mean(centred**2)
        return centred / jnp.sqrt(variance + 1e-5) * self.gain + self.shift


class Residual(eqx.Module):
    norm: Norm
    expand: eqx.nn.Linear
    contract: eqx.nn.Linear

    def __init__(self, dim, hidden, *, key):
        k1, k2 = jax.random.split(key)
        self.norm = Norm(dim)
        self.expand = eqx.nn.Linear(dim, hidden, key=k1)
        self.contract = eqx.nn.Linear(hidden, dim, key=k2)

    def __call__(self, x):
        y = jax.nn.silu(self.expand(self.norm(x)))
        return self.contract(y) + x


class RowModel(eqx.Module):
    table: jax.Array
    stem: eqx.nn.Linear
    blocks: list
    final_norm: Norm
    churn: eqx.nn.Linear
    spend: eqx.nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key, BLOCKS + 4)
        self.table = jax.random.normal(keys[0], (sum(CARDS), EMB))
        self.stem = eqx.nn.Linear(NUMERIC + EMB * len(CARDS), WIDTH, key=keys[1])
        self.churn = eqx.nn.Linear(WIDTH, "scalar", key=keys[2])
        self.spend = eqx.nn.Linear(WIDTH, "scalar", key=keys[3])
        self.blocks = [Residual(WIDTH, 2 * WIDTH, key=k) for k in keys[4:]]
        self.final_norm = Norm(WIDTH)

    def __call__(self, row_cats, row_nums):
        starts = np.cumsum(CARDS) - np.array(CARDS)
        looked_up = self.table[row_cats + starts]
        x = self.stem(jnp.concatenate([row_nums, jnp.ravel(looked_up)]))
        for block in self.blocks:
            x = block(x)
        x = jax.nn.relu(self.final_norm(x))
        return self.churn(x), self.spend(jax.lax.stop_gradient(x))


def standardise(nums):
    return (nums - jnp.mean(nums, axis=0)) / (jnp.std(nums, axis=0, ddof=1) + 1e-6)


def weighted_bce(logits, labels):
    weights = jnp.where(labels > 0.5, POS_WEIGHT, 1.0)
    losses = optax.sigmoid_binary_cross_entropy(logits, labels)
    return jnp.sum(weights * losses) / labels.size


# ------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = TabularNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-3)
    bce = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(POS_WEIGHT))
    cats, nums, churned, spend = make_batch()

    def loss_fn(cats, nums, churned, spend):
        logits, predicted = model(cats, nums)
        return bce(logits, churned) + 0.5 * F.huber_loss(predicted, spend, delta=1.0)

    return stablenum_torch.program(
        loss_fn,
        torch.tensor(cats).long(),
        torch.tensor(nums),
        torch.tensor(churned),
        torch.tensor(spend),
        model=model,
        optimizer=optimizer,
    )


def right():
    model = RowModel(key=jax.random.key(2))

    def loss_fn(model, cats, nums, churned, spend):
        logits, predicted = jax.vmap(model)(cats, standardise(nums))
        regression = optax.losses.huber_loss(predicted, spend, delta=1.0)
        return weighted_bce(logits, churned) + 0.5 * jnp.mean(regression)

    optimizer = optax.chain(optax.add_decayed_weights(1e-3), optax.adam(2e-3))
    return stablenum_jax.program(loss_fn, model, *map(jnp.asarray, make_batch()), optimizer=optimizer)
