"""Which steps of the run, each with a batch of its own, each row of the guard's record was made of."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from stablenum.guard.readout import StepRecord
from stablenum.guard.recorder import CAPACITY

__all__ = ["Counts", "Pairing"]

_HELD = 8 * CAPACITY  # steps whose counts are held


class Counts(NamedTuple):
    """How far a guard is that gets sums of the gradients of several steps of the run.

    Attributes:
        rows: how many rows it has recorded.
        sums: how many sums were used.
        summed: how many gradients are in the next sum.
    """

    rows: int
    sums: int
    summed: int


class _Look(NamedTuple):
    step: int  # of the run
    newest: int | None  # the newest row after it; None if there was none


class Pairing:
    """The steps of the run behind the rows of the record.

    A guard records a row for each step. This is checked: between two looks at the record, there must be as
    many new rows as steps, or nothing is said of these rows. A guard that gets sums of gradients instead says
    how far it is after each step.
    """

    def __init__(self) -> None:
        self._looks: list[_Look] = []
        self._counts: dict[int, Any] = {}  # by step: ``Counts``, or an array that the host has not read yet

    @property
    def of_sums(self) -> bool:
        """Whether a row may be of several steps."""
        return bool(self._counts)

    def begin(self, rows: Sequence[StepRecord], step: int, counts: Any) -> None:
        """Take in the record before the first step after ``step``; forget what was known."""
        self._counts.clear()
        self.count(step, counts)
        self._looks = [_Look(step, rows[-1]["step"] if rows else None)]

    def count(self, step: int, counts: Any) -> None:
        """Note how far the guard is after a step: an array of the fields of ``Counts``, or None."""
        if counts is not None:
            self._counts[step] = counts
            self._counts.pop(step - _HELD, None)

    def look(self, rows: Sequence[StepRecord], step: int) -> None:
        """Take in the record after a step."""
        self._counts = {at: _read(counts) for at, counts in self._counts.items()}
        if rows:
            self._looks = [*self._known(rows), _Look(step, rows[-1]["step"])][-CAPACITY - 1 :]

    def go_back_to(self, step: int) -> None:
        """Forget what came after a step."""
        self._looks = [look for look in self._looks if look.step <= step]
        self._counts = {at: counts for at, counts in self._counts.items() if at <= step}

    def steps(self, rows: Sequence[StepRecord], step: int, *, under_way: bool) -> dict[int, tuple[int, ...]]:
        """Return the steps of the run by the numbers of rows; where they are not known, there is no entry.

        Args:
            rows: the record.
            step: how many steps of the run have been made.
            under_way: whether the next one may have been made as well.
        """
        if self.of_sums:
            return self._of_sums()
        looks = self._known(rows)
        if looks and rows:
            made = rows[-1]["step"] - (looks[-1].newest or 0)
            ends = step + (under_way and made > step - looks[-1].step)
            looks.append(_Look(ends, rows[-1]["step"]))
        return {
            before.newest + i: (before.step + i,)
            for before, after in itertools.pairwise(looks)
            if before.newest is not None and after.newest is not None
            for i in range(1, after.newest - before.newest + 1)
            if after.newest - before.newest == after.step - before.step
        }

    def _known(self, rows: Sequence[StepRecord]) -> list[_Look]:
        """Return the looks before; a first one at an empty record was just before the first row."""
        if not self._looks or self._looks[0].newest is not None or not rows or len(rows) == CAPACITY:
            return list(self._looks)
        return [self._looks[0]._replace(newest=rows[0]["step"] - 1), *self._looks[1:]]

    def _of_sums(self) -> dict[int, tuple[int, ...]]:
        found = dict[int, tuple[int, ...]]()
        summed: list[int] | None = None  # the steps in the next sum; None if they are not all known
        for (_, before), (step, after) in itertools.pairwise(sorted(self._counts.items())):
            before, after = _read(before), _read(after)
            if summed is None and before.summed == 0:
                summed = []
            steps: list[int] | None = [step]
            if (before.sums, before.summed) != (after.sums, after.summed):  # its gradient was added
                steps = summed = None if summed is None else [*summed, step]
                if after.summed == 0:
                    summed = []
            if after.rows > before.rows and steps is not None:
                found[before.rows] = tuple(steps)
        return found


def _read(counts: Any) -> Counts:
    return counts if isinstance(counts, Counts) else Counts(*counts.tolist())
