"""Checkpoints of several JAX processes: all of them save, refuse and load alike."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
import stablenum, stablenum_jax
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
def place(whole, spec=P("data")):
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda i: whole[i])
whole = np.arange(8, dtype=np.float32)
state = {"w": place(whole), "r": place(np.ones(2, np.float32), P()), "n": 3}
c = stablenum_jax.Checkpoints(folder + "/orbax", format="orbax")
c.save(1, state)
bad = {**state, "w": place(np.where(whole == 7, np.nan, whole))}
try:
    c.save(2, bad)
except stablenum.PoisonedStateError as error:
    assert error.names == ("w",), error.names
else:
    raise AssertionError("not refused")
like = {"w": place(0 * whole), "r": place(np.zeros(2, np.float32), P()), "n": 0}
step, found = c.load(like)
assert (step, found["n"], c.steps()) == (1, 3, [1])
for s in found["w"].addressable_shards:
    np.testing.assert_array_equal(np.asarray(s.data), whole[s.index])
c = stablenum_jax.Checkpoints(folder + "/npz")
try:
    c.save(1, state)
except (ValueError, stablenum.CheckpointError) as error:
    assert 'Use format="orbax"' in str(error), error
else:
    raise AssertionError("not refused")
c.save(1, {"r": state["r"]})
step, found = c.load({"r": state["r"]})
print("done", rank, step)
"""


def test_two_processes_save_refuse_and_load_together(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(port), str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert [out.strip().splitlines()[-1] for out, _ in told] == ["done 0 1", "done 1 1"]
