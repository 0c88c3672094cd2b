"""Next-item recommender with a tabular user tower (gated fields, cross network, bag of tags) and a small
TransformerEncoder: torch.nn against flax.nnx, Adagrad against a chain of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F
from flax import nnx

import stablenum_jax
import stablenum_torch

ITEMS, TAGS, FIELDS = 18, 9, 6
DIM, HEADS, FF, LENGTH = 16, 2, 24, 6
TEMPERATURE, SMOOTHING = 0.2, 0.1
LR, LR_DECAY, DECAY, START, MAX_NORM = 0.05, 1e-3, 0.02, 0.1, 0.5


def make_batch():
    rng = np.random.default_rng(33)
    lengths = np.array([7, 4, 6, 3, 7])
    events = rng.integers(1, ITEMS, (5, LENGTH + 1))
    events[np.arange(LENGTH + 1) >= lengths[:, None]] = 0
    tags = rng.integers(1, TAGS, (5, 4))
    tags[np.arange(4) >= np.array([2, 4, 1, 3, 2])[:, None]] = 0
    fields = rng.normal(size=(5, FIELDS)) * 1.5 + 0.5
    return events, tags, fields.astype(np.float32)


# ---------------------------------------------------------------- PyTorch


class UserTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(FIELDS)
        self.gate = nn.Parameter(torch.randn(FIELDS))
        self.cross = nn.ModuleList([nn.Linear(FIELDS, FIELDS) for _ in range(2)])
        self.tag_emb = nn.EmbeddingBag(TAGS, DIM, mode="mean", padding_idx=0)
        self.out = nn.Linear(FIELDS, DIM)

    def field_gates(self):
        soft = torch.sigmoid(self.gate)
        hard = (soft > 0.5).to(soft.dtype)
        return hard + soft - soft.detach()

    def forward(self, tags, fields):
        x0 = x = self.bn(fields) * self.field_gates()
        for layer in self.cross:
            x = x0 * layer(x) + x
        return self.out(x) + self.tag_emb(tags)


class NextItem(nn.Module):
    def __init__(self):
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS, DIM, padding_idx=0)
        self.pos_emb = nn.Embedding(LENGTH, DIM)
        self.user = UserTower()
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, FF, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(DIM), enable_nested_tensor=False)

    def forward(self, history, tags, fields):
        n = history.shape[1]
        x = self.item_emb(history) + self.pos_emb(torch.arange(n))
        x = x + self.user(tags, fields).unsqueeze(1)
        future = torch.ones(n, n).triu(1).bool()
        h = self.encoder(x, mask=future, src_key_padding_mask=history == 0)
        items = F.normalize(self.item_emb.weight[1:], dim=-1)
        return F.normalize(h, dim=-1) @ items.T / TEMPERATURE


def make_adagrad(model):
    named = list(model.named_parameters())
    decays = lambda name, p: p.dim() > 1 and "emb" not in name
    optimizer = torch.optim.Adagrad(
        [
            {"params": [p for n, p in named if decays(n, p)], "weight_decay": DECAY},
            {"params": [p for n, p in named if not decays(n, p)]},
        ],
        lr=LR,
        lr_decay=LR_DECAY,
        initial_accumulator_value=START,
    )

    def clip(*_):
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    optimizer.register_step_pre_hook(clip)
    return optimizer


# ---------------------------------------------------------------- JAX


class Cross(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Linear(FIELDS, FIELDS, rngs=rngs)

    def __call__(self, x, start):
        return x + start * self.weight(x)


class Profile(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.BatchNorm(FIELDS, momentum=0.9, epsilon=1e-5, rngs=rngs)
        self.selector = nnx.Param(jax.random.normal(rngs.params(), (FIELDS,)))
        self.crosses = nnx.List([Cross(rngs) for _ in range(2)])
        self.tags = nnx.Embed(TAGS, DIM, rngs=rngs)
        self.project = nnx.Linear(FIELDS, DIM, rngs=rngs)

    def __call__(self, tags, fields):
        chance = jax.nn.sigmoid(self.selector[...])
        chosen = jnp.where(chance > 0.5, 1.0, 0.0)
        selected = chance + jax.lax.stop_gradient(chosen - chance)
        start = y = selected * self.scale(fields)
        for cross in self.crosses:
            y = cross(y, start)
        present = (tags > 0)[..., None]
        bag = jnp.sum(self.tags(tags) * present, axis=1) / jnp.sum(present, axis=1)
        return bag + self.project(y)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm_attn = nnx.LayerNorm(DIM, epsilon=1e-5, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(DIM, epsilon=1e-5, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, DIM, decode=False, rngs=rngs)
        self.expand = nnx.Linear(DIM, FF, rngs=rngs)
        self.shrink = nnx.Linear(FF, DIM, rngs=rngs)

    def __call__(self, y, mask):
        y = y + self.attn(self.norm_attn(y), mask=mask)
        wide = nnx.gelu(self.expand(self.norm_mlp(y)), approximate=False)
        return y + self.shrink(wide)


def unit(vectors):
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


class Recommender(nnx.Module):
    def __init__(self, rngs):
        self.items = nnx.Embed(ITEMS, DIM, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, DIM)))
        self.profile = Profile(rngs)
        self.block = Block(rngs)
        self.norm = nnx.LayerNorm(DIM, epsilon=1e-5, rngs=rngs)

    def __call__(self, past, tags, fields):
        seen = past > 0
        mask = nnx.make_causal_mask(past, dtype=bool) & seen[:, None, None, :]
        y = self.items(past) * seen[..., None] + self.positions[...]
        y = y + self.profile(tags, fields)[:, None]
        y = self.norm(self.block(y, mask))
        return jnp.einsum("bld,id->bli", unit(y), unit(self.items.embedding[1:])) / TEMPERATURE


def next_item_loss(scores, following):
    counted = following > 0
    targets = jax.nn.one_hot(following - 1, ITEMS - 1)
    targets = optax.smooth_labels(targets, SMOOTHING)
    cost = optax.softmax_cross_entropy(scores, targets)
    return jnp.sum(cost * counted) / jnp.sum(counted)


def clip_like_torch(limit):
    def update(grads, state, params=None):
        factor = jnp.minimum(1.0, limit / (optax.global_norm(grads) + 1e-6))
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def scale_by_adagrad(start, eps):
    """optax.scale_by_rss has its epsilon below the root, torch beside it."""

    def init(params):
        return jax.tree.map(lambda p: jnp.full_like(p, start), params)

    def update(grads, sums, params=None):
        sums = jax.tree.map(lambda s, g: s + jnp.square(g), sums, grads)
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), grads, sums), sums

    return optax.GradientTransformation(init, update)


def is_kernel(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)


def make_optimizer():
    return optax.chain(
        clip_like_torch(MAX_NORM),
        optax.add_decayed_weights(DECAY, mask=is_kernel),
        scale_by_adagrad(START, 1e-10),
        optax.scale_by_learning_rate(lambda count: LR / (1.0 + LR_DECAY * count)),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = NextItem()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    events, tags, fields = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(events, tags, fields):
        scores = model(events[:, :-1], tags, fields)
        targets = events[:, 1:] - 1
        return F.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=-1, label_smoothing=SMOOTHING
        )

    return stablenum_torch.program(loss_fn, events, tags, fields, model=model, optimizer=make_adagrad(model))


def right():
    graphdef, params, rest = nnx.split(Recommender(nnx.Rngs(4)), nnx.Param, ...)
    events, tags, fields = (jnp.asarray(a) for a in make_batch())

    def loss_fn(params, events, tags, fields):
        scores = nnx.merge(graphdef, params, rest, copy=True)(events[:, :-1], tags, fields)
        return next_item_loss(scores, events[:, 1:])

    return stablenum_jax.program(loss_fn, params, events, tags, fields, optimizer=make_optimizer())
