"""A program of which one evaluation is known, as a file keeps it: it can be compared, but not be run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from stablenum.diagnosis.diff.sides.call_sites import CallSite
from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint
from stablenum.diagnosis.diff.sides.play import (
    Dialect,
    Moments,
    NotRecordedError,
    Play,
    Program,
    Result,
    Visit,
)
from stablenum.diagnosis.diff.sides.sides import KnownArrays, Side, depending
from stablenum.diagnosis.replay.trace import Trace

__all__ = ["Parameter", "RecordedProgram", "is_recorded", "shown_path"]

_NO_DIALECT = Dialect((), (), "", "", numbers=False, within="")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer.

    Attributes:
        shape: its shape.
        print: its fingerprint.
        array: its numbers; None if they are not at hand.
    """

    shape: tuple[int, ...]
    print: Fingerprint
    array: Any = None


@dataclass(slots=True)
class RecordedProgram:
    """What was measured of a program in one recording. Takes the place of a live one on either side of
    :func:`stablenum.diff`.

    Attributes:
        framework, optimizer_at, numbers, aside: as in a live program.
        steps: how many training steps were recorded.
        trace, results, stops: the operations, what is compared, and where the flow of gradients is ended.
        prints, shapes, tolerance: of each value in float64.
        forms: the format of each value of the program as it is.
        errors: how far each value of the program as it is was off its float64 twin, relative to its size.
        typical: the same of the typical entry of each value.
        limits: how far rounding may take the typical entry, on any machine.
        arrays: some of the values in float64.
        sketches: of each result, what depends on where its entries lie.
        kept: the parameters and buffers by name.
        state: what the optimizer keeps of earlier steps, by parameter and role.
        literals: the numbers that the program computes with.
        made: what is said of the recording: versions, platform, day.
        path: the file; "" for none.
    """

    framework: str
    steps: int
    trace: Trace
    results: tuple[Result, ...]
    stops: frozenset[int]
    prints: list[Fingerprint]
    shapes: list[tuple[int, ...]]
    tolerance: list[float]
    forms: dict[int, str]
    errors: dict[int, float]
    typical: dict[int, float]
    limits: list[float]
    arrays: KnownArrays
    sketches: dict[int, float]
    kept: dict[str, Parameter]
    state: dict[tuple[str, str], Any] = field(default_factory=dict)
    literals: Collection[float] = ()
    aside: Collection[str] = ()
    optimizer_at: CallSite | None = None
    made: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    numbers: Collection[float] = ()
    dialect: Dialect = _NO_DIALECT

    def __repr__(self) -> str:
        where = f", path={self.path!r}" if self.path else ""
        return (
            f"RecordedProgram(framework={self.framework!r}, operations={len(self.trace.steps)}, "
            f"steps={self.steps}, weights={self.has_weights}{where})"
        )

    @property
    def has_weights(self) -> bool:
        """Whether the parameters themselves are at hand, and not only their fingerprints."""
        return all(p.array is not None for p in self.kept.values())

    def parameters(self) -> Mapping[str, Any]:
        """Return the parameters and buffers by name; in place of those that are not at hand, zeros."""
        return {
            name: np.broadcast_to(0.0, p.shape) if p.array is None else np.asarray(p.array, np.float64)
            for name, p in self.kept.items()
        }

    def optimizer_state(self) -> Mapping[tuple[str, str], Any]:
        """Return what the optimizer kept of earlier steps."""
        return self.state

    def with_optimizer_state(self, moments: Moments | None) -> Program:
        """Return the program as it is: its optimizer has gone its way."""
        return self

    def record(self, steps: int) -> None:
        """Check the number of steps: the recording has been made."""
        if steps != self.steps:
            raise ValueError(
                f"steps must be {self.steps}, as many as were recorded in {self.path or 'the file'}; "
                f"got {steps}."
            )

    def written(self, steps: int) -> Collection[float]:
        """Return the numbers that the program computes with."""
        return self.literals

    def fresh(self) -> Program:
        """Return the program itself."""
        return self

    def side(self, weights: Mapping[str, Any] | None = None) -> Side:
        """Return what was measured."""
        if weights is not None:
            _not_recorded("an evaluation with other parameters")
        play = Play(self.trace, self.results, stops=self.stops)
        arrays = KnownArrays((r.value, self.arrays[r.value]) for r in self.results if r.value in self.arrays)
        side = Side(self, None, self.steps, {}, play, list(self.prints), list(self.shapes), arrays)
        side.tolerance = list(self.tolerance)
        side.depends = depending(self.trace, lambda value: value.role not in ("constant", ""))
        side.trained = depending(self.trace, lambda value: value.role == "parameter")
        return side

    def play(
        self,
        visit: Visit,
        *,
        wide: bool = True,
        weights: Mapping[str, Any] | None = None,
        noise: float = 0.0,
        everywhere: bool = False,
        replace: Mapping[int, Any] | None = None,
        steps: int = 1,
        code: Collection[int] = (),
    ) -> Play:
        """Show the values that are known; none is written as code."""
        if weights or noise or replace or not wide:
            _not_recorded("an evaluation with other numbers")
        self._show(visit)
        return Play(self.trace, self.results, stops=self.stops)

    def show(
        self,
        visit: Visit,
        *,
        weights: Mapping[str, Any] | None,
        replace: Mapping[int, Any],
        steps: int,
        since: int = 0,
        keep: bool = False,
    ) -> None:
        """Show the values that are known."""
        if weights or replace:
            _not_recorded("an evaluation with other numbers")
        self._show(visit, since)

    def _show(self, visit: Visit, since: int = 0) -> None:
        for value in sorted(v for v in self.arrays if v >= since):
            visit(value, self.arrays[value])


RecordedProgram.__module__ = "stablenum.typing"


def _not_recorded(what: str) -> NoReturn:
    raise NotRecordedError(f"{what} needs a run of the program, and only its recording is here")


def shown_path(path: str) -> str:
    """Return a file as reports name it: from the working directory, if it lies below that."""
    short = os.path.relpath(path) if path else "(not in a file)"
    return path if short.startswith("..") else short


def is_recorded(program: Any) -> bool:
    """Return whether a program is a recording, which cannot be run."""
    return isinstance(program, RecordedProgram)
