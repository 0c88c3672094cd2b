"""Training on the devices of two processes; a batch of the second one has a row of zeros."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def loss_fn(w, x):
    return jnp.sqrt((x @ w) ** 2).mean()  # BAD


def mean_step(w, x):
    loss, grad = jax.value_and_grad(loss_fn)(w, x)
    return w - 0.1 * jax.lax.pmean(grad, "data"), jax.lax.pmean(loss, "data")


step = jax.jit(jax.shard_map(mean_step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False))
w = jax.device_put(np.ones(3, np.float32), NamedSharding(mesh, P()))
for i in range(3):
    rows = np.random.default_rng(10 * i + process).normal(size=(4, 3)).astype(np.float32)
    if i == 1 and process == 1:
        rows[3] = 0.0
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows)
    w, loss = step(w, x)
    print(i, float(loss), flush=True)
