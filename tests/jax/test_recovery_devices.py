"""Recovery with several devices, and with several processes (``jax.distributed``)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.selection import only

# Trains with sharded data and a sharded parameter; a fault hurts a shard of the last process alone.
PROGRAM = """
import dataclasses, hashlib, json, os, sys
sys.path.insert(0, {root!r})
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P

rank, count, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{{port}}", num_processes=count, process_id=rank)
import stablenum_jax
from stablenum import RecoveryStopped
from stablenum.typing import Response
from tests.jax.recovering import AGAIN, POLICY, INPUTS, TARGETS, once

assert (jax.process_count(), jax.device_count()) == (count, 4)
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
tx = optax.chain(stablenum_jax.guard(clip=10.0), stablenum_jax.eased(optax.adam(0.02)))

def place(whole, spec):
    whole = np.asarray(whole)
    return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda i: whole[i])

def batch_at(n):
    inputs = np.concatenate([INPUTS[n % 16], INPUTS[(n + 1) % 16]])[:8]
    targets = np.concatenate([TARGETS[n % 16], TARGETS[(n + 1) % 16]])[:8]
    return place(inputs, P("data")), place(targets, P("data"))

def first_state():
    rng = np.random.default_rng(1)
    params = {{
        "first": place(rng.normal(size=(4, 8)).astype(np.float32) / 2, P(None, "data")),
        "last": place(rng.normal(size=8).astype(np.float32) / 3, P()),
    }}
    opt_state = jax.jit(tx.init)(params)
    specs = jax.tree.map(lambda x: P(None, "data") if x.shape == (4, 8) else P(), opt_state)
    opt_state = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), opt_state, specs)
    key = jax.random.wrap_key_data(place(np.asarray(jax.random.key_data(jax.random.key(2))), P()))
    return params, opt_state, key, jnp.asarray(0.0)  # a local one that is weakly typed

def train_step(state, batch):
    params, opt_state, key, seen = state
    key, dropout = jax.random.split(key)
    def loss_fn(p):
        hidden = jnp.tanh(batch[0] @ p["first"])
        out = hidden * jax.random.bernoulli(dropout, 0.9, hidden.shape) @ p["last"]
        return ((out - batch[1]) ** 2).mean()
    loss, grads = jax.value_and_grad(loss_fn)(params)
    params, opt_state = stablenum_jax.step(tx, params, opt_state, grads, value=loss)
    return params, opt_state, key, seen + 1

shardings = (*jax.tree.map(lambda x: x.sharding, first_state()[:3]), NamedSharding(mesh, P()))
step = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)

def nan_in_the_last_shard(state):
    params, *rest = state
    whole = params["first"]
    def shard(s):
        data = np.array(s.data)
        if s.index[1].stop == 8:
            data[0, 0] = np.nan
        return jax.device_put(data, s.device)
    hurt = jax.make_array_from_single_device_arrays(
        whole.shape, whole.sharding, [shard(s) for s in whole.addressable_shards]
    )
    return {{**params, "first": hurt}}, *rest

def digest(state):
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.update(str((leaf.dtype, leaf.weak_type, leaf.shape, leaf.sharding)).encode())
        for s in leaf.addressable_shards:
            found.update(np.asarray(s.data).tobytes())
    return found.hexdigest()

def run(steps=40, hurt=None, resume=False, **options):
    policy = dataclasses.replace(POLICY, responses=(AGAIN,))
    recovery = stablenum_jax.Recovery(first_state(), policy, data=batch_at, **options)
    if resume:
        recovery.resume()
    for batch in recovery.batches(steps):
        if hurt is not None:
            hurt(recovery, recovery.step + 1)
        recovery.state = step(recovery.state, batch)
    return recovery

def of(recovery):
    events = [(e.symptom.code, e.symptom.step, e.to_step, list(e.symptom.names)) for e in recovery.events]
    return {{"digest": digest(recovery.state), "events": events, "step": recovery.step}}

found = {{"straight": of(run())}}
sizes = [step._cache_size()]
found["hurt"] = of(run(hurt=once(33, nan_in_the_last_shard)))
sizes.append(step._cache_size())

def report(recovery, at):
    if at == 33 and rank == count - 1 and not recovery.events:
        recovery.report("one process sees it")

found["reported"] = of(run(hurt=report))
run(steps=37, folder=folder)
sizes.append(step._cache_size())
found["resumed"] = of(run(folder=folder, resume=True))
kept = sorted(p for p in os.listdir(folder) if not p.startswith("."))

def always(recovery, at):
    if at == 33:
        recovery.state = nan_in_the_last_shard(recovery.state)

try:
    run(hurt=always, folder=folder + "-2")
except RecoveryStopped as stopped:
    found["stopped"] = [stopped.step, stopped.code]
found["compiled"] = [*sizes, step._cache_size()]
found["folder"] = kept
found["ledger"] = os.path.exists(folder + "-2/recovery.json")

from stablenum_jax._recovery.copies import copies_of
copies = copies_of(jax.tree.leaves(first_state()[0]))
found["bytes"] = [sum(b.nbytes for b in copy.blocks.values()) for copy in copies]
print(json.dumps(found))
"""


def ran(count: int, folder: Path, root: Path) -> list[dict[str, Any]]:
    """What each of ``count`` processes found, with four devices in all."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // count}",
        "JAX_PLATFORMS": "cpu",
    }
    program = PROGRAM.format(root=str(root))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(count), port, str(folder)],
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    ends = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors[-4000:]
            ends.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return ends


# What one process does with all devices, each of two does with its own.
@pytest.fixture(scope="module", params=only([2], [1, 2]), ids=["one process", "two processes"])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> list[dict[str, Any]]:
    return ran(request.param, tmp_path_factory.mktemp("run") / "folder", pytestconfig.rootpath)


def test_a_fault_in_one_shard_takes_all_processes_back(found: list[dict[str, Any]]) -> None:
    for end in found:
        ((code, step, to_step, names),) = end["hurt"]["events"]
        assert (code, step, to_step, names) == ("nonfinite_state", 35, 20, ["first"])
        assert end["hurt"]["digest"] == end["straight"]["digest"]
        assert end["hurt"]["step"] == 40


def test_what_one_process_reports_takes_all_back(found: list[dict[str, Any]]) -> None:
    for end in found:
        assert [event[:3] for event in end["reported"]["events"]] == [["reported", 32, 20]]
        assert end["reported"]["digest"] == end["straight"]["digest"]


def test_a_resumed_run_is_the_one_that_was_not_interrupted(found: list[dict[str, Any]]) -> None:
    for end in found:
        assert end["resumed"]["digest"] == end["straight"]["digest"]
        assert end["resumed"]["step"] == 40


def test_each_process_keeps_its_own_shards_once(found: list[dict[str, Any]]) -> None:
    for end in found:
        assert end["bytes"] == [4 * 8 * 4 // len(found), 8 * 4]
        if len(found) > 1:
            assert end["folder"] == ["rank-00000", "rank-00001"]


def test_all_processes_stop_together(found: list[dict[str, Any]]) -> None:
    assert [end["stopped"] for end in found] == [[20, 3]] * len(found)
    assert all(end["ledger"] for end in found)


def test_nothing_is_compiled_again(found: list[dict[str, Any]]) -> None:
    for end in found:
        first, *later = end["compiled"]  # the first run compiles for its first state and for later ones
        assert later == [first] * 3
