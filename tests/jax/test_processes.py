"""Several processes (``jax.distributed``): each has its own devices, and all decide alike."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.selection import only

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import stablenum, stablenum_jax as sj
from jax.sharding import NamedSharding, PartitionSpec as P

rank, port, rules = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

def place(whole, spec=P("data")):
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda i: whole[i])

whole = np.arange(1.0, 9.0, dtype=np.float32)
faults = {
    "healthy": (whole, np.ones(4)),
    "inf in the second process": (np.where(whole == 7, np.inf, whole), np.ones(4)),
    "NaN loss in the first": (whole, np.asarray([1.0, np.nan, 1.0, 1.0])),
}
found = {}
for exact, joined in rules:
    guard = sj.guard(clip=1.0, exact_norms=exact, axis_name="data" if joined else None)
    tx = optax.chain(guard, optax.sgd(0.1, momentum=0.9))

    def step(params, state, grads, losses):
        return sj.step(tx, params, state, grads, value=losses[0] if joined else losses.mean())

    params = {"w": place(np.zeros(8, np.float32))}
    state = jax.jit(tx.init)(params)
    specs = jax.tree.map(lambda x: P("data") if x.shape == (8,) else P(), (params, state))
    state = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), state, specs[1])
    run = step
    if joined:
        run = jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, specs[0], P("data")), out_specs=specs
        )
    run = jax.jit(run)
    for fault, (grads, losses) in faults.items():
        given = {"w": place(grads.astype(np.float32))}, place(losses.astype(np.float32))
        after, seen = run(params, state, *given)
        last = sj.metrics(seen)
        mine = [np.asarray(shard.data) for shard in after["w"].addressable_shards]
        found[f"{fault}, {joined}, {exact}"] = [
            last["reason"].name, last["grad_norm"].hex(), last["loss"], last["worst_rank"],
            bool(np.any(mine)),
        ]
print(json.dumps(found))
"""


# Exact norms or not, and joined by the user or not. Each value runs each time; the other pairs are slow.
SOME, OTHERS = [(False, True), (True, False)], [(False, False), (True, True)]


@pytest.fixture(scope="module", params=only([SOME], [SOME, OTHERS]), ids=["some", "others"])
def ran(request):
    """What two processes of two devices each recorded, and with which rules."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port, json.dumps(request.param)],
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            ends.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return ends, request.param


def test_two_processes_record_the_same(ran):
    (one, other), _ = ran
    assert json.dumps(one) == json.dumps(other)


@pytest.mark.parametrize("which", [0, 1])
def test_a_fault_in_one_process_skips_the_step_in_both(ran, which):
    (one, _), rules = ran
    exact, joined = rules[which]
    reasons = {
        fault: one[f"{fault}, {joined}, {exact}"]
        for fault in ("healthy", "inf in the second process", "NaN loss in the first")
    }
    healthy, inf, nan = reasons.values()
    assert (healthy[0], healthy[2], healthy[4]) == ("CLIPPED", 1.0, True)
    assert float.fromhex(healthy[1]) == pytest.approx(204**0.5, rel=1e-6)
    assert (inf[0], inf[4]) == ("INF_GRADIENT", False)
    assert (nan[0], nan[4]) == ("NONFINITE_LOSS", False)
    ranks = [healthy[3], inf[3], nan[3]]
    assert ranks == ([3, 3, 1] if joined else [None, None, None])
