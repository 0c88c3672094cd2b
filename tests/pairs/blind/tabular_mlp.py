"""Price regression on tabular features: residual gated MLP in PyTorch, ported to Equinox."""
from typing import List

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

NUM_FEATURES, NUM_DISTRICTS, DISTRICT_DIM = 10, 7, 6
WIDTH, HIDDEN, DEPTH = 24, 32, 2


def make_batch():
    rng = np.random.default_rng(7)
    features = rng.normal(size=(8, NUM_FEATURES)).astype(np.float32)
    district = rng.integers(0, NUM_DISTRICTS, size=(8,))
    price = rng.normal(scale=1.5, size=(8,)).astype(np.float32)
    weight = rng.uniform(0.5, 2.0, size=(8,)).astype(np.float32)
    return features, district, price, weight


# ---------------------------------------------------------------- PyTorch
class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(1.0 + 0.1 * torch.randn(dim))

    def forward(self, x):
        ms = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(ms + self.eps) * self.weight


class GatedBlock(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        value, gate = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(value * F.gelu(gate))


class PriceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.district = nn.Embedding(NUM_DISTRICTS, DISTRICT_DIM)
        self.stem = nn.Linear(NUM_FEATURES + DISTRICT_DIM, WIDTH)
        self.stem_norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(GatedBlock(WIDTH, HIDDEN) for _ in range(DEPTH))
        self.out_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        for norm in (self.stem_norm, self.out_norm):
            nn.init.normal_(norm.weight, mean=1.0, std=0.1)
            nn.init.normal_(norm.bias, std=0.1)

    def forward(self, features, district):
        x = torch.cat([features, self.district(district)], dim=-1)
        x = F.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.out_norm(x)).squeeze(-1)


def left():
    torch.manual_seed(0)
    model = PriceNet()

    def loss_fn(features, district, price, weight):
        err = F.huber_loss(model(features, district), price, reduction="none", delta=1.0)
        return (weight * err).sum() / weight.sum()

    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    batch = [torch.from_numpy(a) for a in make_batch()]
    return stablenum_torch.program(loss_fn, *batch, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- Equinox
class RootMeanSquare(eqx.Module):
    scale: jax.Array
    eps: float = eqx.field(static=True)

    def __init__(self, dim, *, key, eps=1e-5):
        self.scale = 1.0 + 0.1 * jax.random.normal(key, (dim,))
        self.eps = eps

    def __call__(self, x):
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return self.scale * (x * jax.lax.rsqrt(mean_square + self.eps))


class Block(eqx.Module):
    norm: RootMeanSquare
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, dim, hidden, *, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.norm = RootMeanSquare(dim, key=k1)
        self.up = eqx.nn.Linear(dim, 2 * hidden, key=k2)
        self.down = eqx.nn.Linear(hidden, dim, key=k3)

    def __call__(self, x):
        h = self.up(self.norm(x))
        value, gate = jnp.split(h, 2)
        return x + self.down(value * jax.nn.gelu(gate, approximate=False))


class PriceModel(eqx.Module):
    district: eqx.nn.Embedding
    stem: eqx.nn.Linear
    stem_norm: eqx.nn.LayerNorm
    blocks: List[Block]
    out_norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5 + DEPTH)
        self.district = eqx.nn.Embedding(NUM_DISTRICTS, DISTRICT_DIM, key=keys[0])
        self.stem = eqx.nn.Linear(NUM_FEATURES + DISTRICT_DIM, WIDTH, key=keys[1])
        self.stem_norm = noisy_layer_norm(keys[2])
        self.out_norm = noisy_layer_norm(keys[3])
        self.head = eqx.nn.Linear(WIDTH, "scalar", key=keys[4])
        self.blocks = [Block(WIDTH, HIDDEN, key=k) for k in keys[5:]]

    def __call__(self, features, district):
        x = jnp.concatenate([features, self.district(district)])
        x = jax.nn.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.out_norm(x))


def noisy_layer_norm(key):
    k1, k2 = jax.random.split(key)
    values = (1.0 + 0.1 * jax.random.normal(k1, (WIDTH,)), 0.1 * jax.random.normal(k2, (WIDTH,)))
    return eqx.tree_at(lambda n: (n.weight, n.bias), eqx.nn.LayerNorm(WIDTH), values)


def weighted_huber(model, features, district, price, weight):
    prediction = jax.vmap(model)(features, district)
    return jnp.average(optax.huber_loss(prediction, price, delta=1.0), weights=weight)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def right():
    model = PriceModel(jax.random.key(11))
    optimizer = optax.adamw(2e-3, weight_decay=0.05, mask=is_matrix)
    return stablenum_jax.program(weighted_huber, model, *map(jnp.asarray, make_batch()), optimizer=optimizer)
