"""Checkpoints: whatever happens while one is saved, a good one is there, and nothing bad is ever loaded."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stablenum import CheckpointError, PoisonedStateError
from stablenum.checkpoints import folders
from stablenum.checkpoints.finiteness import NonFinite, is_meant
from stablenum.checkpoints.locks import writing_into
from stablenum.checkpoints.manifest import MANIFEST, _with_digest, complaints, read_manifest
from stablenum.checkpoints.settings import StoreSettings
from stablenum.checkpoints.store import Store
from tests.core.saving import ListCodec, state_of, store_in
from tests.injection import executed_lines, first_and_last, interrupted_at, some
from tests.selection import REPEATS

ROOT = Path(__file__).parents[2]
NAN = {"weights": [1.0, math.nan], "moments": [0.0, 0.0]}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder but for the lock."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with the good steps 10 and 20."""
    store = store_in(tmp_path / "run")
    for step in (10, 20):
        store.save(step, state_of(step))
    return tmp_path / "run"


def test_what_is_saved_is_loaded(run):
    store = store_in(run)
    folder = store.save(30, state_of(30))
    assert folder == run / "step-000000030"
    loaded = store.load(None)
    assert (loaded.step, loaded.state, loaded.folder) == (30, state_of(30), folder)
    assert store.load(None, step=10).state == state_of(10)
    assert store.steps() == [10, 20, 30]
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert manifest["files"]["parts/weights.json"]["bytes"] == len(json.dumps(state_of(30)["weights"]))
    assert manifest["versions"] == {"lists": "1.0"}


def test_nothing_is_there_before_the_first_save(tmp_path):
    store = store_in(tmp_path / "run")
    assert store.steps() == []
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*run"):
        store.load(None)
    assert not (tmp_path / "run").exists(), "reading makes no folder"
    store.save(1, state_of(1))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2 in .*; the steps there are: 1"):
        store.load(None, step=2)


# Poison


def test_a_poisoned_state_is_refused_and_named(run):
    before = contents(run)
    with pytest.raises(
        PoisonedStateError, match=r"step 30 .*: weights \(1 NaN of 2\).*steps 10, 20"
    ) as caught:
        store_in(run).save(30, NAN)
    assert (caught.value.step, caught.value.names) == (30, ("weights",))
    assert contents(run) == before
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.step, copy.names) == (str(caught.value), 30, ("weights",))


def test_trap_the_last_healthy_checkpoints_are_not_deleted_to_make_room_for_nan(run):
    for on_poisoned in ("refuse", "set aside"):
        store = store_in(run, keep=1, on_poisoned=on_poisoned)
        for step in range(30, 40):
            try:
                store.save(step, NAN)
            except PoisonedStateError:
                assert on_poisoned == "refuse"
    assert store.load(None).state == state_of(20)


def test_a_poisoned_state_is_set_aside(run, caplog):
    store = store_in(run, on_poisoned="set aside")
    with caplog.at_level(logging.WARNING, "stablenum"):
        found = [store.save(step, NAN) for step in (30, 31, 32, 33)]
    assert "step 30 is not finite (weights (1 NaN of 2)) and was set aside in" in caplog.text
    assert found[0] == run / "post-mortem" / "step-000000030"
    kept = sorted(path.name for path in (run / "post-mortem").iterdir())
    assert kept == ["step-000000031", "step-000000032", "step-000000033"], "the last three"
    assert (store.steps(), store.load(None).step) == ([10, 20], 20)
    assert json.loads((found[-1] / "parts" / "weights.json").read_text("utf-8"))[0] == 1.0


def test_a_post_mortem_is_not_loaded_from_wherever_it_lies(run, caplog):
    store = store_in(run, on_poisoned="set aside")
    shutil.move(store.save(30, NAN), run)
    with caplog.at_level(logging.WARNING, "stablenum"):
        assert store.load(None).step == 20
    assert "step-000000030: it is the post-mortem of a poisoned state" in caplog.text


def test_trap_a_poisoned_checkpoint_that_others_have_written_is_passed_over(run, caplog):
    """The state is verified after it is read, too: a resume loop would load it again and again."""
    store_in(run, allow=("weights",)).save(30, NAN)
    manifest = read_manifest(run / "step-000000030")
    assert manifest.allowed == ("weights",), "allowed when it was saved: good"
    assert store_in(run).load(None).step == 30
    changed = {name: getattr(manifest, name) for name in manifest.__slots__} | {"allowed": ()}
    type(manifest)(**changed).write(run / "step-000000030")
    with caplog.at_level(logging.WARNING, "stablenum"):
        assert store_in(run).load(None).step == 20
    assert "step 20 is loaded. Passed over" in caplog.text
    assert "step-000000030: not finite: weights (1 NaN of 2)" in caplog.text


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        (NonFinite("scheduler.best", "number", 0, 1, 0, 1), True),
        (NonFinite("scheduler.best", "number", 0, 0, 1, 1), True),
        (NonFinite("scheduler.best", "number", 1, 0, 0, 1), False),
        (NonFinite("optimizer.stablenum.state.worst", "guard", 1, 0, 0, 1), True),
        (NonFinite("model.stablenum.weight", "array", 1, 0, 0, 1), False),
        (NonFinite("model.mask", "buffer", 0, 0, 3, 9, 2, others_zero=True), True),
        (NonFinite("model.mask", "buffer", 0, 0, 3, 9, 2, others_zero=False), False),
        (NonFinite("model.mask", "buffer", 1, 0, 3, 9, 2, others_zero=True), False),
        (NonFinite("model.mask", "buffer", 0, 1, 3, 9, 2, others_zero=True), False),
        (NonFinite("model.mask", "array", 0, 0, 3, 9, 2, others_zero=True), False),
        (NonFinite("model.running_mean", "buffer", 0, 0, 1, 9, 1, others_zero=True), False),
    ],
)
def test_what_may_be_not_finite(entry, meant):
    assert is_meant(entry) == meant
    assert is_meant(entry, allow=("nothing", entry.name[:7] + "*"))


# Bytes that have changed


def corrupted(run: Path, file: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("name", [MANIFEST, "parts/weights.json", "parts/moments.json"])
def test_any_changed_byte_is_found(run, name):
    """Each byte, and each of its bits in turn."""
    file = run / "step-000000020" / name
    good = file.read_bytes()
    store = store_in(run)
    for place in range(len(good)):
        changed = bytearray(good)
        changed[place] ^= 1 << (place % 8)
        file.write_bytes(bytes(changed))
        assert store.load(None).step == 10, (place, bytes(changed))
    file.write_bytes(good)
    assert store.load(None).step == 20


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (
        lambda folder: corrupted(folder, folder / "parts/weights.json", lambda data: data.pop()),
        "parts/weights.json has 17 bytes instead of 18",
    ),
    "grown": (
        lambda folder: corrupted(folder, folder / "parts/weights.json", lambda data: data.append(32)),
        "parts/weights.json has 19 bytes instead of 18",
    ),
    "a bit flipped": (
        lambda folder: corrupted(
            folder, folder / "parts/weights.json", lambda data: data.__setitem__(1, data[1] ^ 1)
        ),
        "parts/weights.json does not match its checksum",
    ),
    "a file gone": (lambda folder: (folder / "parts/moments.json").unlink(), "parts/moments.json is missing"),
    "a folder for a file": (
        lambda folder: ((folder / "parts/moments.json").unlink(), (folder / "parts/moments.json").mkdir()),
        "parts/moments.json has",
    ),
    "no manifest": (
        lambda folder: (folder / MANIFEST).unlink(),
        "manifest.json cannot be read: No such file",
    ),
    "an empty manifest": (
        lambda folder: (folder / MANIFEST).write_bytes(b""),
        "manifest.json was changed after it was written",
    ),
    "no dict in the manifest": (
        lambda folder: (folder / MANIFEST).write_bytes(b"[1]\n"),
        "manifest.json was changed after it was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(run, damage, caplog):
    harm, reason = DAMAGES[damage]
    harm(run / "step-000000020")
    store = store_in(run)
    with caplog.at_level(logging.WARNING, "stablenum"):
        assert store.load(None).state == state_of(10)
    assert f"step 10 is loaded. Passed over, because not good: step-000000020: {reason}" in caplog.text
    harm(run / "step-000000010")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be loaded") as caught:
        store.load(None)
    assert set(caught.value.reasons) == {"step-000000010", "step-000000020"}
    assert reason in caught.value.reasons["step-000000020"]
    assert pickle.loads(pickle.dumps(caught.value)).reasons == caught.value.reasons


def test_an_old_damaged_checkpoint_is_no_news(run, caplog):
    (run / "step-000000010" / MANIFEST).unlink()
    with caplog.at_level(logging.WARNING, "stablenum"):
        assert store_in(run).load(None).step == 20
    assert not caplog.records


def test_a_folder_under_another_step_and_a_manifest_of_another_version_are_not_loaded(run):
    shutil.copytree(run / "step-000000020", run / "step-000000030")
    future = store_in(run).save(40, state_of(40)) / MANIFEST
    values = json.loads(future.read_text("utf-8")) | {"stablenum_checkpoint": 2}
    manifests = sys.modules["stablenum.checkpoints.manifest"]
    future.write_bytes(manifests._with_digest({k: v for k, v in values.items() if k != "manifest_sha256"}))
    assert store_in(run).load(None).step == 20
    for step, reason in (
        (30, "it holds step 20"),
        (40, "has version 2, and this version of stablenum reads version 1"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            store_in(run).load(None, step=step)


def test_a_checkpoint_in_another_format_is_not_loaded(run):
    class Other(ListCodec):
        name = "other"

    store = store_in(run)
    store.codec = Other()
    with pytest.raises(CheckpointError, match="its format is 'lists', and 'other' is to be read"):
        store.load(None)


# Disks that are full, read-only or fail


def failing(function: str, calls: int) -> Callable[..., Any]:
    """A function of ``os`` that works so many times, and then fails; ``open`` once, as removing needs it."""
    real, left = getattr(os, function), calls

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1 or (left < 0 and function != "open"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    return fails


def saved_or_said(store: Store, step: int, caplog: pytest.LogCaptureFixture) -> tuple[Path | None, str]:
    """The folder of the checkpoint, if it was saved, and the message of the error or of the log."""
    caplog.clear()
    try:
        folder = store.save(step, state_of(step))
    except CheckpointError as error:
        return None, str(error)
    return folder, caplog.text


@pytest.mark.parametrize("function", ["fsync", "open", "rename", "mkdir"])
@pytest.mark.parametrize("on_error", ["raise", "go on"])
def test_a_disk_that_fails_at_any_call_leaves_what_was_there(run, monkeypatch, function, on_error, caplog):
    """``os.fsync``, ``os.open``, ...: the first call fails, then the second, and so on."""
    before, store = contents(run), store_in(run, keep=2, on_error=on_error)
    for call in range(100):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "stablenum"):
            patch.setattr(os, function, failing(function, call))
            folder, message = saved_or_said(store, 30, caplog)
        if folder is not None:
            break
        assert "step 30 could not be saved in" in message
        assert "No space left on device; the checkpoints there are unchanged (steps 10, 20)" in message
        assert contents(run) == before
    assert call >= 1
    assert store.load(None).state == state_of(30)  # whether an older one could be removed or not
    store.save(40, state_of(40))
    assert store.steps() == [30, 40]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux tells which file a number means")
def test_everything_is_flushed_before_it_gets_its_name(run, monkeypatch):
    """A power cut after the renaming must not leave empty files behind."""
    calls: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noting_fsync(handle: int) -> None:
        calls.append(("flushed", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noting_rename(source: Any, target: Any, **kwargs: Any) -> None:
        calls.append(("renamed", str(target)))
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    folder = store_in(run).save(30, state_of(30))
    at = calls.index(("renamed", str(folder)))
    flushed = [Path(path) for how, path in calls[:at] if how == "flushed"]
    (hidden,) = {path for path in flushed if path.parent == run}
    names = {path.relative_to(hidden).as_posix() for path in flushed if path != hidden}
    assert {"parts", "parts/moments.json", "parts/weights.json"} <= names
    assert any(name.startswith(".manifest") for name in names), "under its first name"
    assert flushed[-1] == hidden
    assert ("flushed", str(run)) in calls[at:]


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk with 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_keeps_the_last_checkpoint(small_disk):
    store = store_in(small_disk / "run", keep=1)
    store.save(1, state_of(1, 1000))
    before = contents(small_disk)
    for step in (2, 3, 4):
        with pytest.raises(CheckpointError, match="No space left on device"):
            store.save(step, state_of(step, 5000))
        assert contents(small_disk) == before, "what was begun is removed"
    store.save(5, state_of(5, 1000))
    assert store.load(None).state == state_of(5, 1000)


def test_a_read_only_disk_is_read_from(small_disk, caplog):
    store_in(small_disk / "run").save(1, state_of(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    store = store_in(small_disk / "run", on_error="go on")
    assert store.load(None).state == state_of(1)
    with caplog.at_level(logging.WARNING, "stablenum"):
        assert store.save(2, state_of(2)) is None
    assert "Read-only file system" in caplog.text
    with pytest.raises(CheckpointError, match="could not be confirmed"):
        store.confirm(1)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "run").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="File exists"):
        store_in(tmp_path / "run").save(1, state_of(1))
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        store_in(tmp_path / "run").load(None)
    assert (tmp_path / "run").read_text(encoding="utf-8") == "mine"


# Interrupts and processes that are killed


# A file is not closed by a ``with`` that is interrupted in its last line.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.slow(reason="every line"))])
def test_an_interrupt_at_any_line_leaves_a_good_checkpoint(tmp_path, count):
    def prepared() -> Any:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        store = store_in(tmp_path / "run", keep=1)
        store.save(10, state_of(10))
        return store

    inside = (str(ROOT / "stablenum" / "checkpoints"),)
    store = prepared()
    lines = executed_lines(lambda: store.save(20, state_of(20)), inside)
    for number in some(first_and_last(lines), count):
        store = prepared()
        place = interrupted_at(number, lambda store=store: store.save(20, state_of(20)), inside=inside)
        assert place is not None
        loaded = store.load(None)
        assert loaded.state == state_of(loaded.step), place
        assert loaded.step in (10, 20), place
        store.save(30, state_of(30))
        assert not [*store.folder.glob(".step-*")], place


@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.slow(reason="200 processes"))])
def test_a_process_killed_while_saving_leaves_a_good_checkpoint(tmp_path, times):
    command = [sys.executable, "-m", "tests.core.killing_program", str(tmp_path / "run"), str(times), "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["writing"] >= times / 4, "most of the time goes into writing"


def test_what_a_dead_process_left_is_removed_and_what_a_living_one_writes_is_not(run):
    left = run / ".step-000000030.0123456789abcdef"
    (left / "parts").mkdir(parents=True)
    (left / "parts" / "weights.json").write_text("[", encoding="utf-8")
    store = store_in(run)
    with writing_into(run, lambda: None):  # another one that writes
        store.save(30, state_of(30))
        assert left.exists()
    store.save(40, state_of(40))
    assert not left.exists()


# What is kept


def test_the_newest_are_kept(run):
    store = store_in(run, keep=2)
    for step in (30, 40, 50):
        store.save(step, state_of(step))
    assert store.steps() == [40, 50]
    assert sorted(path.name for path in run.iterdir()) == [".lock", "step-000000040", "step-000000050"]
    every = store_in(run, keep=None)
    for step in range(60, 70):
        every.save(step, state_of(step))
    assert len(every.steps()) == 12


def test_a_damaged_checkpoint_replaces_nothing(run):
    store = store_in(run, keep=2)
    (run / "step-000000020" / "parts" / "weights.json").unlink()
    store.save(30, state_of(30))
    assert store.steps() == [10, 30], "10 stays, because 20 is no replacement"
    store.save(40, state_of(40))
    assert store.steps() == [30, 40]


def test_folders_of_others_are_not_removed(run):
    (run / "step-5").mkdir()
    (run / "step-5" / "model.pt").write_text("other", encoding="utf-8")
    (run / "step-best").mkdir()
    store_in(run, keep=1).save(30, state_of(30))
    names = {path.name for path in run.iterdir()}
    assert names == {".lock", "step-5", "step-best", "step-000000030"}


@pytest.mark.parametrize(("kind", "other"), [("", "snapshot"), ("snapshot", "")])
@pytest.mark.parametrize("on_error", ["raise", "go on"])
def test_what_something_else_saved_is_neither_replaced_nor_loaded(kind, other, on_error, tmp_path):
    settings = StoreSettings(keep=1, on_error=on_error)
    first = Store(tmp_path, ListCodec(), settings, kind=kind)
    first.save(10, state_of(10))
    before = contents(tmp_path)
    second = Store(tmp_path, ListCodec(), settings, kind=other)
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is in use.*snapshot.*Give another folder"):
        second.save(20, state_of(20))
    assert contents(tmp_path) == before
    first.save(30, state_of(30))
    assert first.load(None).step == 30
    if not other:
        with pytest.raises(CheckpointError, match="it is a snapshot of a recovery"):
            second.load(None)


def test_after_a_rewind_the_checkpoint_saved_last_is_loaded(run):
    """Step 20 was reached by the way that was given up."""
    store = store_in(run)
    store.save(15, state_of(15))
    assert store.load(None).step == 15
    assert store.steps() == [10, 20, 15]


def test_a_step_that_is_saved_again_replaces_the_older_one(run):
    store = store_in(run)
    for value in (1.0, 2.0, 3.0):
        store.save(20, {"weights": [value], "moments": [value]})
        assert store.load(None).state["weights"] == [value]
        assert store.steps() == [10, 20]
        assert len([*run.glob("step-*20*")]) == 1


def test_a_state_that_is_not_confirmed_is_the_second_choice(run):
    store = store_in(run, keep=1)
    store.save(30, state_of(30), confirmed=False)
    store.save(40, state_of(40), confirmed=False)
    assert store.steps() == [20, 40], "the newest, and the last that is confirmed"
    assert store.load(None).step == 20
    (run / "step-000000020" / MANIFEST).unlink()
    assert store.load(None).step == 40, "better than none"
    store.save(50, state_of(50), confirmed=False)
    store.confirm(50)
    assert store.load(None).step == 50
    assert store.steps() == [50]
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 60 in .* to confirm"):
        store.confirm(60)


def test_an_old_one_that_cannot_be_removed_is_no_error(run, monkeypatch, caplog):
    def fails(folder: Path, root: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(folder))

    monkeypatch.setattr("stablenum.checkpoints.store.remove", fails)
    with caplog.at_level(logging.WARNING, "stablenum"):
        store_in(run, keep=1).save(30, state_of(30))
    assert "no longer needed is still there: [Errno 1] Operation not permitted" in caplog.text


def test_two_that_take_the_same_name_at_once_get_two(tmp_path):
    for _ in range(3):
        temporary = folders.temporary_name(tmp_path, 7)
        temporary.mkdir()
        (temporary / "file").write_text("", encoding="utf-8")
        folders.move_to_step(temporary, tmp_path, 7)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000000007", "step-000000007-2", "step-000000007-3"]


# Settings


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"keep": 0}, ValueError, "keep must be a whole number from 1"),
        ({"keep": True}, ValueError, "keep must be a whole number"),
        ({"on_poisoned": "raise"}, ValueError, "on_poisoned must be 'refuse' or 'set aside'; got 'raise'"),
        ({"on_error": "ignore"}, ValueError, "on_error must be 'raise' or 'go on'; got 'ignore'"),
        ({"allow": "*.mask"}, ValueError, r"allow must be a sequence of patterns, such as \('\*.mask',\)"),
        ({"allow": (3,)}, TypeError, "allow must be a sequence of strings"),
    ],
)
def test_a_wrong_setting_is_named(settings, error, message):
    with pytest.raises(error, match=message):
        StoreSettings(**settings)


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_a_wrong_step_is_named_and_nothing_is_written(run, step):
    before = contents(run)
    with pytest.raises(ValueError, match="step must be a whole number from 0"):
        store_in(run).save(step, state_of(1))
    assert contents(run) == before


def test_a_path_stays_the_same_when_the_program_changes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = store_in(Path("run"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.save(1, state_of(1)) == tmp_path / "run" / "step-000000001"


def test_complaints_can_leave_out_the_checksums(run):
    folder = run / "step-000000020"
    corrupted(folder, folder / "parts/weights.json", lambda data: data.__setitem__(1, data[1] ^ 1))
    manifest = read_manifest(folder)
    assert complaints(folder, manifest, checksums=False) == []
    assert complaints(folder, manifest, ["parts/moments.json"]) == []
    assert complaints(folder, manifest) == ["parts/weights.json does not match its checksum"]


# --- a reader beside a writer ------------------------------------------------------------------------------


class Beside(ListCodec):
    """Beside every reading, and as late in it as possible, another process saves."""

    def __init__(self, folder: Path, keep: int, times: int, error: Exception | None) -> None:
        self.writer, self.error = store_in(folder, keep=keep), error
        self.step, self.times = 1, times
        self.save()

    def save(self) -> None:
        self.writer.save(self.step, state_of(self.step))
        self.step += 1

    def read(self, folder: Path, like: Any) -> Any:
        if self.times > 0:
            self.times -= 1
            self.save()
            if self.error is not None:
                raise self.error
        return super().read(folder, like)


@pytest.mark.parametrize("error", [None, RuntimeError("no such file"), FileNotFoundError("gone")])
@pytest.mark.parametrize("keep", [1, 3])
def test_what_vanishes_while_it_is_read_is_looked_for_again(keep, error, tmp_path, caplog):
    beside = Beside(tmp_path, keep, 20, error)
    loaded = Store(tmp_path, beside, StoreSettings(keep=keep)).load(None)
    assert loaded.state == state_of(loaded.step)
    assert loaded.step >= (beside.step - 1 if keep == 1 else 1)


def test_an_error_of_a_library_is_one_of_the_checkpoint(run):
    class Failing(ListCodec):
        def read(self, folder: Path, like: Any) -> Any:
            raise RuntimeError("the library gave up")

    with pytest.raises(CheckpointError, match="RuntimeError: the library gave up") as caught:
        Store(run, Failing(), StoreSettings()).load(None)
    assert set(caught.value.reasons) == {"step-000000010", "step-000000020"}


def test_a_listing_that_misses_everything_is_made_again(run, monkeypatch):
    listed, empty = Path.iterdir, iter([True, True, False, True, True, False])
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(()) if next(empty, False) else listed(path))
    assert store_in(run).steps() == [10, 20]
    assert store_in(run).load(None).step == 20


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("loads", [pytest.param(60), pytest.param(3000, marks=REPEATS)])
def test_a_reader_in_another_process_always_finds_a_checkpoint(keep, loads, tmp_path):
    store = store_in(tmp_path, keep=keep)
    store.save(0, state_of(0))
    program = (
        "import itertools, sys; from pathlib import Path; from tests.core.saving import store_in, state_of\n"
        "store = store_in(Path(sys.argv[1]), keep=int(sys.argv[2]))\n"
        "for step in itertools.count(1): store.save(step, state_of(step))"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(keep)], cwd=ROOT)
    try:
        while store.load(None).step < 3:
            assert writer.poll() is None
        for _ in range(loads):
            loaded = store.load(None)
            assert loaded.state == state_of(loaded.step)
            assert store.steps()
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.parametrize("change", ["step", "files", "allowed", "versions", "confirmed", "format", "serial"])
@pytest.mark.parametrize("value", [None, "x", -1.5, [], {}, [1], {"a": 1}, {"../a": {}}, True])
def test_a_manifest_that_is_well_formed_and_wrong(change, value, run):
    folder = run / "step-000000020"
    plain = json.loads((folder / MANIFEST).read_text("utf-8")) | {change: value}
    plain.pop("manifest_sha256")
    (folder / MANIFEST).write_bytes(_with_digest(plain))
    assert store_in(run).load(None).step in (10, 20)
    assert store_in(run).steps() in ([10], [10, 20])
