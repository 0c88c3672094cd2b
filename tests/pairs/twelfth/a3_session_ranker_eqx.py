"""Session-based ranking (GRU4Rec with list features): nn.GRU in PyTorch, a scanned cell in equinox; ListNet and pair loss."""

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

ITEMS, DIM, HIDDEN, FEATURES, LAYERS = 30, 10, 12, 4, 2
STEPS, CANDIDATES = 7, 6
STD_EPS, PAIR_WEIGHT = 1e-3, 0.5
LR, MOMENTUM = 1e-3, 0.9


def make_batch():
    """Sessions are padded with item 0 in front; a relevance of -1 means that nobody judged the item."""
    rng = np.random.default_rng(21)
    sessions = rng.integers(1, ITEMS, (4, STEPS))
    for row, n in zip(sessions, (0, 3, 1, 4)):
        row[:n] = 0
    candidates = np.stack([rng.permutation(np.arange(1, ITEMS))[:CANDIDATES] for _ in range(4)])
    features = rng.gamma(2.0, 1.5, (4, CANDIDATES, FEATURES))
    relevance = np.array(
        [[2, 0, 1, 0, -1, 0], [0, 3, 0, 1, 0, 2], [1, 0, -1, -1, 2, 0], [0, 0, 1, 0, 0, 3]]
    )
    return (
        sessions.astype(np.int64),
        candidates.astype(np.int64),
        features.astype(np.float32),
        relevance.astype(np.float32),
    )


# ---------------------------------------------------------------- PyTorch


class SessionRanker(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.gru = nn.GRU(DIM, HIDDEN, num_layers=LAYERS, batch_first=True)
        self.norm = nn.LayerNorm(HIDDEN)
        self.scorer = nn.Sequential(
            nn.Linear(HIDDEN + DIM + FEATURES, HIDDEN),
            nn.LeakyReLU(0.1),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, sessions, candidates, features):
        _, state = self.gru(self.items(sessions))
        user = self.norm(state[-1])
        mean, std = features.mean(1, keepdim=True), features.std(1, keepdim=True)
        features = (features - mean) / (std + STD_EPS)
        user = user.unsqueeze(1).expand(-1, candidates.shape[1], -1)
        joint = torch.cat([user, self.items(candidates), features], dim=-1)
        return self.scorer(joint).squeeze(-1)


def listnet(scores, relevance):
    hidden = relevance < 0
    target = F.softmax(relevance.masked_fill(hidden, float("-inf")), dim=1)
    log_probs = F.log_softmax(scores.masked_fill(hidden, -1e9), dim=1)
    return -(target * log_probs).sum(dim=1).mean()


def pair_logistic(scores, relevance):
    better = relevance.unsqueeze(2) > relevance.unsqueeze(1)  # [b, i, j]: i above j
    better &= (relevance >= 0).unsqueeze(1)
    margins = scores.unsqueeze(2) - scores.unsqueeze(1)
    return F.softplus(-margins[better]).mean()


# ---------------------------------------------------------------- JAX


class GRUCell(eqx.Module):
    """torch's formula, with its two bias vectors."""

    from_input: eqx.nn.Linear
    from_state: eqx.nn.Linear

    def __init__(self, n_in, n_hidden, key):
        k1, k2 = jax.random.split(key)
        self.from_input = eqx.nn.Linear(n_in, 3 * n_hidden, key=k1)
        self.from_state = eqx.nn.Linear(n_hidden, 3 * n_hidden, key=k2)

    def __call__(self, h, x):
        xr, xz, xn = jnp.split(self.from_input(x), 3)
        hr, hz, hn = jnp.split(self.from_state(h), 3)
        r = jax.nn.sigmoid(xr + hr)
        z = jax.nn.sigmoid(xz + hz)
        n = jnp.tanh(xn + r * hn)
        h = z * h + (1 - z) * n
        return h, h


class Ranker(eqx.Module):
    table: eqx.nn.Embedding
    cells: list
    user_norm: eqx.nn.LayerNorm
    mlp_in: eqx.nn.Linear
    mlp_out: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3 + LAYERS)
        self.table = eqx.nn.Embedding(ITEMS, DIM, key=keys[0])
        self.mlp_in = eqx.nn.Linear(HIDDEN + DIM + FEATURES, HIDDEN, key=keys[1])
        self.mlp_out = eqx.nn.Linear(HIDDEN, "scalar", key=keys[2])
        self.user_norm = eqx.nn.LayerNorm(HIDDEN)
        self.cells = [GRUCell(HIDDEN if i else DIM, HIDDEN, k) for i, k in enumerate(keys[3:])]

    def lookup(self, ids):
        vectors = jax.vmap(self.table)(ids)
        return jnp.where(ids[:, None] == 0, 0.0, vectors)

    def __call__(self, session, candidates, features):
        """One list."""
        sequence = self.lookup(session)
        for cell in self.cells:
            start = jnp.zeros(HIDDEN, sequence.dtype)
            last, sequence = jax.lax.scan(lambda h, x, cell=cell: cell(h, x), start, sequence)
        user = self.user_norm(last)
        centred = features - jnp.mean(features, axis=0)
        features = centred / (jnp.std(features, axis=0, ddof=1) + STD_EPS)

        def score(item, feature):
            y = self.mlp_in(jnp.concatenate([user, item, feature]))
            return self.mlp_out(jax.nn.leaky_relu(y, negative_slope=0.1))

        return jax.vmap(score)(self.lookup(candidates), features)


def list_loss(scores, relevance):
    judged = relevance >= 0
    target = jax.nn.softmax(jnp.where(judged, relevance, -jnp.inf))
    log_probs = jax.nn.log_softmax(jnp.where(judged, scores, -1e9))
    return -jnp.vdot(target, log_probs)


def pair_loss(scores, relevance):
    """Over all lists at once: every ordered pair, weighted 0 or 1."""
    above = (relevance[:, :, None] > relevance[:, None, :]) & (relevance[:, None, :] >= 0)
    gap = scores[:, :, None] - scores[:, None, :]
    return jnp.sum(jax.nn.softplus(-gap) * above) / jnp.sum(above)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = SessionRanker()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=LR, alpha=0.99, momentum=MOMENTUM)
    batch = [torch.from_numpy(a) for a in make_batch()]

    def loss_fn(sessions, candidates, features, relevance):
        scores = model(sessions, candidates, features)
        return listnet(scores, relevance) + PAIR_WEIGHT * pair_logistic(scores, relevance)

    return stablenum_torch.program(loss_fn, *batch, model=model, optimizer=optimizer)


def right():
    params, static = eqx.partition(Ranker(jax.random.key(2)), eqx.is_inexact_array)
    batch = [jnp.asarray(a) for a in make_batch()]

    def loss_fn(params, sessions, candidates, features, relevance):
        model = eqx.combine(params, static)
        scores = jax.vmap(model)(sessions, candidates, features)
        lists = jnp.mean(jax.vmap(list_loss)(scores, relevance))
        return lists + PAIR_WEIGHT * pair_loss(scores, relevance)

    tx = optax.rmsprop(LR, decay=0.99, eps=1e-8, eps_in_sqrt=False, momentum=MOMENTUM)
    return stablenum_jax.program(loss_fn, params, *batch, optimizer=tx)
