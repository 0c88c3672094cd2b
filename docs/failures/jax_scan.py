"""A recurrence that overflows at one step of a scan."""

import jax
import jax.numpy as jnp

import stablenum_jax


def loss_fn(params, xs):
    def cell(h, x):
        h = h * params["gain"] + jnp.exp(h) * x
        return h, h

    _, hs = jax.lax.scan(cell, jnp.zeros(3), xs)
    return (hs**2).mean()


report = stablenum_jax.replay(loss_fn, {"gain": jnp.full(3, 3.0)}, jnp.ones((12, 3)))
print(report)
