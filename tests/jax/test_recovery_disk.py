"""Snapshots on the disk: a run that is interrupted goes on as the one that was not."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stablenum_jax
from stablenum import CheckpointError, RecoveryStopped
from stablenum.typing import Response
from stablenum_jax._recovery.blocks import Block, region
from stablenum_jax._recovery.copies import Copy, copies_of, copy_from
from stablenum_jax._recovery.generators import ProcessGenerators
from tests.jax.recovering import (
    AGAIN,
    POLICY,
    batch_at,
    changed,
    first_state,
    once,
    put,
    run,
    same,
    train_step,
)
from tests.jax.recovery_kinds import DATA, KINDS, keyed_loader
from tests.jax.test_recovery_copies import LEAVES


def _copy_of(leaf: Any) -> Copy:
    (copy,) = copies_of([leaf])
    return copy


def interrupted(
    folder: Path, at: int, *, first: Any = first_state, step: Any = None, data: Any = lambda: batch_at
) -> stablenum_jax.Recovery:
    """Train up to the step ``at``, make everything again, and go on to the end from the disk."""
    step = step or (lambda state, batch: train_step(state, batch)[0])
    broken = stablenum_jax.Recovery(first(), POLICY, data=data(), folder=folder)
    for batch in broken.batches(60):
        if broken.step == at:
            break
        broken.state = step(broken.state, batch)
    recovery = stablenum_jax.Recovery(first(), POLICY, data=data(), folder=folder)
    assert recovery.resume() == recovery.step == at // 10 * 10
    for batch in recovery.batches(60):
        recovery.state = step(recovery.state, batch)
    return recovery


@pytest.mark.parametrize("at", [1, 30, 37])
def test_an_interrupted_run_is_the_one_that_was_not(at: int, tmp_path: Path) -> None:
    compiled = train_step._cache_size()
    recovery = interrupted(tmp_path, at)
    assert same(recovery.state, run().state)
    assert str(recovery.history()[40:]) == str(run().history()[40:])
    assert train_step._cache_size() == max(compiled, 1)


@pytest.mark.parametrize("kind", DATA)
def test_the_same_data_follow_after_an_interruption(kind: str, tmp_path: Path) -> None:
    recovery = interrupted(tmp_path, 37, data=DATA[kind])
    assert same(recovery.state, run(data=DATA[kind]()).state)


def test_the_state_of_a_loader_may_hold_tensors_of_torch(tmp_path: Path) -> None:
    recovery = interrupted(tmp_path, 37, data=keyed_loader)
    assert same(recovery.state, run(data=keyed_loader()).state)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_libraries_come_back_from_the_disk(kind: str, tmp_path: Path) -> None:
    first, step, _ = KINDS[kind]()
    straight = stablenum_jax.Recovery(first(), POLICY, data=batch_at)
    for batch in straight.batches(60):
        straight.state = step(straight.state, batch)
    recovery = interrupted(tmp_path, 37, first=first, step=step)
    leaves = [jax.tree.leaves(recovery.state), jax.tree.leaves(straight.state)]
    assert all(same(*pair) for pair in zip(*leaves, strict=True))


def test_a_run_goes_back_to_a_snapshot_from_the_disk(tmp_path: Path) -> None:
    policy = dataclasses.replace(POLICY, responses=(AGAIN,))
    run(38, policy=policy, folder=tmp_path)
    recovery = stablenum_jax.Recovery(first_state(), policy, data=batch_at, folder=tmp_path)
    assert recovery.resume() == 30
    hurt = once(33, put(("params", "last"), math.nan))
    for batch in recovery.batches(60):
        hurt(recovery, recovery.step + 1)
        recovery.state, _ = train_step(recovery.state, batch)
    assert [event.to_step for event in recovery.events] == [20]
    assert same(recovery.state, run().state)


def test_without_a_snapshot_nothing_is_changed(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        recovery = stablenum_jax.Recovery(first_state(), POLICY, data=batch_at, folder=folder)
        before = recovery.state
        assert recovery.resume() == 0
        assert recovery.state is before


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.jax.recovering import *

def hurt(recovery, step):
    if step == 44:
        os.kill(os.getpid(), signal.SIGKILL)

run(hurt=hurt, folder={folder!r})
"""


def test_a_run_that_is_killed_goes_on(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    program = KILLED.format(root=str(pytestconfig.rootpath), folder=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    recovery = stablenum_jax.Recovery(first_state(), POLICY, data=batch_at, folder=tmp_path)
    assert recovery.resume() == 40
    for batch in recovery.batches(60):
        recovery.state, _ = train_step(recovery.state, batch)
    assert same(recovery.state, run().state)


# --- the budget, and the end -------------------------------------------------------------------


def always(recovery: stablenum_jax.Recovery, step: int) -> None:
    if step == 33:
        recovery.state = put(("params", "last"), math.nan)(recovery.state)


def test_restarts_do_not_refill_the_budget(tmp_path: Path) -> None:
    policy = dataclasses.replace(POLICY, responses=(AGAIN,) * 9, budget=3)

    def start() -> None:
        """Go on to the next rewind, or the end."""
        recovery = stablenum_jax.Recovery(first_state(), policy, data=batch_at, folder=tmp_path)
        recovery.resume()
        before = len(recovery.events)
        for batch in recovery.batches(60):
            if len(recovery.events) > before:
                return
            always(recovery, recovery.step + 1)
            recovery.state, _ = train_step(recovery.state, batch)

    for _ in range(3):
        start()
    with pytest.raises(RecoveryStopped, match="the budget of 3 rewinds is used up"):
        start()
    assert len(json.loads((tmp_path / "recovery.json").read_text())["events"]) == 3


def test_a_run_that_is_stopped_leaves_a_good_state_on_the_disk(tmp_path: Path) -> None:
    policy = dataclasses.replace(POLICY, responses=(AGAIN,))
    with pytest.raises(RecoveryStopped) as stopped:
        run(hurt=always, policy=policy, folder=tmp_path)
    assert str(tmp_path) in stopped.value.report
    recovery = stablenum_jax.Recovery(first_state(), policy, data=batch_at, folder=tmp_path)
    assert recovery.resume() == stopped.value.step == 20
    assert same(recovery.state, run(20).state)


def test_steps_are_as_careful_after_a_restart(tmp_path: Path) -> None:
    response = Response(skip_data=False, rate=0.5, clip=1.0, steps=15)
    policy = dataclasses.replace(POLICY, responses=(response,))
    hurt = once(33, put(("params", "last"), math.nan))
    straight = run(hurt=once(33, put(("params", "last"), math.nan)), policy=policy)
    broken = stablenum_jax.Recovery(first_state(), policy, data=batch_at, folder=tmp_path)
    for batch in broken.batches(60):
        if broken.events and broken.step == 42:
            break
        hurt(broken, broken.step + 1)
        broken.state, _ = train_step(broken.state, batch)
    recovery = stablenum_jax.Recovery(first_state(), policy, data=batch_at, folder=tmp_path)
    assert recovery.resume() == 40
    assert float(recovery.state["opt_state"][1].rate) == 0.5
    for batch in recovery.batches(60):
        recovery.state, _ = train_step(recovery.state, batch)
    assert same(recovery.state, straight.state)


# --- what cannot be loaded ---------------------------------------------------------------------


def other(path: tuple[Any, ...], value: Any) -> Any:
    return changed(first_state(), path, lambda _: value)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            other(("mean",), jnp.zeros(9)),
            r"mean does not fit: it is float32\[8\] there, and float32\[9\] here",
        ),
        (other(("mean",), jnp.zeros(8, jnp.bfloat16)), r"mean does not fit: it is float32\[8\] there"),
        (other(("mean",), np.zeros(9, np.float32)), "mean does not fit"),
        (other(("key",), jnp.zeros(3)), "key does not fit"),
        ({**first_state(), "new": jnp.zeros(3)}, "new is not in it"),
        ({k: v for k, v in first_state().items() if k != "mean"}, "it has mean, which is not in this state"),
    ],
)
def test_the_state_of_another_training_is_refused(state: Any, message: str, tmp_path: Path) -> None:
    run(5, folder=tmp_path)
    recovery = stablenum_jax.Recovery(state, POLICY, data=batch_at, folder=tmp_path)
    with pytest.raises(CheckpointError, match=message):
        recovery.resume()
    assert recovery.state is state
    assert recovery.step == 0


def test_a_broken_snapshot_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(38, folder=tmp_path)
    file = tmp_path / "step-000000030" / "arrays.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    recovery = stablenum_jax.Recovery(first_state(), POLICY, data=batch_at, folder=tmp_path)
    with caplog.at_level(logging.WARNING, "stablenum"):
        assert recovery.resume() == 20
    assert any("passed over" in record.message for record in caplog.records)


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "stablenum"):
        recovery = run(folder=tmp_path / "file" / "folder")
    assert recovery.step == 60
    assert any("could not be saved" in record.message for record in caplog.records)


def test_a_folder_must_be_a_path() -> None:
    with pytest.raises(TypeError, match="folder must be a path or None; got int"):
        stablenum_jax.Recovery(first_state(), data=batch_at, folder=3)  # type: ignore[arg-type]


def test_a_training_that_begins_with_nan_is_refused() -> None:
    for path, name in (
        (("params", "last"), "params.last"),
        (("opt_state", 1, "inner", 0, "mu", "last"), "mu of last"),
    ):
        recovery = stablenum_jax.Recovery(put(path, math.nan)(first_state()), data=batch_at)
        with pytest.raises(ValueError, match=f"{name} is NaN"):
            recovery.batches(10)


# --- parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LEAVES)
def test_an_array_comes_back_from_plain_values(kind: str) -> None:
    plain = _copy_of(LEAVES[kind]()).to_plain()
    like = LEAVES[kind]()
    back = copy_from(plain, like).again()
    assert (back.dtype, back.sharding, back.committed) == (like.dtype, like.sharding, like.committed)
    assert same(back, like)


@pytest.mark.parametrize("leaf", [3, 2.5, True, "text", b"bytes", 1 + 2j, np.float32(1.5)])
def test_plain_leaves_come_back_from_plain_values(leaf: Any) -> None:
    back = copy_from(_copy_of(leaf).to_plain(), leaf).again()
    assert (type(back), back) == (type(leaf), leaf)


def test_functions_are_those_of_the_present_state() -> None:
    assert _copy_of(jnp.tanh).to_plain() is None
    assert copy_from(None, jnp.tanh).again() is jnp.tanh


def test_a_region_is_put_together_from_blocks() -> None:
    whole = np.arange(24.0).reshape(4, 6)
    blocks = [Block((i, j), whole[i : i + 2, j : j + 3]) for i in (0, 2) for j in (0, 3)]
    for index in (((0, 4), (0, 6)), ((1, 3), (2, 5)), ((2, 4), (3, 6)), ((0, 0), (0, 6))):
        (a, b), (c, d) = index
        np.testing.assert_array_equal(region(blocks, index, np.float64), whole[a:b, c:d])
    with pytest.raises(ValueError, match="not all there"):
        region(blocks[:3], ((1, 3), (2, 5)), np.float64)


def test_generators_are_plain_values_and_arrays() -> None:
    states = ProcessGenerators().read()
    assert all(isinstance(part, (str, int, float, np.ndarray, type(None))) for part in states["numpy"])
    assert isinstance(states["python"][1], np.ndarray)


@pytest.mark.parametrize("counter", [0, np.int32(0), np.zeros((), np.int32)], ids=lambda c: type(c).__name__)
def test_a_number_that_a_step_turns_into_an_array_comes_back(counter: Any, tmp_path: Path) -> None:
    def first() -> Any:
        return {"train": first_state(), "step": counter}  # as flax's TrainState.create begins

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        return {"train": train_step(state["train"], batch)[0], "step": state["step"] + 1}

    recovery = interrupted(tmp_path, 37, first=first, step=step)
    assert int(recovery.state["step"]) == 60
    assert recovery.state["step"].dtype == np.int32
    compiled = step._cache_size()
    recovery.state = step(recovery.state, batch_at(60))
    assert step._cache_size() == compiled
