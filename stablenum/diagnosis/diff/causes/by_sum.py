"""Name the cause where one side sums or averages over entries that the other one keeps apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.frontier import Start, same_line
from stablenum.diagnosis.diff.sides.equality import SAME_MULTIPLE
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.sides.kinds import kind
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_divisor", "by_sum"]

# Of the steps of a line, so many are looked at, and of an array so many axes, which have 15 sums. Chosen, not
# measured.
_FIRST, _MOST_AXES = 4, 4


def by_sum(scene: Scene) -> Iterator[Proposal]:
    """Find a value of one line that is the sum or mean of the other line's over some axes."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None or here.missing or there.missing or scene.group.kind not in _KINDS:
        return
    mine = _reduced(scene.left, here, scene.found.region_left)
    theirs = _reduced(scene.right, there, scene.found.region_right)
    for name, keeps, sums in (("left", mine, theirs), ("right", theirs, mine)) if scene.agrees else ():
        for x, y in ((x, y) for x in keeps for y in sums if 1 < y.size < x.size):
            how = next((h for h, z in _summed(x) if _same(z, y)), None)
            if how is not None:
                yield Proposal(
                    "reduction",
                    f"the other program takes {how} of what the {name} one keeps apart, "
                    f"{y.size} values of {x.size}.",
                    measured="With what the left program computes, the results agree.",
                )
                return


def by_divisor(scene: Scene) -> Iterator[Proposal]:
    """Propose a count for a number by which one line divides a sum, such as a sum of weights."""
    patch = scene.patch
    if patch is None or not patch.agrees or scene.group.kind not in _KINDS:
        return
    ends = ((p.mine, p.theirs) for p in scene.pairs if (p.left, p.right) == (patch.left, patch.right))
    mine, theirs = next(ends, (None, None))
    for name, side, value, other in (
        ("right", scene.right, patch.right, mine),
        ("left", scene.left, patch.left, theirs),
    ):
        found = None if other is None or other.size != 1 else _divided(side, value, float(other.reshape(())))
        if found is not None:
            total, divisor, count = found
            yield Proposal(
                "reduction",
                f"the {name} program divides the sum by {divisor:.6g}, the other one by {count}.",
                [(Edit(name, {value: np.full(side.shapes[value], total / count)}),)],
                f"With {count} on the {name}",
            )


def _divided(side: Side, value: int, other: float) -> tuple[float, float, int] | None:
    """Return a sum, the number by which it was divided to give a value, and the count that gives another
    value; None if there is none."""
    producer = side.trace.values[value].producer
    step = None if producer is None else side.trace.steps[producer]
    if step is None or kind(step) != "div" or [side.shapes[i] for i in step.inputs] != [(), ()]:
        return None
    arrays = arrays_of(side, step.inputs)
    total, divisor = (float(arrays[i]) for i in step.inputs)
    count = round(total / other) if other else 0
    fits = count > 0 and count != divisor and abs(total - count * other) < SAME_MULTIPLE * abs(total)
    return (total, divisor, count) if fits else None


_KINDS = ("loss", "output")
_REDUCTIONS = {"matmul", "mean", "sum"}


def _reduced(side: Side, start: Start, region: Iterable[Step]) -> list[Any]:
    """Return the first arrays that a line makes by sums over axes."""
    steps = [s for s in same_line(start, region)[:_FIRST] if kind(s) in _REDUCTIONS]
    return list(arrays_of(side, [o for s in steps for o in s.outputs if not side.neutral(o)]).values())


def _summed(x: Any) -> Iterator[tuple[str, Any]]:
    axes = range(min(x.ndim, _MOST_AXES))
    for count in range(1, len(axes) + 1):
        for over in combinations(axes, count):
            yield "the sum", x.sum(axis=over)
            yield "the mean", x.mean(axis=over)


def _same(a: Any, b: Any) -> bool:
    return bool(a.size == b.size and distance(fingerprint(a), fingerprint(b)) < SAME_MULTIPLE)
