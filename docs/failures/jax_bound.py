"""A masked softmax and a running minimum that begins at inf: nothing is wrong."""

import jax
import jax.numpy as jnp

import stablenum_jax


def loss_fn(scores, mask, best):
    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return jnp.minimum(best, (p**2).sum())


mask = jnp.array([True, True, False])
report = stablenum_jax.replay(loss_fn, jnp.array([1.0, 2.0, 3.0]), mask, jnp.inf)
print(report)
