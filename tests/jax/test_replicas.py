"""Copies on eight devices: whatever makes their bits differ is found, with device and leaf."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import jax
import jax.numpy as jnp
import optax
import pytest

import stablenum_jax
from stablenum_jax._step import replicas

ROOT = Path(__file__).parents[2]


def started(*arguments: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "tests.jax.replicas_program", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(program, cwd=ROOT, env=env, text=True, stdout=PIPE, stderr=PIPE)


def results(processes: list[subprocess.Popen[str]]) -> list[dict]:
    try:
        finished = [process.communicate(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, err) in zip(processes, finished, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [json.loads(out.split("RESULT ")[1]) for out, _ in finished]


@pytest.fixture(scope="module")
def seen() -> dict:
    """What the process with eight devices printed."""
    return results([started()])[0]


def test_every_flipped_bit_is_found_with_device_and_leaf(seen):
    assert len(seen["flips"]) == 3 * 32
    for leaf, bit, device, found in seen["flips"]:
        assert found["parted"] == [[leaf, "parameter", [device]]], bit
        assert found["step"] == 0


def test_a_thousand_healthy_steps_raise_nothing(seen):
    healthy = seen["healthy"]
    assert (healthy["last"], healthy["skipped"]) == (999, 0)
    compared = set(healthy["found"])
    assert len(healthy["found"]) == 39
    assert len(compared) == 1
    assert compared.pop() > 2 + 4, "parameters, moments, counters and the guard's state"


def test_a_flipped_bit_stays_until_a_check_finds_it(seen):
    found = seen["before steps"]
    assert ["w", "parameter", [6]] in found["parted"]
    assert "after step 3: device 6 differs from devices 0-5, 7 in w" in found["text"]


def test_devices_that_draw_their_own_numbers_are_found(seen):
    found = seen["other seeds"]
    assert [part[:2] for part in found["parted"]] == [["b", "parameter"], ["w", "parameter"]]
    assert "another seed" in found["text"]
    assert "no majority" in found["text"]


def test_a_forgotten_mean_over_devices_is_found(seen):
    assert {name for name, *_ in seen["forgotten mean"]["parted"]} == {"w", "b"}


def test_a_step_that_one_device_takes_twice_is_found(seen):
    assert seen["taken twice"]["parted"] == [["b", "parameter", [2]]]


def test_bits_count_not_values(seen):
    special = seen["special values"]
    assert (special["zeros"], special["nan"]) == (1, 1)
    assert special["negative zero"]["parted"] == [["param", "parameter", [1]]]
    assert special["payload"]["parted"] == [["param", "parameter", [1]]]


def test_a_part_is_compared_with_its_copies_alone(seen):
    assert len(seen["shards"]) == 2, "both kinds of axes"
    for healthy, flipped, other in seen["shards"].values():
        assert healthy == 1, "of the other array there are no copies"
        assert flipped["parted"] == [["w", "parameter", [4, 5]]]
        assert other["parted"] == [["v", "parameter", [5]]]
        assert "device 5 differs from devices 1, 3, 7 in v" in other["text"]


@pytest.mark.parametrize("name", ["bfloat16", "bool", "complex64", "int8"])
def test_every_kind_of_array_is_compared(seen, name):
    assert seen["kinds"]["healthy"] == 5, "with the key, without what has no copies"
    assert seen["kinds"][name]["parted"] == [[name, "parameter", [4]]]


def test_arrays_in_host_memory_and_on_another_mesh_are_compared(seen):
    assert seen["elsewhere"]["host"] == 2
    assert seen["elsewhere"]["other mesh"]["parted"] == [["1", "parameter", [3]]]


@pytest.mark.slow
def test_copies_of_other_processes_are_compared():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for own in results([started(rank, port) for rank in ("0", "1")]):
        assert (own["devices"], own["own"], own["healthy"]) == (4, 2, 1)
        assert own["flipped"]["parted"] == [["w", "parameter", [own["device"]]]]


# --- in one process, on one device -----------------------------------------------------------------


@pytest.fixture
def log(caplog):
    """The messages, as if none had been logged before."""
    replicas._tell_of_no_copies.cache_clear()
    with caplog.at_level(logging.WARNING, "stablenum"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "stablenum"]


def test_without_copies_nothing_is_done_and_that_is_logged_once(log):
    tx = optax.adam(0.1)
    params = {"w": jnp.ones(3)}
    assert [stablenum_jax.check_replicas(params, tx.init(params)) for _ in range(3)] == [0, 0, 0]
    (message,) = log()
    assert "no two devices hold copies" in message


def test_traced_arrays_are_not_compared():
    with pytest.raises(ValueError, match=r"must hold concrete arrays.*outside jit"):
        jax.jit(stablenum_jax.check_replicas)({"w": jnp.ones(3)})
