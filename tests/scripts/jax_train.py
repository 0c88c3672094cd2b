"""A jitted step that donates its arguments and calls a helper."""

import functools

import jax
import jax.numpy as jnp
import optax

tx = optax.adam(0.3)
params = {"w": jnp.full((4, 3), 0.1), "b": jnp.zeros(3)}
state = tx.init(params)


def loss_fn(params, x, *, power):
    p = jax.nn.softmax(x @ params["w"] + params["b"])
    return -jnp.log(p[:, 0] ** power).mean()  # BAD


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="power")
def step(params, state, x, power):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, power=power)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


for i in range(30):
    x = 10.0**i * jax.random.normal(jax.random.key(i), (8, 4))
    params, state, loss = step(params, state, x, power=1)
    print("loss", float(loss))
