"""The script's process and its folder: both are gone when the command ends, whatever ends the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["PATIENCE", "Running"]

# The seconds that a script has to end, once it has been asked to.
PATIENCE = 10.0
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Running:
    """A process, its temporary folder, and the signals to this process meanwhile.

    SIGTERM and SIGHUP end the script, then this process. Ctrl-C is the script's, which may save something and
    end by itself; a second Ctrl-C ends it like SIGTERM. A script that does not end in time is killed.

    The handlers raise nothing, so that no signal can come between the start of a process and the note of it.
    """

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._folders: list[tempfile.TemporaryDirectory[str]] = []
        self._before: dict[int, Any] = {}
        self._asked: list[int] = []
        self._interrupts = 0

    def begin(self) -> Path:
        """Take over the signals, except those that this process ignores (``nohup``), and make the folder."""
        if threading.current_thread() is threading.main_thread():
            for number in (*_ENDING, signal.SIGINT):
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):  # None: a handler that is not Python's
                    self._before[number] = before
                    signal.signal(number, self._on_signal)
        self._folders.append(tempfile.TemporaryDirectory(prefix="stablenum-", ignore_cleanup_errors=True))
        return Path(self._folders[0].name)

    def run(self, command: Sequence[str], environment: Mapping[str, str], output: int | None) -> int:
        """Run a command and return its exit code, negative for a signal.

        Args:
            command: the program and its arguments.
            environment: the environment variables.
            output: where standard output and error go; None for those of this process.
        """
        if self._asked:
            return -self._asked[0]
        self._started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        if self._asked:  # while the process was starting
            self._ask()
        return self._started[0].wait()

    @property
    def memory(self) -> int:
        """The memory in bytes that the process holds; 0 where the system does not say."""
        try:
            pages = int(Path(f"/proc/{self._started[0].pid}/statm").read_text(encoding="utf-8").split()[1])
        except (OSError, IndexError, ValueError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        """End the process, from another thread than that which runs it."""
        self._ask()

    def end(self) -> None:
        """End the process, remove the folder, and give the signals back. May be called again."""
        for process in self._started:
            if process.poll() is None:
                self._ask()
                process.wait()
        for folder in self._folders:
            folder.cleanup()
        for number, before in self._before.items():
            signal.signal(number, before)

    def exit_if_asked(self) -> None:
        """End this process, as a signal would have ended it.

        Raises:
            SystemExit: a signal has come.
        """
        if self._asked:
            sys.exit(128 + self._asked[0])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._started:
            self._interrupts += 1
            if self._interrupts == 1:
                if not _terminal_interrupts_script():
                    self._started[0].send_signal(number)
                return
        self._asked.append(number)
        self._ask()

    def _ask(self) -> None:
        """Ask the process to end, and kill it if it does not."""
        for process in self._started:
            process.terminate()
            timer = threading.Timer(PATIENCE, process.kill)  # does nothing once the process has ended
            timer.daemon = True
            timer.start()


def _terminal_interrupts_script() -> bool:
    """Return whether Ctrl-C reaches the script without us, because it goes to a whole group of processes."""
    if not hasattr(os, "tcgetpgrp"):
        return True
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # no terminal
        return False
