"""Snapshots on the disk: kills, full disks, damaged files, and what cannot be saved."""

from __future__ import annotations

import json
import logging
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stablenum_torch
from stablenum import CheckpointError
from stablenum.recovery import spilled
from tests.torch.recovering import AGAIN, KINDS, Training, made_nan, numbered, same, sgd, whole_state


def steps_on_disk(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*"))


def test_the_disk_has_the_snapshots_that_memory_has(tmp_path: Path) -> None:
    Training(numbered, sgd).run(72, folder=tmp_path)
    assert steps_on_disk(tmp_path) == [50, 60, 70]


def test_after_a_rewind_nothing_newer_is_there(tmp_path: Path) -> None:
    Training(numbered, sgd).run(38, hurt=made_nan, at=35, folder=tmp_path)
    assert steps_on_disk(tmp_path) == [10, 20, 30]
    recovery = Training(numbered, sgd).recovery(folder=tmp_path)
    assert recovery.resume() == 30
    assert [event.to_step for event in recovery.events] == [30]


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Training(numbered, sgd).run(38, folder=tmp_path)
    file = next((tmp_path / "step-000000030").glob("*.pt"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    training = Training(numbered, sgd)
    recovery = training.recovery(folder=tmp_path)
    assert recovery.resume() == 20
    assert "A snapshot is passed over" in caplog.text
    training.run(recovery=recovery)
    expected = Training(numbered, sgd)
    expected.run()
    assert same(whole_state(training), whole_state(expected))


def test_the_newest_snapshot_is_taken_though_others_are_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training in another process saves two and removes two, once the folder has been listed."""
    folder, later = tmp_path / "snapshots", tmp_path / "later"
    Training(numbered, sgd).run(38, folder=folder)
    Training(numbered, sgd).run(58, folder=later)
    listed = spilled.intact_in

    def removed_meanwhile(of: Path) -> Any:
        found = listed(of)
        if steps_on_disk(folder) == [10, 20, 30]:
            for step in (20, 30):
                shutil.rmtree(folder / f"step-{step:09}")
            for step in (40, 50):
                (later / f"step-{step:09}").rename(folder / f"step-{step:09}")
        return found

    monkeypatch.setattr(spilled, "intact_in", removed_meanwhile)
    assert Training(numbered, sgd).recovery(folder=folder).resume() == 50


def test_a_folder_without_a_whole_snapshot_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    Training(numbered, sgd).run(38, folder=tmp_path)
    for file in tmp_path.glob("step-*/*.pt"):
        file.write_bytes(file.read_bytes()[:-1])
    training = Training(numbered, sgd)
    before = whole_state(training)
    with pytest.raises(CheckpointError, match=r"no snapshot in .* can be loaded: none in .* is whole"):
        training.recovery(folder=tmp_path).resume()
    assert same(whole_state(training), before)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_of_checkpoints_is_refused_and_nothing_in_it_is_changed(tmp_path: Path) -> None:
    training = Training(numbered, sgd)
    checkpoints = stablenum_torch.Checkpoints(tmp_path, keep=5)
    for step in (1000, 2000):
        checkpoints.save(step, {"model": training.model})
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is in use.*a checkpoint.*Give another folder"):
        training.run(folder=tmp_path)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*step-000002000 is a checkpoint.*another folder"):
        training.recovery(folder=tmp_path).resume()
    assert files(tmp_path) == before


def test_the_folder_of_a_recovery_takes_and_gives_no_checkpoints(tmp_path: Path) -> None:
    training = Training(numbered, sgd)
    training.run(38, folder=tmp_path)
    before = files(tmp_path)
    checkpoints = stablenum_torch.Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match=r"a snapshot of a recovery.*Give another folder"):
        checkpoints.save(1000, {"model": training.model})
    with pytest.raises(CheckpointError, match="it is a snapshot of a recovery"):
        checkpoints.load({"model": training.model})
    assert files(tmp_path) == before


def test_an_empty_folder_is_the_beginning(tmp_path: Path) -> None:
    training = Training(numbered, sgd)
    assert training.recovery(folder=tmp_path / "new").resume() == 0
    assert training.recovery().resume() == 0


def test_training_goes_on_if_the_disk_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    training = Training(numbered, sgd)
    with caplog.at_level(logging.WARNING):
        training.run(hurt=made_nan, folder=tmp_path / "file" / "folder")
    expected = Training(numbered, sgd)
    expected.run()
    assert same(whole_state(training), whole_state(expected))
    assert "could not be saved" in caplog.text


class Cursor:
    """What cannot be loaded safely."""


class Loader:
    """A loader whose state has an object of its own class."""

    def __init__(self) -> None:
        self.rows = numbered()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.rows(n) for n in range(100))

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": Cursor()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Forget it."""


def test_it_is_said_what_in_the_state_of_the_data_cannot_be_saved(tmp_path: Path) -> None:
    training = Training(Loader, sgd)
    with pytest.raises(TypeError, match=r"data\.iterator\.loader\.cursor is tests.*Cursor"):
        training.run(folder=tmp_path)
    assert steps_on_disk(tmp_path) == [0]  # before the first batch there is nothing of it to save
    assert training.run(folder=None).step == 45


PROGRAM = """
import dataclasses, sys, torch
from tests.torch.recovering import AGAIN, KINDS, made_nan
torch.set_num_threads(int(sys.argv[2]))
training = KINDS["fused Adam, loss scale"]()
policy = dataclasses.replace(AGAIN, every=1, check_every=1, forget_after=0, budget=1000)
recovery = training.recovery(policy, folder=sys.argv[1])
print("RESUMED", recovery.resume(), flush=True)
training.run(10**6, recovery=recovery, hurt=made_nan, at=recovery.step + 4)
"""


def _killed_after(seconds: float, folder: Path) -> int:
    """Train, kill the program that long after its first rewind, and return the step that it resumed at."""
    # As many threads as here, because some sums depend on their number.
    arguments = [str(folder), str(torch.get_num_threads())]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("RESUMED"), process.stderr.read()  # type: ignore[union-attr]
        before, until = events_on_disk(folder), time.monotonic() + 60
        while events_on_disk(folder) == before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(seconds)
        process.kill()
    return int(line.split()[1])


def events_on_disk(folder: Path) -> int:
    ledger = folder / "recovery.json"
    return len(json.loads(ledger.read_text())["events"]) if ledger.exists() else 0


@pytest.mark.timeout(1800)  # each killed process has imported torch
@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_a_run_killed_while_it_writes_goes_on_to_the_same_end(kills: int, tmp_path: Path) -> None:
    moments = random.Random(kills)
    resumed = [_killed_after(moments.uniform(0.0, 0.7), tmp_path) for _ in range(kills)]
    assert resumed == sorted(resumed)
    training = KINDS["fused Adam, loss scale"]()
    recovery = training.recovery(folder=tmp_path)
    step = recovery.resume()
    assert step > max(resumed)
    assert len(recovery.events) >= 1  # rewinds were among the moments
    training.run(step + 7, recovery=recovery)
    expected = KINDS["fused Adam, loss scale"]()
    expected.run(step + 7, policy=AGAIN)
    assert same(whole_state(training), whole_state(expected))


def test_snapshots_are_loaded_without_running_code(tmp_path: Path) -> None:
    Training(numbered, sgd).run(12, folder=tmp_path)
    files = list(tmp_path.glob("step-*/*.pt"))
    assert files
    for file in files:
        torch.load(file, weights_only=True)
