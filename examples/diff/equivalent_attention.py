"""Causal attention twice: one matrix and a fused kernel in PyTorch, three matrices and einsum in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import stablenum_jax
import stablenum_torch

WIDTH, HEADS = 32, 4
x = np.random.default_rng(0).normal(size=(2, 8, WIDTH)).astype(np.float32)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def attention(params, x):
    q = jnp.einsum("bte,ehd->bthd", x, params["query"]) + params["query_bias"]
    k = jnp.einsum("bte,ehd->bthd", x, params["key"]) + params["key_bias"]
    v = jnp.einsum("bte,ehd->bthd", x, params["value"]) + params["value_bias"]
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhts,bshd->bthd", weights, v)
    return jnp.einsum("bthd,hde->bte", mixed, params["out"]) + params["out_bias"]


def left():
    torch.manual_seed(0)
    model = Attention()
    return stablenum_torch.program(lambda x: model(x).square().mean(), torch.tensor(x), model=model)


def right():
    split, joined = (WIDTH, HEADS, WIDTH // HEADS), (HEADS, WIDTH // HEADS, WIDTH)
    shapes = {"query": split, "key": split, "value": split, "out": joined}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {
        name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params |= {f"{name}_bias": jnp.zeros(split[1:]) for name in ("query", "key", "value")}
    params["out_bias"] = jnp.zeros(WIDTH)
    return stablenum_jax.program(lambda params, x: jnp.square(attention(params, x)).mean(), params, x)
