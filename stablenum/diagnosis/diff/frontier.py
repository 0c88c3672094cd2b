"""Find the first operation that differs: all that it reads is shared, and what it gives never is again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from stablenum.diagnosis.diff.matching import Matching
from stablenum.diagnosis.diff.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Frontier", "frontier"]

_ORDER = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where two programs part.

    Attributes:
        left, right: the first operation of each side that differs; None where a side has none.
        region_left, region_right: all operations from there to the values that differ.
    """

    left: Step | None
    right: Step | None
    region_left: tuple[Step, ...]
    region_right: tuple[Step, ...]


def frontier(
    left: Side, right: Side, found: Matching, differing: Iterable[tuple[int, int]], phase: str
) -> Frontier:
    """Return where the results that differ begin to differ.

    Args:
        left, right: the sides.
        found: the values that they share.
        differing: pairs of results that are not equal.
        phase: the phase of these results; what earlier phases computed is taken as equal.
    """
    pairs = list(differing)
    a = _region(left, found.left, [i for i, _ in pairs], phase)
    b = _region(right, found.right, [j for _, j in pairs], phase)
    starts_a, starts_b = _starts(left, a), _starts(right, b)
    first_a, first_b = _paired(left, right, found, starts_a, starts_b)
    return Frontier(first_a, first_b, tuple(a), tuple(b))


def _region(side: Side, known: Collection[int], results: Iterable[int], phase: str) -> list[Step]:
    """Return the steps on the way to the results, back to values that are shared, in order."""
    trace, seen, todo = side.trace, set[int](), list(results)
    while todo:
        producer = trace.values[todo.pop()].producer
        if producer is None or producer in seen:
            continue
        step = trace.steps[producer]
        if _ORDER.index(step.phase) < _ORDER.index(phase):
            continue
        seen.add(producer)
        todo += [i for i in step.inputs if i not in known and not side.neutral(i)]
    return [trace.steps[i] for i in sorted(seen)]


def _starts(side: Side, region: list[Step]) -> list[Step]:
    """Return the steps of a region that read nothing from it."""
    made = {o for s in region for o in s.outputs}
    return [s for s in region if not made.intersection(s.inputs)]


def _paired(
    left: Side, right: Side, found: Matching, a: list[Step], b: list[Step]
) -> tuple[Step | None, Step | None]:
    """Return the first pair of steps that read a common value; else the first of each side."""
    for there in b:
        shared = {i for value in there.inputs for i in found.right.get(value, ())}
        here = next((s for s in a if shared.intersection(s.inputs)), None)
        if here is not None:
            return here, there
    return (a[0] if a else None), (b[0] if b else None)
