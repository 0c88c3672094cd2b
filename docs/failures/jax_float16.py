"""A square in float16 that exceeds 65,504."""

import jax.numpy as jnp

import stablenum_jax


def loss_fn(w, x):
    h = (x @ w).astype(jnp.float16)
    return (h * h).astype(jnp.float32).mean()


report = stablenum_jax.replay(loss_fn, jnp.full((8, 2), 40.0), jnp.ones((3, 8)))
print(report)
