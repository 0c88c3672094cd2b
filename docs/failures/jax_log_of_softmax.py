"""The logarithm of a softmax, inside jit."""

import jax
import jax.numpy as jnp

import stablenum_jax


@jax.jit
def loss_fn(params, x, labels):
    p = jax.nn.softmax(x @ params["w"] + params["b"])
    picked = jnp.take_along_axis(p, labels[:, None], axis=1)
    return -jnp.log(picked).mean()


params = {"w": jnp.full((4, 3), 60.0).at[:, 0].set(-60.0), "b": jnp.zeros(3)}
x = jnp.ones((2, 4))
report = stablenum_jax.replay(loss_fn, params, x, jnp.array([0, 1]))
print(report)
