"""All operations of both sides, for the page: what each corresponds to, and whether it differs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from stablenum.diagnosis.diff.differences import Difference, Row
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.places.locations import location_of
from stablenum.diagnosis.diff.sides.fingerprints import distance
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["rows_of"]


def rows_of(
    comparison: Comparison,
    differing: tuple[Collection[int], Collection[int]],
    errors: tuple[Mapping[int, float], Mapping[int, float]],
    differences: Sequence[Difference],
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Return the operations of the left and of the right side.

    Args:
        comparison: the two sides.
        differing: of each side, the indices of the steps that lead to a result that differs.
        errors: of each side, how far each value is off its own float64 twin.
        differences: those that are reported; the operation of each is marked as one.
    """
    starts = [{at.row for d in differences if (at := (d.left, d.right)[side]) is not None} for side in (0, 1)]
    left, right, found = comparison.left, comparison.right, comparison.found
    return (
        _rows(left, right, found.left, differing[0], errors, starts[0]),
        _rows(right, left, found.right, differing[1], errors[::-1], starts[1]),
    )


def _rows(
    side: Side,
    other: Side,
    found: Mapping[int, Sequence[int]],
    differing: Collection[int],
    errors: tuple[Mapping[int, float], Mapping[int, float]],
    starts: Collection[int | None],
) -> tuple[Row, ...]:
    ends = _ends(side)
    rows = []
    for step in side.trace.steps:
        at = location_of(Start(step), side, step.phase)
        assert at is not None
        value, partner = _partner(step, other, found)
        off = max((errors[0][o] for o in step.outputs if o in errors[0]), default=None)
        equal = off == 0 and errors[1].get(partner if partner is not None else -1, 0.0) == 0
        matched = "equal" if equal else "rounding"
        rows.append(
            Row(
                operation=at.operation or step.operation,
                where=at.where,
                code=at.code,
                module=at.module,
                phase=step.phase,
                step=1 + sum(step.index > end for end in ends[:-1]),
                state=matched
                if partner is not None
                else "unmatched"
                if step.index not in differing
                else "follows"
                if step.index not in starts
                and any(side.trace.values[i].producer in differing for i in step.inputs)
                else "different",
                partner=None if partner is None else other.trace.values[partner].producer,
                error=None if partner is None else distance(side.prints[value], other.prints[partner]),
                allowed=None if partner is None else side.tolerance[value] + other.tolerance[partner],
                off=off,
            )
        )
    return tuple(rows)


def _partner(step: Step, other: Side, found: Mapping[int, Sequence[int]]) -> tuple[int, int | None]:
    """Return a value that a step made, and one of the other side's operations that is equal to it."""
    for value in step.outputs:
        for partner in found.get(value, ()):
            if other.trace.values[partner].producer is not None:
                return value, partner
    return -1, None


def _ends(side: Side) -> list[int]:
    """Return the last operation of each training step."""
    last: dict[int, int] = {}
    for result in side.play.results:
        producer = side.trace.values[result.value].producer
        last[result.step] = max(last.get(result.step, -1), -1 if producer is None else producer)
    return [last[number] for number in sorted(last)]
