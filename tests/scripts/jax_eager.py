"""No jit: the gradient is bad, then an optimizer without eps."""

import sys

import jax
import jax.numpy as jnp
import optax

which = sys.argv[1]
tx = optax.adam(0.1, eps=0.0)
params = {"w": jnp.ones(3)}
state = tx.init(params)
x = jnp.array([1.0, 0.0, 2.0])


def loss_fn(params):
    if which == "gradient":
        return jnp.sqrt(params["w"] * x).sum()  # BAD gradient
    return ((params["w"] * x) ** 2).sum()


for _ in range(3):
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params)  # BAD update
    params = optax.apply_updates(params, updates)
