"""Two-tower retrieval: nn.EmbeddingBag in PyTorch, plain functions on a dictionary of parameters in JAX.

In-batch softmax with the log-q correction; some items of the last batch serve as further negatives.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

ITEMS, TAGS, DIM, OUT, COUNTERS = 40, 15, 10, 12, 4
USERS, OLD, HISTORY, PAD = 12, 5, 6, 0
TEMPERATURE = 0.2
LR, BETA1, BETA2, EPS = 2e-3, 0.9, 0.999, 1e-8


def make_batch():
    """The items are those of the users, followed by the old ones; their tags are a ragged list. log_q: of the expected counts."""
    rng = np.random.default_rng(13)
    history = rng.integers(1, ITEMS, (USERS, HISTORY))
    history[np.arange(HISTORY) >= rng.integers(1, HISTORY + 1, (USERS, 1))] = PAD
    counters = rng.poisson((1, 5, 20, 100), (USERS, COUNTERS))
    items = rng.integers(1, ITEMS, USERS + OLD)
    items[7], items[USERS + 1] = items[2], items[4]
    counts = rng.integers(1, 5, USERS + OLD)
    offsets = np.cumsum(counts) - counts
    tags = rng.integers(0, TAGS, counts.sum())
    tag_weights = rng.uniform(0.2, 2.0, counts.sum())
    popularity = rng.dirichlet(0.5 * np.ones(ITEMS)) + 1e-3
    arrays = (history, counters, items, tags, offsets, tag_weights, np.log(USERS * popularity))
    return [a.astype(np.float32 if a.dtype.kind == "f" else np.int32) for a in arrays]


# ------------------------------------------------------------- PyTorch


class UserTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.history = nn.EmbeddingBag(ITEMS, DIM, mode="mean", padding_idx=PAD)
        self.mlp = nn.Sequential(nn.Linear(DIM + COUNTERS, 24), nn.ReLU(), nn.Dropout(0.0), nn.Linear(24, OUT))

    def forward(self, history, counters):
        x = torch.cat([self.history(history), torch.log1p(counters)], dim=1)
        return F.normalize(self.mlp(x), dim=-1)


class ItemTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(ITEMS, DIM)
        self.tags = nn.EmbeddingBag(TAGS, DIM, mode="sum")
        self.mlp = nn.Sequential(nn.Linear(2 * DIM, 20), nn.ReLU(), nn.Dropout(0.0), nn.Linear(20, OUT))

    def forward(self, items, tags, offsets, tag_weights):
        bags = self.tags(tags, offsets, per_sample_weights=tag_weights)
        return F.normalize(self.mlp(torch.cat([self.item(items), bags], dim=1)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_tower = UserTower()
        self.item_tower = ItemTower()

    def forward(self, history, counters, items, tags, offsets, tag_weights, log_q):
        users = self.user_tower(history, counters)
        vectors = self.item_tower(items, tags, offsets, tag_weights)
        vectors = torch.cat([vectors[:USERS], vectors[USERS:].detach()])
        logits = users @ vectors.T / TEMPERATURE - log_q[items]
        same = items[:USERS, None] == items[None, :]
        same.fill_diagonal_(False)
        return logits.masked_fill(same, float("-inf"))


# ------------------------------------------------------------- JAX


def dense(key, fan_in, fan_out):
    k1, k2 = jax.random.split(key)
    bound = fan_in**-0.5
    return {
        "kernel": jax.random.uniform(k1, (fan_in, fan_out), minval=-bound, maxval=bound),
        "bias": jax.random.uniform(k2, (fan_out,), minval=-bound, maxval=bound),
    }


def init_params(key):
    keys = jax.random.split(key, 7)
    return {
        "history_table": jax.random.normal(keys[0], (ITEMS, DIM)),
        "item_table": jax.random.normal(keys[1], (ITEMS, DIM)),
        "tag_table": jax.random.normal(keys[2], (TAGS, DIM)),
        "user": [dense(keys[3], DIM + COUNTERS, 24), dense(keys[4], 24, OUT)],
        "item": [dense(keys[5], 2 * DIM, 20), dense(keys[6], 20, OUT)],
    }


def mlp(layers, x):
    for layer in layers[:-1]:
        x = jnp.maximum(x @ layer["kernel"] + layer["bias"], 0.0)
    return x @ layers[-1]["kernel"] + layers[-1]["bias"]


def unit(x):
    norm = jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return x / jnp.maximum(norm, 1e-12)


def embed_users(params, history, counters):
    real = (history != PAD)[..., None]
    taken = jnp.sum(jnp.take(params["history_table"], history, axis=0) * real, axis=1)
    mean = taken / jnp.maximum(real.sum(axis=1), 1)
    return unit(mlp(params["user"], jnp.concatenate([mean, jnp.log(1.0 + counters)], axis=1)))


def embed_items(params, items, tags, offsets, tag_weights):
    owner = jnp.searchsorted(offsets, jnp.arange(tags.shape[0]), side="right") - 1
    rows = params["tag_table"][tags] * tag_weights[:, None]
    bags = jax.ops.segment_sum(rows, owner, num_segments=items.shape[0])
    features = jnp.concatenate([params["item_table"][items], bags], axis=-1)
    return unit(mlp(params["item"], features))


def retrieval_loss(params, history, counters, items, tags, offsets, tag_weights, log_q):
    u = embed_users(params, history, counters)
    v = embed_items(params, items, tags, offsets, tag_weights)
    fresh, old = v[:USERS], jax.lax.stop_gradient(v[USERS:])
    similarity = jnp.concatenate([u @ fresh.T, u @ old.T], axis=1)
    scores = similarity / TEMPERATURE - log_q[items][None, :]
    n, m = scores.shape
    accidental = (items[:n, None] == items[None, :]) & ~jnp.eye(n, m, dtype=bool)
    scores = jnp.where(accidental, -1e9, scores)
    positives = jnp.diagonal(scores)
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - positives)


class Moments(NamedTuple):
    count: jax.Array
    m: optax.Updates
    v: optax.Updates


def adam(lr, b1, b2, eps):
    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Moments(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(grads, state, params=None):
        t = state.count + 1
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.v, grads)
        m_hat = jax.tree.map(lambda m: m / (1 - b1**t), m)
        v_hat = jax.tree.map(lambda v: v / (1 - b2**t), v)
        steps = jax.tree.map(lambda m, v: -lr * m / (jnp.sqrt(v) + eps), m_hat, v_hat)
        return steps, Moments(t, m, v)

    return optax.GradientTransformation(init, update)


# ------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS)
    history, counters, items, tags, offsets, tag_weights, log_q = map(torch.tensor, make_batch())

    def loss_fn(*batch):
        return F.cross_entropy(model(*batch), torch.arange(USERS))

    return stablenum_torch.program(
        loss_fn,
        history.long(),
        counters.float(),
        items.long(),
        tags.long(),
        offsets.long(),
        tag_weights,
        log_q,
        model=model,
        optimizer=optimizer,
    )


def right():
    params = init_params(jax.random.key(9))
    history, counters, *rest = map(jnp.asarray, make_batch())
    optimizer = adam(LR, BETA1, BETA2, EPS)
    return stablenum_jax.program(
        retrieval_loss, params, history, counters.astype(jnp.float32), *rest, optimizer=optimizer
    )
