"""The where-trap: the branch that is not taken is differentiated too."""

import jax.numpy as jnp

import stablenum_jax


def loss_fn(x, y):
    ratio = jnp.where(y != 0, x / y, 0.0)
    return ratio.sum()


report = stablenum_jax.replay(loss_fn, jnp.array([1.0, 2.0]), jnp.array([4.0, 0.0]), argnums=(0, 1))
print(report)
