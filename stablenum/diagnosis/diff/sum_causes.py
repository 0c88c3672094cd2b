"""Name the cause where one side sums or averages over entries that the other one keeps apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.frontier import Start, same_line
from stablenum.diagnosis.diff.kinds import kind
from stablenum.diagnosis.diff.scene import Scene, cause
from stablenum.diagnosis.diff.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_sum"]

_SAME = 1e-8
_FIRST = 4
_MOST_AXES = 4


def by_sum(scene: Scene) -> Cause | None:
    """Find a value of one line that is the sum or mean of the other line's over some axes."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None or here.missing or there.missing or scene.group.kind not in _KINDS:
        return None
    mine = _reduced(scene.left, here, scene.found.region_left)
    theirs = _reduced(scene.right, there, scene.found.region_right)
    if scene.patch is None or not scene.patch.agrees:
        return None
    for name, keeps, sums in (("left", mine, theirs), ("right", theirs, mine)):
        for x, y in ((x, y) for x in keeps for y in sums if 1 < y.size < x.size):
            how = next((h for h, z in _summed(x) if _same(z, y)), None)
            if how is not None:
                return cause(
                    "reduction",
                    f"the other program takes {how} of what the {name} one keeps apart, "
                    f"{y.size} values of {x.size}.",
                    "With what the left program makes of it, the results agree.",
                    confirmed=True,
                )
    return None


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
    return bool(a.size == b.size and distance(fingerprint(a), fingerprint(b)) < _SAME)
