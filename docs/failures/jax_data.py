"""A batch that was normalised with a standard deviation of zero before the step."""

import jax.numpy as jnp

import stablenum_jax


def loss_fn(params, batch):
    return ((batch["x"] @ params["w"]) ** 2).mean()


x = jnp.ones((4, 3))
batch = {"x": (x - x.mean(0)) / x.std(0)}
report = stablenum_jax.replay(loss_fn, {"w": jnp.ones(3)}, batch)
print(report)
