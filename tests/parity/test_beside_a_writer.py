"""A reader in one process beside a writer in another: at every moment there is something whole to be read."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stablenum.commands.verify.looking import look_at
from stablenum.runlog.reading import Run, RunReader
from tests.parity.writers import checkpoints_of, recovery_of
from tests.selection import REPEATS

ROOT = Path(__file__).parents[2]
# What Orbax reads in the background may be gone before it is read; Orbax drops that error unseen.
UNSEEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FORMATS: list[Any] = [("torch", kind) for kind in ("torch", "safetensors", "dcp")]
FORMATS += [("jax", "npz"), ("jax", "safetensors"), pytest.param("jax", "orbax", marks=UNSEEN)]
times = pytest.mark.parametrize("times", [12, pytest.param(1000, marks=REPEATS)])
# One that is kept is the harder case: what is read may be removed at any moment.
kept = pytest.mark.parametrize("keep", [1, pytest.param(3, marks=REPEATS)])
each_framework = pytest.mark.parametrize("framework", ["torch", "jax"])
pytestmark = pytest.mark.timeout(1800)


@contextlib.contextmanager
def writer(framework: str, kind: str, folder: Path, keep: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A process that writes until the end of the block, and has not ended before."""
    command = [sys.executable, "-m", "tests.parity.writers", framework, kind, str(folder), str(keep)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
            assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
        finally:
            process.kill()


def begun(process: subprocess.Popen[str], folder: Path, name: str) -> None:
    """Wait until a process has written so that something of this name is there."""
    until = time.monotonic() + 120
    while not any(path.stat().st_size for path in folder.glob(name)):
        assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
        assert time.monotonic() < until
        time.sleep(0.01)


@times
@kept
@pytest.mark.parametrize(("framework", "kind"), FORMATS)
def test_a_checkpoint_is_found_and_whole(framework, kind, keep, times, tmp_path):
    checkpoints, load = checkpoints_of(framework, tmp_path, kind, keep)
    with writer(framework, kind, tmp_path, keep) as process:
        begun(process, tmp_path, "step-*")
        last = -1
        for _ in range(times):
            assert checkpoints.steps()
            step = load()
            assert step >= last
            last = step


@times
@kept
@pytest.mark.parametrize(("framework", "kind"), FORMATS)
def test_what_is_verified_is_good(framework, kind, keep, times, tmp_path):
    with writer(framework, kind, tmp_path, keep) as process:
        begun(process, tmp_path, "step-*")
        for _ in range(times):
            outcomes, _ = look_at(tmp_path)
            assert {outcome.word for outcome in outcomes} == {"good"}, outcomes


@times
@kept
@each_framework
def test_a_snapshot_is_found_and_whole(framework, keep, times, tmp_path):
    with writer(framework, "snapshots", tmp_path, keep) as process:
        begun(process, tmp_path, "step-*2")  # to find nothing, and to find step 0, are the same
        last = 1
        for _ in range(times):
            recovery, _, weights = recovery_of(framework, tmp_path, keep)
            step = recovery.resume()
            assert weights() == {float(step)}
            assert step >= last
            last = step


@pytest.mark.parametrize("times", [12, pytest.param(60, marks=REPEATS)])  # each reads all, and all grows
@each_framework
def test_a_log_is_read_to_its_last_whole_line(framework, times, tmp_path):
    path = tmp_path / "run.jsonl"
    with writer(framework, "log", tmp_path) as process:
        begun(process, tmp_path, path.name)
        following, last = RunReader(path), 0
        for _ in range(times):
            following.read()
            for run in (RunReader(path).run, following.run):
                assert_whole(run)
                assert len(run) >= last
            last = len(following.run)
        while last < 200:  # the log is written a block at a time
            assert process.poll() is None
            following.read()
            last = len(following.run)
        assert_whole(following.run)


def assert_whole(run: Run) -> None:
    assert not run.unreadable
    assert run.steps == list(range(len(run)))
    assert run.loss == [float(step) for step in run.steps]
