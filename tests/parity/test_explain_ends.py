"""``stablenum explain`` ends its script and removes its folder, whatever ends the command itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stablenum.commands.explain import runner
from stablenum.diagnosis.watch.plan import Outcome, Plan
from tests.injection import InterruptError, executed_lines, interrupted_at

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and sh are POSIX")

TRAINS_ON = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
while True:
    time.sleep(0.02)
"""
SAVES_FIRST = (
    """
import os, pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path(sys.argv[1] + ".saved").write_text("saved")
    sys.exit(0)
signal.signal(getattr(signal, sys.argv[2]), save)
"""
    + TRAINS_ON
)
# The command as from a shell. A test run in the background ignores SIGINT, and would pass that on.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from stablenum.cli import main
sys.argv[0] = "stablenum"
main()
"""


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "script"), [("SIGTERM", TRAINS_ON), ("SIGTERM", SAVES_FIRST), ("SIGINT", SAVES_FIRST)]
)
def test_a_signal_to_the_command_ends_the_script_too(tmp_path, name, script):
    folder, note = tmp_path / "temporary", tmp_path / "note"
    folder.mkdir()
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "explain", str(tmp_path / "script.py"), "--", str(note), name],
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,  # no terminal, which would send Ctrl-C to the script, too
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        until(lambda: note.exists() and note.read_text())
        assert list(folder.iterdir())
        process.send_signal(getattr(signal, name))
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (143 if name == "SIGTERM" else 0)
    assert not is_alive(int(note.read_text()))
    assert not list(folder.iterdir())
    assert (tmp_path / "note.saved").exists() is (script is SAVES_FIRST)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """In place of Python, a shell that writes an outcome; the list of all processes that are started."""
    found: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            found.append(self)

    outcome = tmp_path / "outcome.json"
    outcome.write_text(json.dumps(Outcome(exit_code=0).to_dict()))
    shell = tmp_path / "python"
    # Without exec, the process that is ended would leave another one behind that goes on writing.
    shell.write_text(f'#!/bin/sh\nexec cp "{outcome}" "$4"\n')
    shell.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(sys, "executable", str(shell))
    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return found


@pytest.mark.parametrize("error", [InterruptError, signal.SIGTERM], ids=["exception", "signal"])
def test_an_interrupt_at_any_line_leaves_no_process_and_no_folder(started, tmp_path, error):
    def call() -> None:
        assert runner.run_once(Plan(script="any"), shown=False).exit_code == 0

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    lines = executed_lines(call)
    assert len(started) == 1
    for number in range(len(lines)):
        started.clear()
        if error is InterruptError:
            assert interrupted_at(number, call) is not None
        else:  # as the shell would see it: this test's handler stands for the end of the process
            _signalled(number, call)
        assert [process.returncode is None for process in started] in ([], [False]), lines[number]
        assert not list((tmp_path / "temporary").iterdir()), lines[number]
        now = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
        assert now == handlers, lines[number]


def _signalled(number: int, call: Callable[[], None]) -> None:
    def outside(signum: int, frame: Any) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, outside)
    try:
        assert interrupted_at(number, call, SystemExit, by=signal.SIGTERM) is not None
    finally:
        signal.signal(signal.SIGTERM, before)
