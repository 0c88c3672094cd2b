"""Training on eight devices, in three ways; one of the batches has a row of zeros."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def loss_fn(w, x):
    return jnp.sqrt((x @ w) ** 2).mean()  # BAD


def mean_step(w, x):
    loss, grad = jax.value_and_grad(loss_fn)(w, x)
    return w - 0.1 * jax.lax.pmean(grad, "data"), jax.lax.pmean(loss, "data")


@jax.jit
def sharded(w, x):
    body = jax.shard_map(mean_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    return body(w, x)


@partial(jax.pmap, axis_name="data", in_axes=(None, 0), out_axes=None)
def mapped(w, x):
    return mean_step(w, x)


@jax.jit
def jitted(w, x):
    loss, grad = jax.value_and_grad(loss_fn)(w, x)
    return w - 0.1 * grad, loss


w = jnp.ones(3)
for i in range(4):
    x = jax.random.normal(jax.random.key(i), (16, 3))
    if i == 2:
        x = x.at[7].set(0.0)
    if sys.argv[1] == "shard_map":
        w, loss = sharded(w, x)
    elif sys.argv[1] == "pmap":
        w, loss = mapped(w, x.reshape(8, 2, 3))
    else:
        w, loss = jitted(w, jax.device_put(x, NamedSharding(mesh, P("data"))))
    print(i, loss)
