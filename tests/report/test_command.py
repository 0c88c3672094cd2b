"""``stablenum report``: the page, where it goes, the exit codes, and the run on a terminal."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from stablenum import Reason, cli
from stablenum.commands.report import watch
from stablenum.runlog.lines import Rewind
from stablenum.runlog.reading import RunReader, read_run
from tests.report.logs import begun, log_of, record
from tests.test_imports import BLOCK, JAX, ROOT, TORCH


def report(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app("report", "diff"), ["report", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def log(tmp_path: Path) -> Path:
    bad = record(1, loss=math.nan, grad_norm=math.nan, reason=Reason.NONFINITE_LOSS)
    return log_of(tmp_path / "run.jsonl", [record(0), bad, record(2)])


def test_a_page_is_written_beside_the_log(log):
    code, text = report(log)
    assert code == 0
    assert text == f"{log.with_name('run.html')}: run.jsonl (3 steps, 1 skipped)"
    page = log.with_name("run.html").read_text(encoding="utf-8")
    assert "NONFINITE_LOSS" in page
    assert "ClipByGlobalNorm(max_norm=1)" in page


def test_steps_that_were_undone_are_counted(log):
    begun(log).write([record(0, loss=1.0)])
    code, text = report(log)
    assert (code, text.split(": ")[1]) == (
        0, "run.jsonl (1 steps, 0 skipped; 3 steps undone by a restart, of which 1 was skipped)"
    )  # fmt: skip
    assert "3 steps undone by a restart, of which 1 was skipped" in on_terminal(log, 150)


def test_settings_that_differ_are_told_in_the_terminal(log):
    lr = {"by_group": [3e-3, 3e-7]}
    other = log_of(log.with_name("other.jsonl"), [record(0)], optimizer={"class": "AdamW", "lr": lr})
    said = "optimizer: lr differs: run.jsonl: 0.0003 other.jsonl: 0.003 (group 0); 3e-07 (group 1)"
    assert report(log, other)[1].endswith(f"other.jsonl (1 steps, 0 skipped) {said}")
    assert "differs" not in report(log)[1]


WHY = Rewind("reported", 1, 2, "smoke came out", "Attempt 1: batches 1 to 102 of epoch 0 left out")


def test_a_rewind_is_told_with_its_reason(log):
    file = begun(log)
    file.go_back(WHY, [record(0)])
    file.write([record(0), *(record(i, loss=1.0) for i in range(1, 4))])
    said = "back from step 2 to step 1: smoke came out. Attempt 1: batches 1 to 102 of epoch 0 left out"
    code, text = report(log)
    assert (code, text.split(": ", 1)[1]) == (
        0,
        "run.jsonl (4 steps, 0 skipped; 2 steps undone by a rewind, of which 1 was skipped) " + said,
    )
    assert said in on_terminal(log, 150).splitlines()
    other = log_of(log.with_name("other.jsonl"), [record(0)])
    assert f"run.jsonl: {said}" in report(log, other)[1]


@pytest.mark.parametrize(
    ("width", "said"),
    [
        (
            91,
            "back from step 2 to step 1: smoke came out. Attempt 1: batches 1 to 102 of epoch 0 left out",
        ),
        (90, "back from step 2 to step 1: reported. Attempt 1: batches 1 to 102 of epoch 0 left out"),
        (60, "back from step 2 to step 1: reported. Attempt 1: batches 1 …"),
    ],
)
def test_a_rewind_takes_one_line_of_the_terminal(log, width, said):
    begun(log).go_back(WHY, [record(0)])
    assert said in on_terminal(log, width).splitlines()


def test_a_run_that_went_back_to_its_beginning_says_why(log):
    begun(log).go_back(WHY._replace(first=0), [])
    assert on_terminal(log, 150).splitlines() == [
        "run.jsonl: no step is left. Waiting for the next ones; Ctrl-C ends this.",
        f"back from step 2 to step 0: smoke came out. {WHY.done}",
    ]
    assert report(log)[0] == 0


def test_of_many_rewinds_the_terminal_shows_the_last(log):
    file = begun(log)
    for first in (9, 8, 7, 6, 5, 4):
        file.go_back(WHY._replace(first=first, last=first), [])
    shown = on_terminal(log, 150)
    assert [line[:26] for line in shown.splitlines() if line.startswith("back from")] == [
        f"back from step {first} to step {first}" for first in (7, 6, 5, 4)
    ]
    assert "2 earlier rewinds\n" in shown


def test_the_page_goes_where_it_is_asked_to(log, tmp_path):
    code, text = report(log, "--html", tmp_path / "page.html")
    assert code == 0
    assert text.startswith(str(tmp_path / "page.html"))
    assert not log.with_name("run.html").exists()


def test_a_page_of_before_is_replaced_and_another_file_is_not(log):
    target = log.with_name("run.html")
    assert report(log)[0] == 0
    before = target.read_text(encoding="utf-8")
    log_of(log, [record(i) for i in range(10)])
    assert report(log)[0] == 0
    assert target.read_text(encoding="utf-8") != before
    target.write_text("<h1>mine</h1>")
    code, text = report(log)
    assert code == 2
    assert "run.html is there already and is not a page of this command; name another file." in text
    assert target.read_text() == "<h1>mine</h1>"
    assert report(log, "--html", target)[0] == 0  # it was named


def test_a_log_is_never_the_target(log, tmp_path):
    other = log_of(tmp_path / "other.jsonl", [record(0)])
    before = other.read_bytes()
    code, text = report(log, other, "--html", other)
    assert (code, other.read_bytes()) == (2, before)
    assert "other.jsonl is a log; name another file." in text


def nested(size: int) -> dict[str, object]:
    return {"by_group": [{"by_group": [1.0] * size}]}


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("notes.jsonl", "notes\n", "notes.jsonl is not the log of a run: its first line is not the header"),
        ("later.jsonl", '{"stablenum_log":2}\n', "later.jsonl has format 2"),
        (
            "nested.jsonl",
            json.dumps({"stablenum_log": 1, "optimizer": {"betas": nested(2), "max_momentum": nested(3)}})
            + "\n",
            "nested.jsonl is not the log of a run: its first line is not the header",
        ),
    ],
)
@pytest.mark.parametrize("options", [(), ("--watch",)])
def test_what_cannot_be_read_is_a_usage_error(log, name, content, why, options):
    path = log.with_name(name)
    if content is not None:
        path.write_text(content)
    for arguments in ((path,), (log, path)) if not options else ((path,),):
        code, text = report(*arguments, *options)
        assert code == 2
        assert why in text
    assert sorted(p.suffix for p in log.parent.iterdir() if p.suffix == ".html") == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gone.jsonl", "Invalid value for LOG: there is no file '{path}'."),
        ("empty.jsonl", "Invalid value for LOG: {path} is not the log of a run: it is empty"),
        ("gone/run.jsonl", "Invalid value for LOG: {path} cannot be read: there is no folder {path.parent}."),
        (".", "Invalid value for LOG: {path} cannot be read: it is a folder. Name the log in it."),
    ],
)
def test_the_argument_is_named_that_is_wrong(log, tmp_path, name, why):
    path = tmp_path / name
    (tmp_path / "empty.jsonl").write_text("")
    for arguments in ((path,), (log, path), (path, "--html", tmp_path / "page.html")):
        assert report(*arguments)[0] == 2
        assert why.format(path=path) in report(*arguments)[1]
    if "/" in name or name == ".":
        assert why.format(path=path) in report(path, "--watch")[1]


def test_a_folder_that_cannot_be_written_to_is_not_the_logs_fault(log, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != log.parent)
    code, text = report(log)
    assert code == 2
    assert f"--html: the folder {log.parent} cannot be written to." in text


def test_a_folder_that_is_not_there_is_found_before_the_logs_are_read(log, tmp_path):
    code, text = report(log, "--html", tmp_path / "pages" / "run.html")
    assert code == 2
    assert "does not exist" in text


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    logs = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        logs.append(log_of(tmp_path / folder / "run.jsonl", [record(0)]))
    code, text = report(*logs, "--html", tmp_path / "both.html")
    assert code == 0
    assert f"{logs[0]} (1 steps, 0 skipped), {logs[1]}" in text


def test_it_runs_without_a_framework(log):
    block = BLOCK.format(blocked=(*TORCH, *JAX, "numpy", "matplotlib"))
    program = f"{block}\nfrom stablenum.cli import main\nmain()"
    command = [sys.executable, "-c", program, "report", str(log)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert result.returncode == 0, result.stderr
    assert log.with_name("run.html").exists()


# --- on a terminal -----------------------------------------------------------------------------------------


def on_terminal(log: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(watch.shown(read_run(log), width))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_terminal_shows_the_last_steps_and_the_skips(tmp_path):
    rows = [record(i, loss=100.0 / (1 + i)) for i in range(100)]
    rows[98] = record(98, loss=math.nan, grad_norm=math.inf, reason=Reason.NONFINITE_LOSS)
    text = on_terminal(log_of(tmp_path / "run.jsonl", rows))
    assert "run.jsonl: step 99, 1 of 100 skipped" in text
    assert "  99  " in text
    assert "  92  " in text
    assert "  91  " not in text
    assert "NONFINITE_LOSS 1" in text
    assert "1 to 100" in text
    (course,) = [line.split()[1] for line in text.splitlines() if line.startswith("loss ")]
    assert course[0] == "█"
    assert course[-2:] in ("▁▁", "▂▁")
    assert len(course) == 60


def test_the_terminal_shows_a_run_without_steps_and_without_numbers(tmp_path):
    assert on_terminal(log_of(tmp_path / "a.jsonl", [])).startswith("a.jsonl: no step yet")
    bad = record(0, loss=math.nan, grad_norm=math.nan, reason=Reason.NONFINITE_LOSS)
    text = on_terminal(log_of(tmp_path / "b.jsonl", [bad]))
    assert "not finite" in text


def test_a_course_shows_the_largest_value_of_each_part():
    values = [0.0] * 100
    values[37] = 7.0
    assert watch.sparkline(values, 10) == "▁▁▁█▁▁▁▁▁▁"
    assert watch.sparkline([1.0, math.nan, 2.0], 10) == "▁x█"
    assert watch.sparkline([1.0, 10.0, 100.0], 10) == "▁▅█"  # by its logarithm
    assert watch.sparkline([3.0, 3.0], 10) == "▁▁"
    assert watch.sparkline([], 10) == ""


def test_a_run_that_goes_on_is_followed_until_it_is_interrupted(tmp_path, monkeypatch):
    file = begun(tmp_path / "run.jsonl")
    rounds = []

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) > 3:
            raise KeyboardInterrupt
        file.write([record(i) for i in range(10 * len(rounds))])

    monkeypatch.setattr(watch.time, "sleep", sleep)
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    watch.watched(RunReader(tmp_path / "run.jsonl"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert rounds == [1.0] * 4
    for step in (9, 19, 29):
        assert f"run.jsonl: step {step}" in text


@pytest.mark.parametrize("content", [None, "", '{"stablenum_log":1,'])
def test_a_run_that_has_not_begun_is_waited_for(tmp_path, monkeypatch, content):
    path, rounds = tmp_path / "run.jsonl", []
    if content is not None:
        path.write_text(content)

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 2:
            path.unlink(missing_ok=True)
            begun(path)
        if len(rounds) == 3:
            begun(path).write([record(0), record(1)])
        if len(rounds) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    code, text = report(path, "--watch")
    assert code == 0, text
    assert f"Waiting for the log {path} to begin; Ctrl-C ends this." in text
    assert text.count("Waiting") == 1
    assert "run.jsonl: step 1, 0 of 2 skipped" in text
    assert len(rounds) == 5


def test_the_first_step_is_waited_for(tmp_path, monkeypatch):
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    begun(tmp_path / "run.jsonl")
    monkeypatch.setattr(watch.time, "sleep", sleep)
    code, text = report(tmp_path / "run.jsonl", "--watch")
    assert (code, text) == (0, "run.jsonl: no step yet. Waiting for the first ones; Ctrl-C ends this.")


def test_ctrl_c_ends_the_waiting_too(tmp_path, monkeypatch):
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    code, text = report(tmp_path / "run.jsonl", "--watch")
    assert (code, text) == (0, f"Waiting for the log {tmp_path}/run.jsonl to begin; Ctrl-C ends this.")


def test_ctrl_c_ends_the_command(log):
    # A program that was started in the background ignores Ctrl-C, and so do the programs that it starts.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heeds}; from stablenum.cli import main; main()"
    command = [sys.executable, "-c", program, "report", str(log), "--watch"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        os.close(theirs)
        seen = ""
        while "step 2" not in seen:  # the command would end with an error otherwise, and the reading with it
            seen += os.read(ours, 1024).decode()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    os.close(ours)
    assert (process.returncode, errors) == (0, "")


def test_one_run_is_watched_and_no_page_written(log):
    code, text = report(log, log, "--watch")
    assert (code, "--watch shows one run; name one log." in text) == (2, True)
    code, text = report(log, "--watch", "--html", log.with_name("x.html"))
    assert (code, "--watch writes no page; leave one of the two out." in text) == (2, True)


def test_a_page_of_several_runs_replaces_nothing_that_was_not_named(log):
    other = log_of(log.with_name("other.jsonl"), [record(0)])
    more = log_of(log.with_name("more.jsonl"), [record(0)])
    pages = ["run.html", "run-and-other.html", "run-and-2-more.html"]
    for page, logs in zip(pages, ([log], [log, other], [log, other, more]), strict=True):
        for _ in range(2):
            assert report(*logs)[1].startswith(f"{log.with_name(page)}: ")
    before = [log.with_name(page).read_bytes() for page in pages]
    assert len(set(before)) == 3


def test_an_output_that_takes_no_more_is_no_finding(log):
    command = [sys.executable, "-m", "stablenum", "report", str(log)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2, "stablenum: the output cannot be written: No space left on device\n"
    )  # fmt: skip


def test_a_reader_that_has_enough_is_no_finding(log):
    command = [sys.executable, "-m", "stablenum", "report", str(log)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        done.stdout.close()
        assert (done.wait(), done.stderr.read()) == (141, b"")


@pytest.mark.parametrize("where", ["first", "later", "last"])
def test_a_line_that_is_too_long_is_refused(where, log, monkeypatch):
    monkeypatch.setattr("stablenum.runlog.reading.LONGEST", 10_000)
    monkeypatch.setattr("stablenum.runlog.reading._AT_A_TIME", 20_000)
    long, before = '{"x": "' + "a" * 50_000 + '"}\n', log.read_text()
    log.write_text(
        {"first": long + before, "later": before + long + before, "last": before + long[:-1]}[where]
    )
    code, text = report(log)
    assert code == 2
    assert "a line in it has more than 10,000 bytes" in text


def test_a_pipe_is_no_log(tmp_path):
    os.mkfifo(tmp_path / "run.jsonl")
    code, text = report(tmp_path / "run.jsonl")
    assert (code, "it is not a file, but a pipe" in text) == (2, True)
