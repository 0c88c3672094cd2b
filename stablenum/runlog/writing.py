"""Writing the record of a run into a file, while the run goes on.

Rows are taken from the recorder, which holds the last 128 steps, before they fall out of it. What is new
among them is found by comparison with what was written last, so that a run that goes back to an earlier
step, or goes on from a checkpoint, writes no step twice that is the same.

The file is opened for each write, and every write is one block of whole lines at its end. Nothing is left in
a buffer that a forked process or a copied optimizer could write again, and a reader sees whole lines.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stablenum.errors import bad_type
from stablenum.guard.readout import StepRecord
from stablenum.guard.recorder import CAPACITY
from stablenum.runlog.lines import (
    FORMAT,
    Rewind,
    Step,
    Update,
    header_line,
    is_header,
    parsed,
    rewind_line,
    step_line,
    update_line,
)

__all__ = ["EVERY", "LogFile", "Pace"]

EVERY = CAPACITY // 2  # steps between two readings of the recorder

_TAIL = 2**17  # bytes: more than the rows of a recorder take
_MARGIN = 2 * CAPACITY  # rows whose lines are remembered

_logger = logging.getLogger("stablenum")


class LogFile:
    """The file of one run. A file that cannot be written ends the log with one warning, never the run.

    Args:
        path: the file; if it is there, it is a log, and the run goes on in it.
        argument: the name of the user's argument, for error messages.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: ``path`` is in a folder that is not there, or is something other than a log.
    """

    def __init__(self, path: str | os.PathLike[str], *, argument: str) -> None:
        if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
            raise bad_type(argument, "the path of a file, as in 'run.jsonl'", path)
        self.path = Path(path).absolute()  # a program may change its folder
        _check(self.path, argument)
        self._process = os.getpid()
        self._header: str | None = None
        self._written: dict[int, str] = {}  # the last lines, by step
        self._last: dict[int, StepRecord] = {}  # what was given last
        self._size: int | None = None  # of the file after the last write
        self._over = self._told = self._has_written = False

    @property
    def over(self) -> bool:
        """Whether no more is written: the file failed, or this is a fork of the process that writes it."""
        return self._over or os.getpid() != self._process

    def begin(
        self,
        *,
        framework: str,
        settings: Mapping[str, Any] | None,
        versions: Mapping[str, str],
        optimizer: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a header: at the start of the run, and when its settings change. See :func:`header_line`."""
        first = self._header is None
        self._header = header_line(
            framework=framework, settings=settings, versions=versions, optimizer=optimizer, changed=not first
        )
        try:
            unfinished = first and self._go_on()
        except OSError as error:
            self._stop(error)
            return
        self._append(("\n" if unfinished else "") + self._header + "\n")

    def write(self, records: Sequence[StepRecord], updates: Sequence[Update] = ()) -> None:
        """Write what is new among the recorded steps, which are the oldest first, and then the updates."""
        if self.over:
            return
        new = [(record["step"], step_line(record)) for record in self._new(records)]
        if new:
            if self._has_written:  # otherwise the run may go on from where another one has been
                self._tell_of_lost_steps(new[0][0])
            self._has_written = True
            self._remember(new)
        texts = [line for _, line in new] + [update_line(update) for update in updates]
        if texts:
            self._append("\n".join(texts) + "\n")
        self._last = {record["step"]: record for record in records}

    def go_back(self, rewind: Rewind, records: Sequence[StepRecord]) -> None:
        """Write that the run went back, and why, after the steps that this undid.

        Args:
            rewind: from where, to where, and why.
            records: the recorded steps now, oldest first. They are from before ``rewind.first``, so the file
                has them. Steps that follow are written even if they come out as before.
        """
        self._written = {record["step"]: step_line(record) for record in records}
        self._last = {record["step"]: record for record in records}
        self._append(f"{rewind_line(rewind)}\n")

    def _new(self, records: Sequence[StepRecord]) -> Sequence[StepRecord]:
        """Return the records from the first one on that is not in the file as it is."""
        for i, record in enumerate(records):
            step = record["step"]
            # Most records are those of the last time; a line takes longer to make. (NaN does not equal NaN.)
            if record != self._last.get(step) and step_line(record) != self._written.get(step):
                return records[i:]
        return []

    def _remember(self, new: Sequence[tuple[int, str]]) -> None:
        before = {step: line for step, line in self._written.items() if step < new[0][0]}
        kept = {**before, **dict(new)}
        self._written = dict(list(kept.items())[-_MARGIN:])

    def _tell_of_lost_steps(self, first: int) -> None:
        lost = first - max(self._written, default=first) - 1
        if lost > 0 and not self._told:
            self._told = True
            _logger.warning(
                f"{lost} steps before step {first} are missing in {self.path}: more than {CAPACITY} steps "
                "passed between two readings of the record, which holds no more. Where one call takes "
                "several steps, let it take fewer."
            )

    def _go_on(self) -> bool:
        """Remember the last steps of a file that is there; return whether its last line is unfinished."""
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            *lines, last = file.read().split(b"\n")
        for line in lines if size <= _TAIL else lines[1:]:
            try:
                found = parsed(line)
            except ValueError:
                continue
            if isinstance(found, Step):
                self._remember([(found.step, line.decode())])
            elif isinstance(found, Rewind):
                self._written = {step: text for step, text in self._written.items() if step < found.first}
        self._size = size
        return bool(last)

    def _append(self, text: str) -> None:
        """Add whole lines to the end of the file."""
        if self.over:
            return
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                size = os.fstat(handle).st_size
                self._look_for_another_writer(size)
                if size == 0 and not text.startswith(f"{self._header}"):  # the file was removed
                    text = f"{self._header}\n{text}"
                _write_all(handle, text.encode("utf-8", "replace"))
                self._size = os.fstat(handle).st_size
            finally:
                os.close(handle)
        except OSError as error:
            self._stop(error)

    def _look_for_another_writer(self, size: int) -> None:
        if self._size is not None and size > self._size and not self._told:
            self._told = True
            _logger.warning(
                f"Something else writes into {self.path}: it is longer than this run left it. Give each "
                "guard and each process a log of its own."
            )

    def _stop(self, error: OSError) -> None:
        self._over = True
        _logger.warning(f"The log of the run ends here, because {self.path} cannot be written: {error}")


class Pace:
    """When the recorder is read: every 64 steps, of which a call may take several.

    How many a call takes is not known without a wait, so it is learned from the readings that arrive. Until
    then every call is one at which to read. Where each takes one, the readings are after the steps 63, 127
    and so on, also in a run that goes on from a checkpoint.
    """

    def __init__(self) -> None:
        self._calls = self._last_call = 0
        self._every = 1
        self._seen: tuple[int, int] | None = None
        self._ahead: int | None = None  # of the calls the steps are, while each call takes one

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._calls

    @property
    def steps_singly(self) -> bool:
        """Whether it is known that a call takes one step at most."""
        return self._every == EVERY

    @property
    def due_next(self) -> bool:
        """Whether the recorder is to be read at the next call."""
        if self._ahead is not None:
            return (self._calls + 1 + self._ahead) % EVERY == EVERY - 1
        return self._calls + 1 - self._last_call >= self._every

    def due(self) -> bool:
        """Count a call, and return whether to read the recorder now."""
        due = self.due_next
        self._calls += 1
        self._last_call = self._calls if due else self._last_call
        return due

    def arrived(self, call: int, step: int) -> None:
        """Learn from the number of the last step at a call."""
        if self._seen is not None and call > self._seen[0]:
            calls, steps = call - self._seen[0], step - self._seen[1]
            self._every = max(1, EVERY // max(1, -(-steps // calls)))
            self._ahead = step - call if steps == calls else None
        self._seen = call, step

    def went_back(self, step: int) -> None:
        """Take note that the last step is now this one."""
        self._seen = self._calls, step
        self._ahead = None if self._ahead is None else step - self._calls


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _check(path: Path, argument: str) -> None:
    """Check that a log can be written to ``path``.

    Raises:
        ValueError: it cannot; the message says why.
    """
    hint = "Name a new file, or one that such a log has written."
    if not path.parent.is_dir():
        raise ValueError(
            f"{argument} must be a file in a folder that is there; got {str(path)!r}. Make the folder first."
        )
    if not path.exists():
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ValueError(f"{argument} must be in a folder that can be written; got {str(path)!r}.")
        return
    if not path.is_file():
        raise ValueError(f"{argument} must be a file; got {str(path)!r}, which is something else. {hint}")
    if not os.access(path, os.R_OK | os.W_OK):
        raise ValueError(f"{argument} must be a file that can be written; got {str(path)!r}. {hint}")
    with path.open("rb") as file:
        first = file.readline(2**24)
    if first and not _begins_a_log(first):
        raise ValueError(
            f"{argument} must be a log of stablenum, of format {FORMAT}; got {str(path)!r}, which is not, "
            f"and is left as it is. {hint}"
        )


def _begins_a_log(line: bytes) -> bool:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return is_header(plain) and plain["stablenum_log"] == FORMAT
