"""The log of a run: what its lines hold, what is written when, and what is read again."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stablenum import Reason
from stablenum.guard.readout import StepRecord, Worst
from stablenum.guard.recorder import CAPACITY
from stablenum.runlog.lines import (
    Rewind,
    Step,
    Update,
    header_line,
    parsed,
    rewind_line,
    step_line,
    update_line,
)
from stablenum.runlog.reading import NotALogError, RunReader, read_run
from stablenum.runlog.updates import update_of
from stablenum.runlog.writing import EVERY, LogFile, Pace

HEADER: dict[str, Any] = {
    "framework": "torch",
    "settings": {"on_nonfinite": "skip"},
    "versions": {"torch": "2"},
}


def record(step: int, **changes: Any) -> StepRecord:
    usual: dict[str, Any] = {
        "step": step,
        "loss": 1.0 / (step + 1),
        "grad_norm": float(step),
        "loss_scale": 1.0,
        "clip_coefficient": 1.0,
        "reason": Reason.OK,
        "applied": True,
        "worst": Worst(0, "w"),
        "worst_rank": None,
        "precision_level": 0,
    }
    return usual | changes  # type: ignore[return-value]


def records(start: int, stop: int, **changes: Any) -> list[StepRecord]:
    """What the recorder holds after the step before ``stop`` of a run that began at ``start``."""
    return [record(i, **changes) for i in range(max(start, stop - CAPACITY), stop)]


def begun(path: Path) -> LogFile:
    file = LogFile(path, argument="log")
    file.begin(**HEADER)
    return file


def written(path: Path, steps: int) -> LogFile:
    file = begun(path)
    for step in range(EVERY, steps + 1, EVERY):
        file.write(records(0, step))
    file.write(records(0, steps))
    return file


def steps_in(path: Path) -> list[int]:
    """The steps as their lines follow one another in the file."""
    lines = map(parsed, path.read_text().splitlines())
    return [line.step for line in lines if isinstance(line, Step)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


# --- lines -------------------------------------------------------------------------------------------------


def strictly(line: str) -> Any:
    def wrong(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=wrong)


def test_every_field_of_a_step_is_read_as_it_was_written():
    line = step_line(
        record(
            7,
            loss=0.5,
            grad_norm=3.0,
            loss_scale=65536.0,
            clip_coefficient=0.25,
            reason=Reason.CLIPPED,
            worst=Worst(3, 'head."ü".weight\n'),
            worst_rank=2,
            precision_level=1,
        )
    )
    assert "\n" not in line
    assert parsed(line) == Step(7, 0.5, 3.0, 65536.0, 0.25, Reason.CLIPPED, 'head."ü".weight\n', 2, 1)
    assert parsed(line.encode()) == parsed(line)


@pytest.mark.parametrize(
    "bits", [0x00000001, 0x007FFFFF, 0x3DCCCCCD, 0x3F800001, 0x7F7FFFFF, 0x80000001, 0xC0490FDB]
)
def test_a_float32_keeps_every_bit(bits):
    (value,) = struct.unpack("f", struct.pack("I", bits))
    step = parsed(step_line(record(0, loss=value, grad_norm=abs(value))))
    assert isinstance(step, Step)
    assert struct.pack("f", step.loss) == struct.pack("f", value)
    assert struct.pack("f", step.grad_norm) == struct.pack("f", abs(value))


def test_what_is_not_finite_is_strict_json():
    line = step_line(record(0, loss=math.nan, grad_norm=math.inf, reason=Reason.NONFINITE_LOSS))
    assert strictly(line) == {
        "step": 0,
        "loss": "nan",
        "grad_norm": "inf",
        "reason": "NONFINITE_LOSS",
        "worst": "w",
    }
    step = parsed(line)
    assert isinstance(step, Step)
    assert math.isnan(step.loss)
    assert step.grad_norm == math.inf
    assert strictly(step_line(record(0, loss=-math.inf, reason=Reason.NONFINITE_LOSS)))["loss"] == "-inf"


def test_a_loss_that_was_not_given_is_left_out():
    step = parsed(step_line(record(0, loss=math.nan)))
    assert isinstance(step, Step)
    assert step.loss is None


def test_parameters_without_names_and_none_at_all():
    assert parsed(step_line(record(0, worst=Worst(5, None)))).worst == "5"
    assert parsed(step_line(record(0, worst=Worst(-1, None)))).worst is None


def test_headers_and_updates():
    header = parsed(header_line(**HEADER, optimizer={"class": "AdamW"}))
    assert header["settings"] == {"on_nonfinite": "skip"}
    assert header["optimizer"] == {"class": "AdamW"}
    assert header["started"].endswith("+00:00")
    for update in (Update(63, 1e-3, 0.5, "w"), Update(0, 0.0, 0.0, None)):
        assert parsed(update_line(update)) == update


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '"step"',
        '{"step": -1, "grad_norm": 1, "reason": "OK"}',
        '{"step": 1.5, "grad_norm": 1, "reason": "OK"}',
        '{"step": 1, "grad_norm": "much", "reason": "OK"}',
        '{"step": 1, "grad_norm": [1], "reason": "OK"}',
        '{"step": 1, "grad_norm": 1, "reason": "LUCK"}',
        '{"step": 1, "update": null, "largest": 1}',
        '{"rewind": "reported", "first": 3, "last": 9, "seen": "smoke"}',
        '{"rewind": "reported", "first": 3, "last": 1, "seen": "smoke", "done": "nothing"}',
        '{"rewind": "reported", "first": -1, "last": 9, "seen": "smoke", "done": "nothing"}',
        '{"rewind": "reported", "first": 3, "last": "9", "seen": "smoke", "done": "nothing"}',
        '{"stablenum_log": 1, "settings": [1]}',
        '{"stablenum_log": 1, "settings": {"clip": 1.0}}',
        '{"stablenum_log": 1, "settings": {"clip": [1.0]}}',
        '{"stablenum_log": 1, "versions": "2"}',
        b"\xff\xfe",
        "[" * 100_000,
    ],
)
def test_other_lines_are_rejected(line):
    with pytest.raises(ValueError, match=r".*"):
        parsed(line)


def test_a_rewind_is_read_as_it_was_written():
    rewind = Rewind("reported", 450, 539, 'what "you" saw: ü', "Attempt 1: batches 450 to 639 left out")
    assert parsed(rewind_line(rewind)) == rewind
    nothing_undone = rewind._replace(last=449)
    assert parsed(rewind_line(nothing_undone)) == nothing_undone


def test_what_a_user_says_of_a_rewind_is_one_line_of_limited_length():
    rewind = Rewind("reported", 0, 9, "a\n b\t\tc", "batches " + "7, " * 100_000)
    line = rewind_line(rewind)
    assert len(line) < 1200
    read = parsed(line)
    assert isinstance(read, Rewind)
    assert read.seen == "a b c"
    assert read.done.endswith("...")
    assert len(read.done) == 1000


@pytest.mark.parametrize("line", ["{}", '{"step": 1}', '{"step": 70, "learning_rate": 0.1}'])
def test_a_line_of_another_kind_is_passed_over(path, line):
    assert parsed(line) is None
    file = written(path, 10)
    with path.open("a") as log:
        log.write(f"{line}\n")
    file.write(records(0, 12))
    begun(path).write(records(0, 14))
    run = read_run(path)
    assert (run.steps, run.unreadable) == (list(range(14)), 0)


def test_an_update_counts_elements_and_names_the_parameter_that_moved_most():
    update = update_of(3, [0.1, 0.3], [1.0, 2.0], [100, 300], ["a", "b"])
    assert update == Update(3, pytest.approx(math.sqrt(28 / 1300)), pytest.approx(0.15), "b")
    assert update_of(3, [0.1], [0.0], [10], ["a"]) is None  # relative to nothing
    assert update_of(3, [math.nan, 0.1], [1.0, 1.0], [10, 10], None) is None
    assert update_of(3, [0.5, 0.1], [0.0, 1.0], [10, 10], None) == Update(
        3, pytest.approx(math.sqrt(0.26)), 0.1, None
    )
    assert update_of(3, [], [], [], None) is None


# --- writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 128, 300])
def test_each_step_is_written_once_and_in_order(path, steps):
    written(path, steps)
    assert steps_in(path) == list(range(steps))


def test_a_log_is_there_from_the_first_step_on(path):
    begun(path)
    assert len(path.read_text().splitlines()) == 1
    assert len(read_run(path)) == 0


def test_a_row_takes_about_150_bytes(path):
    file = begun(path)
    before = path.stat().st_size
    usual = {
        "loss": 2.30258512,
        "grad_norm": 0.731234567,
        "loss_scale": 65536.0,
        "clip_coefficient": 0.731234567,
    }
    file.write(records(0, 100, **usual, worst=Worst(0, "transformer.blocks.11.attention.qkv.weight")))
    assert 100 * 120 < path.stat().st_size - before < 100 * 190


def test_a_run_that_goes_back_takes_the_steps_again(path):
    file = written(path, 100)
    again = [*records(0, 80), *records(80, 90, loss=5.0)]
    file.write(again)
    file.write([*again, *records(90, 120, loss=6.0)])
    run = read_run(path)
    assert run.steps == list(range(120))
    assert run.loss[79] == pytest.approx(1 / 80)
    assert run.loss[80:] == [5.0] * 10 + [6.0] * 30
    assert (run.rewinds, run.restarts) == ([80], [])
    assert steps_in(path) == [*range(100), *range(80, 120)]
    assert [step.step for step in run.undone] == list(range(80, 100))
    assert run.undone[0].loss == pytest.approx(1 / 81)
    assert run.undone[0][2:] == (80.0, Reason.OK, 0, False)


def test_a_step_that_comes_out_as_before_after_others_that_do_not_is_written(path):
    file = written(path, 100)
    file.write([*records(0, 80), *records(80, 85, loss=5.0), *records(85, 90)])
    file.write([*records(0, 80), *records(80, 85, loss=5.0), *records(85, 110)])
    run = read_run(path)
    assert run.steps == list(range(110))
    assert run.loss[84:86] == [5.0, pytest.approx(1 / 86)]


def test_steps_taken_again_with_the_same_result_are_not_written_again(path):
    file = written(path, 100)
    file.write(records(0, 90))
    file.write(records(0, 110))
    assert steps_in(path) == list(range(110))


WHY = Rewind("runaway_loss", 80, 99, "the median loss is 6.3", "Attempt 1: batches 80 to 120 left out")


def test_a_rewind_is_between_the_steps_that_it_undid_and_those_taken_again(path):
    file = written(path, 100)
    file.go_back(WHY, records(0, 80))
    run = read_run(path)
    assert run.steps == list(range(80))  # also while none is taken again
    file.write([*records(0, 80), *records(80, 90, loss=5.0)])
    lines = [parsed(line) for line in path.read_text().splitlines()]
    assert [line for line in lines if isinstance(line, Rewind)] == [WHY]
    at = lines.index(WHY)
    assert (lines[at - 1].step, lines[at + 1].step) == (99, 80)
    run = read_run(path)
    assert (run.events, run.rewinds, run.restarts) == ([WHY], [], [])
    assert run.steps == list(range(90))
    assert run.loss[79:] == [pytest.approx(1 / 80)] + [5.0] * 10
    assert [(step.step, step.restarted) for step in run.undone] == [(n, False) for n in range(80, 100)]


def test_after_a_rewind_steps_that_come_out_as_before_are_written_again(path):
    file = written(path, 100)
    file.go_back(WHY, records(0, 80))
    file.write(records(0, 90))
    file.write(records(0, 110))
    assert steps_in(path) == [*range(100), *range(80, 110)]
    run = read_run(path)
    assert run.steps == list(range(110))
    assert [step.step for step in run.undone] == list(range(80, 100))


@pytest.mark.parametrize("with_nan", [False, True])
def test_steps_from_long_before_a_rewind_are_not_written_again(path, with_nan):
    def read_from_a_state(first: int, stop: int) -> list[StepRecord]:
        bad = {"loss": float("nan"), "reason": Reason.NONFINITE_LOSS}  # another NaN each time
        return [record(n, **(bad if with_nan and n % 10 == 5 else {})) for n in range(first, stop)]

    file = begun(path)
    for stop in range(EVERY, 800, EVERY):
        file.write(read_from_a_state(max(0, stop - CAPACITY), stop))
    file.go_back(WHY._replace(first=200, last=767), read_from_a_state(72, 200))
    file.write(read_from_a_state(82, 210))
    assert steps_in(path) == [*range(768), *range(200, 210)]


def test_a_run_that_went_back_to_the_beginning_begins_again(path, caplog):
    file = written(path, 100)
    file.go_back(WHY._replace(first=0), [])
    file.write(records(0, 64))
    assert read_run(path).steps == list(range(64))
    assert steps_in(path) == [*range(100), *range(64)]
    assert caplog.messages == []


def test_after_a_rewind_and_a_restart_steps_are_compared_with_those_that_count(path):
    """The process was killed before it had written a step that it took again."""
    written(path, 100).go_back(WHY, records(0, 80))
    begun(path).write(records(0, 90))  # as before the rewind
    run = read_run(path)
    assert run.steps == list(range(90))
    assert (run.restarts, run.events, len(run.undone)) == ([80], [WHY], 20)


def test_a_rewind_of_a_log_that_has_ended_is_not_written(path, monkeypatch):
    file = written(path, 100)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("stablenum.runlog.writing.os.getpid", lambda: -1)
        file.go_back(WHY, records(0, 80))
    assert path.read_bytes() == before


def test_updates_of_steps_that_were_undone_are_left_out(path):
    file = written(path, 80)
    file.write(records(0, 100), [Update(79, 0.1, 0.1, "w"), Update(90, 0.1, 0.1, "w")])
    file.go_back(WHY, records(0, 80))
    assert [update.step for update in read_run(path).updates] == [79]


def test_other_settings_are_no_restart(path):
    file = written(path, 100)
    file.begin(**(HEADER | {"settings": {"on_nonfinite": "raise"}}))
    file.go_back(WHY, records(0, 80))
    file.begin(**HEADER)
    file.write(records(0, 90))
    run = read_run(path)
    assert (run.restarts, run.rewinds, run.events) == ([], [], [WHY])
    assert [step for step, _ in run.headers] == [0, 80, 80]
    begun(path).write(records(0, 95, loss=2.0))
    assert read_run(path).restarts == [0]


def test_a_run_goes_on_in_its_log(path):
    """From a checkpoint at step 90: the recorder in it has steps that the log has already."""
    written(path, 100)
    file = begun(path)
    file.write([*records(0, 90), *records(90, 130, loss=7.0)])
    run = read_run(path)
    assert run.steps == list(range(130))
    assert run.loss[90:] == [7.0] * 40
    assert (run.restarts, run.rewinds) == ([90], [])
    assert [(step.step, step.restarted) for step in run.undone] == [(n, True) for n in range(90, 100)]
    assert len(run.headers) == 2
    assert steps_in(path) == [*range(100), *range(90, 130)]


def test_of_a_long_log_the_end_is_read(path):
    written(path, 3000)
    assert path.stat().st_size > 2**17
    begun(path).write(records(0, 3010))
    assert steps_in(path) == list(range(3010))


def test_a_line_that_a_killed_process_left_unfinished_is_ended(path):
    written(path, 10)
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 20)
    begun(path).write(records(0, 12))
    run = read_run(path)
    assert run.steps == list(range(12))
    assert (run.unreadable, len(run.headers)) == (1, 2)


def test_a_log_that_is_removed_begins_again_with_a_header(path):
    file = written(path, 10)
    path.unlink()
    file.write(records(0, 20))
    assert read_run(path).steps == list(range(10, 20))


def test_a_program_may_change_its_folder(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    file = begun(Path(path.name))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.write(records(0, 3))
    assert steps_in(path) == [0, 1, 2]


def test_lost_steps_are_told_once(path, caplog):
    file = written(path, 64)
    file.write(records(0, 300))
    file.write(records(0, 600))
    (message,) = caplog.messages
    assert "108 steps before step 172 are missing" in message
    assert steps_in(path) == [*range(64), *range(172, 300), *range(472, 600)]


def test_a_run_that_goes_on_from_a_later_checkpoint_has_lost_nothing(path, caplog):
    written(path, 64)
    begun(path).write(records(0, 500))
    assert caplog.messages == []
    assert steps_in(path) == [*range(64), *range(372, 500)]


def test_a_full_disk_ends_the_log_with_one_warning(path, monkeypatch, caplog):
    file = written(path, 64)
    room = iter([20])
    real = os.write

    def write(handle: int, data: bytes) -> int:
        for size in room:
            return real(handle, data[:size])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("stablenum.runlog.writing.os.write", write)
        file.write(records(0, 128))
        file.write(records(0, 192))
    file.write(records(0, 256))
    (message,) = caplog.messages
    assert "The log of the run ends here" in message
    assert "No space left on device" in message
    assert file.over
    run = read_run(path)
    assert run.steps == list(range(64))
    assert run.unreadable == 0  # the last line has not ended


def test_a_write_that_takes_a_part_is_continued(path, monkeypatch):
    real = os.write
    monkeypatch.setattr("stablenum.runlog.writing.os.write", lambda handle, data: real(handle, data[:100]))
    written(path, 200)
    assert steps_in(path) == list(range(200))


def test_a_folder_that_is_gone_ends_the_log_with_one_warning(tmp_path, caplog):
    folder = tmp_path / "runs"
    folder.mkdir()
    file = LogFile(folder / "run.jsonl", argument="log")
    folder.rmdir()
    file.begin(**HEADER)
    file.write(records(0, 10))
    assert len(caplog.messages) == 1


def test_a_second_writer_is_told_of_once(path, caplog):
    file = written(path, 10)
    other = begun(path)
    other.write(records(0, 20, loss=3.0))
    for stop in (30, 40):
        file.write(records(0, stop))
        other.write(records(0, stop, loss=3.0))
    assert [
        message for message in caplog.messages if "Something else writes into" in message
    ] == caplog.messages
    assert len(caplog.messages) == 2  # each of them


def test_a_fork_does_not_write(path, monkeypatch):
    file = written(path, 10)
    monkeypatch.setattr("stablenum.runlog.writing.os.getpid", lambda: -1)
    assert file.over
    file.write(records(0, 20))
    file.begin(**HEADER)
    monkeypatch.undo()
    assert len(path.read_text().splitlines()) == 11


def test_a_wrong_path_is_named(tmp_path):
    for wrong in (7, b"run.jsonl", True, ["run.jsonl"]):
        with pytest.raises(TypeError, match=r"log must be the path of a file, as in 'run\.jsonl'"):
            LogFile(wrong, argument="log")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"log must be a file in a folder that is there; got .*Make the folder"
    ):
        LogFile(tmp_path / "runs" / "run.jsonl", argument="log")
    with pytest.raises(ValueError, match="log must be a file; got"):
        LogFile(tmp_path, argument="log")


@pytest.mark.parametrize("content", ["notes\n", "{}\n", '{"stablenum_log": 2}\n', "[" * 100_000])
def test_another_file_is_left_as_it_is(path, content):
    path.write_text(content)
    with pytest.raises(ValueError, match=r"log must be a log of stablenum, of .* left as it is"):
        LogFile(path, argument="log")
    assert path.read_text() == content


def test_an_empty_file_becomes_a_log(path):
    path.touch()
    written(path, 3)
    assert read_run(path).steps == [0, 1, 2]


# --- reading -----------------------------------------------------------------------------------------------


def test_an_unfinished_line_waits_for_its_end(path):
    written(path, 10)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    reader = RunReader(path)
    assert reader.run.steps == list(range(9))
    path.write_bytes(whole)
    assert reader.read() == 1
    assert reader.run.steps == list(range(10))
    assert reader.read() == 0


def test_a_reader_follows_a_run_that_begins_again_in_a_new_file(path):
    written(path, 100)
    reader = RunReader(path)
    path.unlink()
    written(path, 5)
    reader.read()
    assert reader.run.steps == list(range(5))


def test_what_is_read_while_it_is_written_is_whole(path):
    begun(path)
    reader, wrong = RunReader(path), []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            reader.read()
            if reader.run.unreadable or reader.run.steps != list(range(len(reader.run))):
                wrong.append(reader.run.unreadable)

    thread = threading.Thread(target=read)
    thread.start()
    written(path, 6000)
    done.set()
    thread.join()
    reader.read()
    assert wrong == []
    assert reader.run.steps == list(range(6000))


def test_the_columns_of_a_run(path):
    file = begun(path)
    spike = record(1, loss=math.nan, reason=Reason.NONFINITE_LOSS, worst=Worst(1, "b"), loss_scale=2.0)
    file.write(
        [record(0), spike, record(2, worst=Worst(-1, None), loss=math.nan)], [Update(2, 0.1, 0.2, "w")]
    )
    run = read_run(path)
    assert run.reason == [Reason.OK, Reason.NONFINITE_LOSS, Reason.OK]
    assert (list(run.names), run.worst) == (["w", "b"], [0, 1, -1])
    assert run.loss_scale == [1.0, 2.0, 1.0]
    assert run.skipped == [1]
    assert run.updates == [Update(2, 0.1, 0.2, "w")]
    assert run.header["versions"] == {"torch": "2"}


@pytest.mark.parametrize(("framework", "where"), [("torch", "rank"), ("jax", "device")])
def test_the_rank_of_a_skipped_step_is_named(path, framework, where):
    file = LogFile(path, argument="log")
    file.begin(**(HEADER | {"framework": framework}))
    bad = record(1, reason=Reason.NAN_GRADIENT, grad_norm=math.nan, worst_rank=3)
    file.write([record(0, worst_rank=2), bad])
    assert list(read_run(path).names) == ["w", f"w ({where} 3)"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is empty"),
        ("notes\n", "its first line is not the header"),
        ('{"step":0,"grad_norm":1.0,"reason":"OK"}\n', "its first line is not the header"),
        ('{"stablenum_log":2}\n', "has format 2, and this version of stablenum reads format 1"),
    ],
)
def test_what_is_not_a_log_is_named(path, content, why):
    path.write_text(content)
    with pytest.raises(NotALogError, match=why):
        read_run(path)


# --- when the recorder is read -----------------------------------------------------------------------------


def readings(steps_per_call: float, calls: int, late: int = 0, first: int = 0) -> list[int]:
    """The calls at which the recorder is read, if a reading arrives some calls later."""
    pace, found, under_way = Pace(), [], []
    for call in range(1, calls + 1):
        while under_way and under_way[0][0] <= call:
            pace.arrived(*under_way.pop(0)[1])
        if pace.due():
            found.append(call)
            under_way.append((call + late + 1, (call, first + int(call * steps_per_call) - 1)))
    return found


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("first", [0, 100])
def test_a_run_of_single_steps_is_read_after_the_steps_63_127_and_so_on(first, late):
    found = readings(1, 400, late, first)
    begun, later = found[: 2 + late], [first + call - 1 for call in found[2 + late :]]
    assert begun == list(range(1, 3 + late))
    assert later == [step for step in range(first + 3, first + 400) if step % EVERY == EVERY - 1]


@pytest.mark.parametrize("singly", [True, False])
def test_a_run_that_goes_back_is_read_after_the_same_steps(singly):
    pace, step, read = Pace(), -1, []
    for call in range(1, 300):
        step += 1 if singly or call % 2 else 0
        if pace.due():
            read.append(step)
            pace.arrived(call, step)
        if call == 90:
            pace.went_back(step := step - 40)
    assert not singly or read == [0, 1, 63, 63, 127, 191, 255]
    assert all(b - a <= EVERY for a, b in pairwise(read))


@pytest.mark.parametrize(("steps", "calls"), [(10, 6), (50, 1), (64, 1), (1000, 1), (0.25, 64)])
def test_calls_of_several_steps_are_read_more_often(steps, calls):
    found = readings(steps, 300)
    assert found[-1] - found[-2] == calls
