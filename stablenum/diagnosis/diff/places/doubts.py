"""What makes a difference doubtful: a program that is not the same when it runs again, or much rounding."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.places.locations import location_of, result_name
from stablenum.diagnosis.diff.places.results import Group, Pair
from stablenum.diagnosis.diff.sides.fingerprints import distance
from stablenum.diagnosis.diff.sides.recording import ended
from stablenum.diagnosis.diff.sides.sides import Side, again, measured
from stablenum.diagnosis.replay.trace import Step

__all__ = ["doubts_of", "unsure"]

# Results that rounding moves by more than a hundredth are named if they differ by more than a few roundings
# of float32. Chosen, not measured.
_FAR, _SEEN = 1e-2, 1e-6
_NOTHING = 1e-9  # of the largest result of its kind: 0 but for rounding; chosen, not measured
_MOST_NAMED = 3  # results, whose kind stands before each name; chosen, not measured
_UNSURE = (
    "Rounding in float64 alone moves {} by more than 1 % of the size, so that no difference there counts; "
    "the largest is {} of the size. A quotient of numbers that are equal but for rounding does that, or a "
    "choice between them."
)


def doubts_of(comparison: Comparison) -> tuple[str, ...]:
    """Return what the reader of a difference should know first, in sentences, beside other arguments."""
    found = list[str]()
    for name in ("left", "right"):
        found += _changing(name, comparison.side(name))
    return tuple(found)


# --- programs that change ----------------------------------------------------------------------------------


def _changing(name: str, side: Side) -> Iterator[str]:
    """Yield a note if a program gives other numbers when it is recorded again."""
    random.random()  # so that what is drawn from these generators is something else
    np.random.random()
    try:
        other = measured(side.program.fresh(), weights=side.weights, noise=False, steps=side.steps)
        other = again(other, side.replaced) if side.replaced else other
    except Exception as error:  # noqa: BLE001 - it ran the first time
        yield f"The {name} program failed when it ran again: {ended(error)}"
        return
    step = _first_other(side, other)
    if step is None:
        return
    place = location_of(Start(step), side, step.phase)
    where = "" if place is None else f" ({place.where})"
    yield (
        f"The {name} program is not the same when it runs again with the same arguments, first in "
        f"{step.operation}{where}: it depends on a clock, a count, or random numbers of Python or NumPy. "
        "This report is about one run; draw the numbers before, and give them to both programs."
    )


def _first_other(side: Side, other: Side) -> Step | None:
    """Return the first operation that computes something else from the same."""
    for step, its in zip(side.trace.steps, other.trace.steps, strict=False):
        if (step.primitive, step.outputs) != (its.primitive, its.outputs):
            return step
        if any(_moved(side, other, i) for i in step.outputs):
            return step
    shorter = min(len(side.trace.steps), len(other.trace.steps))
    rest = (*side.trace.steps[shorter:], *other.trace.steps[shorter:])
    return rest[0] if rest else None


def _moved(side: Side, other: Side, value: int) -> bool:
    gap = distance(side.prints[value], other.prints[value])
    return not gap <= side.tolerance[value] + other.tolerance[value]


# --- results that are not compared ------------------------------------------------------------------------


def unsure(comparison: Comparison) -> tuple[str, ...]:
    """Return a note on the results that rounding alone moves too far to see a difference."""
    pairs = [p for g in comparison.groups for p in _moved_far(comparison, g)]
    if not pairs:
        return ()
    named = ", ".join(dict.fromkeys(result_name(p.left.kind, p.left.name) for p in pairs[:_MOST_NAMED]))
    more = f" and {len(pairs) - _MOST_NAMED} more" if len(pairs) > _MOST_NAMED else ""
    return (_UNSURE.format(named + more, f"{max(p.error for p in pairs):.2g}"),)


def _moved_far(comparison: Comparison, group: Group) -> list[Pair]:
    """Return the results of a group that rounding moves far and that differ, but for those that are 0 but for
    rounding, such as the gradient of a bias of keys."""
    far = [p for p in group.pairs if p.allowed > _FAR and p.error > _SEEN]
    if not far:
        return []
    sizes = {id(p): _size(comparison, p) for p in group.pairs}
    return [p for p in far if sizes[id(p)] > _NOTHING * max(sizes.values()) or len(sizes) == 1]


def _size(comparison: Comparison, pair: Pair) -> float:
    return max(float(np.abs(x).max(initial=0)) for x in comparison.arrays_of(pair))
