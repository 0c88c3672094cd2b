"""Reading the log of a run: what its steps were, where it began again, and where it went back."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stablenum.guard.reasons import APPLIED, Reason
from stablenum.runlog.lines import FORMAT, Rewind, Step, Update, is_header, parsed

# A header with settings of 100,000 groups of parameters has 10 MB; other lines have a few hundred bytes.
LONGEST = 2**24
_AT_A_TIME = 2**25  # bytes, so that a first line is whole, or too long

__all__ = ["LONGEST", "NotALogError", "Run", "RunReader", "Undone", "read_run"]


class NotALogError(ValueError):
    """A file is not the log of a run, or one of a later format."""


class Undone(NamedTuple):
    """A step that the run took and did not keep, because it went back to an earlier one.

    Attributes:
        step: its number.
        loss: as in ``Run``.
        grad_norm: as in ``Run``.
        reason: its reason.
        worst: as in ``Run``.
        restarted: whether the run was started again at an earlier step; otherwise it was rewound.
    """

    step: int
    loss: float
    grad_norm: float
    reason: Reason
    worst: int
    restarted: bool


class Run:
    """The steps of a run in columns, each step once: after a restart or a rewind, what was taken last.

    Attributes:
        name: what the run is called.
        steps: the steps' numbers, which rise.
        loss: the loss of each step; NaN if it is not finite or was not given.
        grad_norm: the norm of its gradients.
        loss_scale: its loss scale.
        clip_coefficient: the smallest factor that clipping applied.
        reason: its reason.
        worst: its worst parameter, as an index into ``names``; -1 if there is none.
        names: the names of parameters; of skipped steps with the rank or device at fault, if known.
        headers: each header with the number of the first step after it.
        restarts: the first step of each later start of the run.
        rewinds: the first step after each return to an earlier one in which the run had not ended, where the
            log does not say why.
        events: the returns of which it says why.
        undone: the steps that were taken before the run went back, in the order of the log.
        unreadable: how many lines were not readable.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: list[int] = []
        self.loss: list[float] = []
        self.grad_norm: list[float] = []
        self.loss_scale: list[float] = []
        self.clip_coefficient: list[float] = []
        self.reason: list[Reason] = []
        self.worst: list[int] = []
        self.names: dict[str, int] = {}
        self._measured: list[Update | int] = []  # and the steps to which the run went back
        self.headers: list[tuple[int, Mapping[str, Any]]] = []
        self.restarts: list[int] = []
        self.rewinds: list[int] = []
        self.events: list[Rewind] = []
        self.undone: list[Undone] = []
        self.unreadable = 0
        self._waiting: list[Mapping[str, Any]] = []  # headers before their first step

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def header(self) -> Mapping[str, Any]:
        """The last header."""
        return self._waiting[-1] if self._waiting else self.headers[-1][1]

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """The headers that begin the run, or begin it again; without steps the last header."""
        first, *later = [header for _, header in self.headers] or [self.header]
        return [first, *(header for header in later if header.get("changed") is not True)]

    @property
    def updates(self) -> list[Update]:
        """The measured updates of steps that were not undone."""
        kept: list[Update] = []
        undone_from: float = math.inf
        for each in reversed(self._measured):
            if not isinstance(each, Update):
                undone_from = min(undone_from, each)
            elif each.step < undone_from:
                kept.append(each)
        kept.reverse()
        self._measured = [*kept]
        return kept

    @property
    def in_force(self) -> list[tuple[int, Mapping[str, Any]]]:
        """The headers whose steps were not all undone, with the numbers of their first steps, which rise."""
        kept: list[tuple[int, Mapping[str, Any]]] = []
        for first, header in self.headers:
            while kept and kept[-1][0] >= first:
                kept.pop()
            kept.append((first, header))
        return kept

    @property
    def skipped(self) -> list[int]:
        """The positions of the steps that were skipped."""
        return [i for i, reason in enumerate(self.reason) if reason not in APPLIED]

    def add(self, line: dict[str, Any] | Step | Update | Rewind | None) -> None:
        """Add what a line holds; nothing for one of an unknown kind."""
        if isinstance(line, Step):
            self._add_step(line)
        elif isinstance(line, Update):
            self._measured.append(line)
        elif isinstance(line, Rewind):
            self._go_back_to(line.first, restarted=False)
            self.events.append(line)
        elif line is not None:
            self._waiting.append(line)

    def _add_step(self, step: Step) -> None:
        started = self._begin(step.step) if self._waiting else False
        if self.steps and step.step <= self.steps[-1]:
            self._go_back_to(step.step, restarted=started)
            if not started:
                self.rewinds.append(step.step)
        self.steps.append(step.step)
        self.loss.append(float("nan") if step.loss is None else step.loss)
        self.grad_norm.append(step.grad_norm)
        self.loss_scale.append(step.loss_scale)
        self.clip_coefficient.append(step.clip_coefficient)
        self.reason.append(step.reason)
        name = self._name_of(step)
        self.worst.append(-1 if name is None else self.names.setdefault(name, len(self.names)))

    def _name_of(self, step: Step) -> str | None:
        """Return the worst parameter's name; of a skipped step with the rank or device at fault."""
        if step.worst is None or step.worst_rank is None or step.reason in APPLIED:
            return step.worst
        where = "device" if self.header.get("framework") == "jax" else "rank"
        return f"{step.worst} ({where} {step.worst_rank})"

    def _begin(self, step: int) -> bool:
        """Take the headers before a step; return whether the run was started again there."""
        started = bool(self.headers) and not all(header.get("changed") is True for header in self._waiting)
        if started:
            self.restarts.append(step)
        self.headers += [(step, header) for header in self._waiting]
        self._waiting = []
        return started

    def _go_back_to(self, step: int, *, restarted: bool) -> None:
        """Move the steps from this one on, which are taken again, to those that were undone."""
        first = bisect_left(self.steps, step)
        self.undone += [
            Undone(*values, restarted)
            for values in zip(
                self.steps[first:],
                self.loss[first:],
                self.grad_norm[first:],
                self.reason[first:],
                self.worst[first:],
                strict=True,
            )
        ]
        columns: tuple[list[Any], ...] = (
            self.steps,
            self.loss,
            self.grad_norm,
            self.loss_scale,
            self.clip_coefficient,
            self.reason,
            self.worst,
        )
        for column in columns:
            del column[first:]
        self._measured.append(step)


class RunReader:
    """Reads a log that may still be written: what is there now, and later what has been added.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be read.
        NotALogError: its first line is not a header, or one of a later format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = Run(path.name)
        self._at, self._rest = 0, b""
        self.read()

    def read(self) -> int:
        """Read the lines that have been added; return how many. An unfinished line waits for its end.

        Raises:
            OSError: the file cannot be read.
            NotALogError: the first line of the file is not a header, or one of a later format.
        """
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._at:  # another run has begun in a file of the same name
                self.run, self._at, self._rest = Run(self.path.name), 0, b""
            file.seek(self._at)
            count = 0
            while (data := file.read(_AT_A_TIME)) or not self._at:
                first = self._at == 0
                self._at += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                if max(map(len, (*lines, self._rest))) > LONGEST:
                    raise NotALogError(
                        f"{self.path} is not the log of a run: a line in it has more than {LONGEST:,} bytes"
                    )
                if first:
                    self._check(lines[0] if lines else self._rest)
                for line in lines:
                    self._add(line)
                count += len(lines)
                if not data:
                    break
        return count

    def _add(self, line: bytes) -> None:
        try:
            self.run.add(parsed(line))
        except ValueError:
            self.run.unreadable += bool(line)

    def _check(self, first: bytes) -> None:
        try:
            header = parsed(first)
        except ValueError:
            header = None
        if not isinstance(header, dict) or not is_header(header):
            found = "it is empty" if not first else "its first line is not the header of a run"
            raise NotALogError(f"{self.path} is not the log of a run: {found}")
        if header["stablenum_log"] != FORMAT:
            raise NotALogError(
                f"{self.path} has format {header['stablenum_log']}, and this version of stablenum reads "
                f"format {FORMAT}. Use the version that wrote the log."
            )


def read_run(path: Path) -> Run:
    """Return the run in a log.

    Raises:
        OSError: the file cannot be read.
        NotALogError: it is not a log, or one of a later format.
    """
    return RunReader(path).run
