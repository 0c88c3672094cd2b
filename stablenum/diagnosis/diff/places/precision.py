"""Where a program that computes the same in float64 rounds more than its recording allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stablenum.diagnosis.diff.differences import Cause, Difference
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.locations import location_of_value, result_name
from stablenum.diagnosis.diff.sides.bounds import ROUNDING, unit_of
from stablenum.diagnosis.diff.sides.capturing import limits_in_float32
from stablenum.diagnosis.diff.sides.recorded import RecordedProgram, is_recorded
from stablenum.diagnosis.diff.sides.rounding import Rounding
from stablenum.diagnosis.diff.sides.sides import MOST_NOISE

__all__ = ["Precision", "precision_of"]

_REMEDY = "Compute this in the format of the recording; if the change is meant, record the program again."
_EVIDENCE = "With all operations in float64, the program agrees with its recording."


# Another order of its sums may take a program so many times as far as the recorded run was off. Chosen, not
# measured.
_SEEN = 4.0


# A rewritten program may round so many times as much as the recorded one: a worse formula, such
# as a variance as the difference of two large numbers, loses thousands of times as much. Chosen, not
# measured.
_WORSE = 64.0


class _Value(NamedTuple):
    """A value of both sides: how far the right one is off its float64 twin, and how far it may be."""

    left: int
    right: int
    error: float
    limit: float

    @property
    def share(self) -> float:
        """How much of the limit is used up."""
        return self.error / self.limit if self.limit else math.inf if self.error else 0.0


@dataclass
class Precision:
    """How precisely the right program computes what a recording on the left has computed.

    What rounds more than the recording's formats explain is a difference. A rewritten program may
    pass on roundings in another way, so that the limit is the larger one of both programs, each computed for
    any order of its sums; but formats are those of the recording, and it may not be far less precise.

    Attributes:
        comparison: of two sides that agree in float64.
        recorded: the left program.
        rounding: of the right side.
    """

    comparison: Comparison
    recorded: RecordedProgram
    rounding: Rounding

    @cached_property
    def _own_limits(self) -> list[float]:
        right = self.comparison.right
        return [] if is_recorded(right.program) else limits_in_float32(right)

    def difference(self) -> Difference | None:
        """Return the first operation that rounds too much; None if there is none."""
        first = next((v for v in self._values if not v.error <= v.limit), None)
        if first is None:
            return None
        right = location_of_value(self.comparison.right, first.right)
        return Difference(
            left=location_of_value(self.comparison.left, first.left),
            right=right,
            result=self._result(first.right) or "a value",
            step=1,
            error=first.error,
            allowed=first.limit,
            causes=(self._cause(first),),
            of_rounding=True,
        )

    def sentence(self) -> str | None:
        """Return how far the results are off the recording's float64 twin, and how much of it rounding
        explains; None if that is not known of any."""
        results = self._results()
        # What rounding moves far, such as a gradient that is 0 but for it, says nothing of the program.
        rows = [v for v in self._values if v.right in results and v.limit < MOST_NOISE]
        if not rows:
            return None
        worst = max(rows, key=lambda v: v.share)
        near = "nearest to" if worst.share <= 1 else "farthest beyond"
        return (
            f"As it is, the results of the program are off the recording's float64 twin by up to "
            f"{max(v.error for v in rows):.1e} in three of four entries; {near} its limit is "
            f"{results[worst.right]}, by {worst.error:.1e} where rounding explains {worst.limit:.1e} on any "
            "machine."
        )

    def _results(self) -> dict[int, str]:
        pairs = (p for g in self.comparison.groups for p in g.pairs)
        return {p.right.value: result_name(p.right.kind, p.right.name) for p in pairs}

    def _result(self, since: int) -> str | None:
        """Return the first result that is computed from a value on."""
        return next((name for v, name in sorted(self._results().items()) if v >= since), None)

    @cached_property
    def _values(self) -> list[_Value]:
        """What both sides have, in the order of the right program."""
        return list(self._compared())

    def _compared(self) -> Iterator[_Value]:
        found, errors = self.comparison.found.right, self.rounding.typical
        ends = {p.right.value: p.left.value for g in self.comparison.groups for p in g.pairs}
        for j in range(len(self.comparison.right.prints)):
            partners = [*found.get(j, ()), *([ends[j]] if j in ends else [])]
            partners = [i for i in partners if self._tells(i)]
            if j not in errors or not partners or self.comparison.right.noise(j):
                continue
            limit = max(self._limit(i, j) for i in partners)
            i = max(
                partners, key=lambda i: (self._line(i) == self._line(j, "right"), i in self.recorded.forms, i)
            )
            over = j in self.rounding.overflowed and math.isfinite(self.recorded.errors.get(i, 0.0))
            yield _Value(i, j, math.inf if over else errors[j], limit)

    def _line(self, value: int, side: str = "left") -> str:
        """Return the line that makes a value."""
        trace = self.comparison.side(side).trace
        producer = trace.values[value].producer
        place = None if producer is None else trace.steps[producer].place
        return "" if place is None else f"{place.function}: {place.code}"

    def _tells(self, i: int) -> bool:
        """Return whether rounding alone cannot make anything of a value of the recording."""
        return math.isfinite(self.recorded.limits[i]) and not self.comparison.left.noise(i)

    def _limit(self, i: int, j: int) -> float:
        own = self._own_limits[j] if self._own_limits else 0.0
        unit = unit_of(self.recorded.forms.get(i, "")) or ROUNDING
        seen = _SEEN * self.recorded.typical.get(i, 0.0)
        recorded = self.recorded.limits[i]
        return max(recorded, min(own * unit / ROUNDING, _WORSE * recorded), seen)

    def _cause(self, first: _Value) -> Cause:
        own = self.rounding.forms.get(first.right, "")
        wanted = self.recorded.forms.get(first.left, "")
        if first.error == math.inf:
            sentence = f"this overflows in {own}, and is finite in float64."
        elif own and wanted and unit_of(own) > unit_of(wanted):
            sentence = f"this is computed in {own}; in the recording it is {wanted}."
        else:
            sentence = (
                f"this rounds {first.share:.2g} times as much as {wanted or 'the format of the recording'} "
                "explains: a narrower format or an approximation inside the operation, or on the way to it."
            )
        return Cause(
            code="lower_precision", sentence=sentence, evidence=_EVIDENCE, remedy=_REMEDY, confirmed=False
        )


def precision_of(comparison: Comparison, rounding: Rounding) -> Precision | None:
    """Return how precisely the right side computes; None if the left one is no recording."""
    recorded = comparison.left.program
    return Precision(comparison, recorded, rounding) if isinstance(recorded, RecordedProgram) else None
