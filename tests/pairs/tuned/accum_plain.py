"""Masked-token encoder: full batch with sdpa in PyTorch; plain JAX adds up micro-batches with lax.scan."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, HEADS, LENGTH, MICRO, ABSENT, MAX_NORM = 26, 16, 2, 8, 2, -100, 0.1


def make_batch():
    rng = np.random.default_rng(27)
    tokens = rng.integers(1, VOCAB, size=(6, LENGTH))
    chosen = rng.random(size=tokens.shape) < np.array([0.2, 0.7, 0.3, 0.5, 0.9, 0.4])[:, None]
    chosen[:, 0] = True
    labels = np.where(chosen, tokens, ABSENT)
    return np.where(chosen, 0, tokens), labels


# ---------------------------------------------------------------- PyTorch


class MaskedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Parameter(0.3 * torch.randn(LENGTH, DIM))
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.mix = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.bias = nn.Parameter(0.1 * torch.randn(VOCAB))

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        y = self.mix(y.transpose(1, 2).flatten(2))
        x = self.norm(x + F.selu(y))
        return x @ self.embed.weight.t() + self.bias


class GlobalClipSGD(torch.optim.SGD):
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        total = torch.sqrt(sum((p.grad**2).sum() for p in params))
        if total > MAX_NORM:
            for p in params:
                p.grad.mul_(MAX_NORM / total)
        return super().step(closure)


def left():
    torch.manual_seed(32)
    model = MaskedEncoder()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    tokens, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(tokens, labels):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ABSENT)

    optimizer = GlobalClipSGD(model.parameters(), lr=0.5)
    return stablenum_torch.program(loss_fn, tokens, labels, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX


def attention(params, x):
    b, t, d = x.shape
    q, k, v = (y.reshape(b, t, HEADS, d // HEADS) for y in jnp.split(x @ params["qkv"], 3, axis=-1))
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) * (d // HEADS) ** -0.5
    scores = scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores)
    context = jnp.einsum("bhqk,bkhe->bqhe", weights, v) / weights.sum(axis=-1).swapaxes(1, 2)[..., None]
    return context.reshape(b, t, d) @ params["mix"]["w"] + params["mix"]["b"]


def encode(params, tokens):
    x = params["embed"][tokens] + params["position"]
    x = x + jax.nn.selu(attention(params, x))
    mean, var = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    x = (x - mean) / jnp.sqrt(var + 1e-5) * params["gain"] + params["shift"]
    return jnp.einsum("btd,vd->btv", x, params["embed"]) + params["bias"]


def micro_loss(params, tokens, labels):
    """Sum of the losses and number of labels of one micro-batch."""
    logits = encode(params, tokens)
    present = labels != ABSENT
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(present, labels, 0))
    return jnp.sum(losses * present), jnp.sum(present)


def loss_fn(params, tokens, labels):
    def add(totals, micro):
        loss, count = micro_loss(params, *micro)
        return (totals[0] + loss, totals[1] + count), None

    parts = jax.tree.map(lambda a: a.reshape(-1, MICRO, LENGTH), (tokens, labels))
    start = (jnp.zeros((), params["bias"].dtype), jnp.zeros((), int))
    (total, count), _ = jax.lax.scan(add, start, parts)
    return total / count


def right():
    keys = iter(jax.random.split(jax.random.key(95), 8))
    gain, shift = 0.1 * jax.random.normal(next(keys), (2, DIM))
    mix = {"w": 0.25 * jax.random.normal(next(keys), (DIM, DIM)), "b": 0.1 * jax.random.normal(next(keys), (DIM,))}
    params = {
        "embed": jax.random.normal(next(keys), (VOCAB, DIM)),
        "position": 0.3 * jax.random.normal(next(keys), (LENGTH, DIM)),
        "qkv": 0.25 * jax.random.normal(next(keys), (DIM, 3 * DIM)),
        "bias": 0.1 * jax.random.normal(next(keys), (VOCAB,)),
        "mix": mix,
        "gain": 1.0 + gain,
        "shift": shift,
    }
    tokens, labels = (jnp.asarray(a) for a in make_batch())
    tx = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.sgd(0.5))
    return stablenum_jax.program(loss_fn, params, tokens, labels, optimizer=tx)
