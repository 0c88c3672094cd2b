"""The model of :mod:`benchmarks.partners.batches` in flax nnx and in equinox."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.partners.batches import FEATURES, HIDDEN

__all__ = ["EqxNet", "NnxNet"]


def _without_epsilon(u: jax.Array) -> jax.Array:
    return u * jax.lax.rsqrt(jnp.mean(u * u, -1, keepdims=True))


class NnxNet(nnx.Module):
    """The model in flax nnx."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any) -> None:
        self.first = nnx.Linear(FEATURES, HIDDEN, dtype=dtype, rngs=rngs)
        self.embed = nnx.Linear(FEATURES, HIDDEN, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, 1, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, z: jax.Array) -> jax.Array:
        h = self.norm(self.first(x).astype(jnp.float32))
        u = self.embed(z).astype(jnp.float32)
        return self.last(nnx.relu(h) + _without_epsilon(u)).astype(jnp.float32)


class EqxNet(eqx.Module):
    """The model in equinox, for one row; ``jax.vmap`` names the batch "batch"."""

    first: eqx.nn.Linear
    embed: eqx.nn.Linear
    last: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dtype: Any = eqx.field(static=True)

    def __init__(self, key: jax.Array, dtype: Any) -> None:
        first, embed, last = jax.random.split(key, 3)
        self.first = eqx.nn.Linear(FEATURES, HIDDEN, key=first)
        self.embed = eqx.nn.Linear(FEATURES, HIDDEN, use_bias=False, key=embed)
        self.last = eqx.nn.Linear(HIDDEN, 1, key=last)
        self.norm = eqx.nn.BatchNorm(HIDDEN, axis_name="batch", mode="batch")
        self.dtype = dtype

    def __call__(self, x: jax.Array, z: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        first, embed, last = (
            jax.tree.map(lambda w: w.astype(self.dtype), layer)
            for layer in (self.first, self.embed, self.last)
        )
        h, state = self.norm(first(x.astype(self.dtype)).astype(jnp.float32), state)
        u = _without_epsilon(embed(z.astype(self.dtype)).astype(jnp.float32))
        return last((jax.nn.relu(h) + u).astype(self.dtype)).astype(jnp.float32), state
