"""Stop a difference where it begins: put a value of the left program in place of the right one's.

What follows then reads equal values again, so that a second difference, which is independent of the first,
shows. Which value corresponds to which is found by trying: after the right pair, the two programs agree, or
share what they compute next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Frontier, Start, last_of_line
from stablenum.diagnosis.diff.places.regions import STEPS_AHEAD
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.play import MASKED, if_recorded
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.replay.trace import Step

__all__ = [
    "LEAST_SHARED", "Pair", "Patch", "candidates", "laid_out", "laid_out_like", "newly_shared", "patched",
]  # fmt: skip

# So many pairs of values are tried, and so many of the last values of lines: each is an evaluation. Chosen,
# not measured.
_MOST_TRIALS = 6
# Sides go on alike if they share so many more values: fewer may be an accident. Chosen, not measured.
LEAST_SHARED = 3
_MOST_LAYOUTS = 24  # all orders of four axes
_MOST_ROWS = 128  # each of which is compared with each other one: 16 384 pairs; chosen, not measured
_CLOSE = 1e-16  # of squares: entries agree up to 1e-8 of their size


@dataclass(frozen=True, slots=True)
class Patch:
    """Two values, one of which takes the place of the other.

    Attributes:
        left, right: the values.
        side: the side whose values are replaced.
        values: the arrays that take their place.
        agrees: whether the results agree then.
        shared: how many computed values are shared only then.
    """

    left: int
    right: int
    side: str
    values: Mapping[int, Any]
    agrees: bool
    shared: int


class Pair(NamedTuple):
    """Two values that may correspond.

    Attributes:
        unlike: 0 for what the two lines give in the end, 1 for values that are near, 2 for others.
        depth: how many steps lie before them.
        left, right: the values.
        mine, theirs: their arrays, in the layout of the right one.
        ends: whether the two are near, and one of them is what its line gives in the end.
    """

    unlike: int
    depth: int
    left: int
    right: int
    mine: Any
    theirs: Any
    ends: bool = False


def patched(comparison: Comparison, found: Frontier, group: Group, pairs: Sequence[Pair]) -> Patch | None:
    """Return the pair of values at a frontier after which the programs agree, and of several the one after
    which they share most; None if no pair makes them share what follows.

    Sharing most, rather than the results alone, leaves equal what the derivatives read later.
    """
    # One line may do what several lines of the other side do.
    ends = [p for p in pairs[_MOST_TRIALS:] if p.ends]
    for some in (pairs[:_MOST_TRIALS], ends[:_MOST_TRIALS]):
        trials = [_tried(comparison, found, group, p) for p in some]
        useful = [patch for patch in trials if patch is not None]
        if useful:
            return max(useful, key=lambda patch: (patch.agrees, patch.shared))
    return None


def _tried(comparison: Comparison, found: Frontier, group: Group, pair: Pair) -> Patch | None:
    """Return what follows with the left value of a pair in place of the right one; None if the two sides do
    not agree in what follows."""
    values = {pair.right: pair.mine}
    after = comparison.with_values("right", values, until=group)
    shared = newly_shared(comparison, after, "right", found.region_right, pair.right)
    agrees = after.agrees(group)
    if not agrees and shared < LEAST_SHARED:
        return None
    return Patch(pair.left, pair.right, "right", values, agrees, shared)


def newly_shared(before: Comparison, after: Comparison, side: str, region: Iterable[Step], value: int) -> int:
    """Return how many values that a side computes after one are shared only now."""
    now, then = after.found.known(side), before.found.known(side)
    return sum(
        o in now and o not in then for step in region if not quiet(step) for o in step.outputs if o > value
    )


def candidates(comparison: Comparison, found: Frontier) -> list[Pair]:
    """Return the values near a frontier that may correspond, the most likely pair first."""
    if found.left is None or found.right is None:
        return []
    mine = list(_values(comparison.left, found.left, found.region_left))
    theirs = list(_values(comparison.right, found.right, found.region_right))
    a = arrays_of(comparison.left, [v for v, _ in mine])
    b = arrays_of(comparison.right, [v for v, _ in theirs])
    ends = (_end(comparison.left, found.left, found.region_left),
            _end(comparison.right, found.right, found.region_right))  # fmt: skip
    rows = comparison, found.left.step, found.right.step
    order = if_recorded(lambda: _order_of_rows(*rows), None)
    pairs = []
    for i, depth in ((v, depth) for v, depth in mine if v in a):
        same = a[i][order] if order is not None and a[i].shape[:1] == order.shape else a[i]
        for j, further in ((v, further) for v, further in theirs if v in b):
            array = laid_out(same, b[j]) if a[i].dtype.kind == b[j].dtype.kind == "f" else None
            if array is None:
                continue
            near = _near(array, b[j])
            unlike = 0 if (i, j) == ends else 1 if near else 2
            one = near and (i == ends[0] or j == ends[1])
            pairs.append(Pair(unlike, depth + further, i, j, array, b[j], one))
    return sorted(pairs, key=lambda p: p[:4])


def _values(side: Side, start: Start, region: Sequence[Step]) -> Iterator[tuple[int, int]]:
    """Return the values of a region from its start on, with the number of steps before each."""
    if start.missing and start.value is not None:
        yield start.value, 0
    elif all(s.index != start.step.index for s in region):
        yield from ((o, 0) for o in start.step.outputs)
    later = [s for s in region if s.index >= start.step.index][:STEPS_AHEAD]
    for depth, step in enumerate(later):
        for o in step.outputs:
            if not side.neutral(o):
                yield o, depth


def _order_of_rows(comparison: Comparison, here: Step, there: Step) -> Any:
    """Return which row of the left side each row of the right one is, as a value tells that both steps read;
    None if the rows are in the same order, or are not the same. A batch is sorted by the lengths of its
    sequences to pack them, for example."""
    known = comparison.found.right
    shared = [(i, j) for j in there.inputs for i in known.get(j, ()) if i in here.inputs]
    for i, j in shared:
        a, b = arrays_of(comparison.left, [i])[i], arrays_of(comparison.right, [j])[j]
        if a.ndim == 0 or a.shape != b.shape or len(a) > _MOST_ROWS:
            continue
        gaps = [[_gap(row, other) for row in a] for other in b]
        order = np.argmin(gaps, axis=1)
        if len({*order.tolist()}) == len(b) and (order != np.arange(len(b))).any() and _equal(a[order], b):
            return order
    return None


def _end(side: Side, start: Start, region: Iterable[Step]) -> int | None:
    if start.value is not None:
        return start.value
    return last_of_line(side, start, region)


def laid_out(mine: Any, theirs: Any) -> Any:
    """Return an array in the layout of another one that it may stand for; None if no transposition and
    reshape leads there.

    Of several layouts that fit, the one that comes nearest is taken.
    """
    if mine.size != theirs.size:
        return None
    if mine.shape == theirs.shape and (mine.ndim < 2 or _near(mine, theirs)):
        return mine
    ways = layouts(tuple(mine.shape), tuple(theirs.shape), "other")[:_MOST_LAYOUTS]
    turned = [mine.transpose(w).reshape(theirs.shape) for w in ways]
    return min(turned, key=lambda x: _unlike(x, theirs), default=None)


def laid_out_like(array: Any, pattern: Any, target: Any) -> Any:
    """Return an array laid out as another one is in the layout in which ``target`` has ``pattern``; None if
    no transposition and reshape leads there."""
    if np.shape(array) != np.shape(pattern) or np.size(pattern) != np.size(target):
        return None
    if np.shape(pattern) == np.shape(target) and np.ndim(pattern) < 2:
        return array
    ways = layouts(tuple(pattern.shape), tuple(target.shape), "other")[:_MOST_LAYOUTS]
    gaps = [(_gap(pattern.transpose(w).reshape(target.shape), target), w) for w in ways]
    return array.transpose(min(gaps)[1]).reshape(target.shape) if gaps else None


def _unlike(mine: Any, theirs: Any) -> tuple[float, int]:
    """Return how far two arrays are apart, and how many entries only one of them masks: with few entries
    left, also an array that is turned may agree in these."""
    gap = _gap(mine, theirs)
    return (gap if gap > _CLOSE else 0.0), int((_kept(mine) != _kept(theirs)).sum())


def _kept(x: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return np.abs(x) < MASKED


def _reals(x: Any) -> Any:
    """Return the entries of an array as real numbers, two for a complex one."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return flat.view(flat.real.dtype) if np.iscomplexobj(flat) else np.asarray(flat, float)


def _equal(a: Any, b: Any) -> bool:
    return _gap(a, b) < _CLOSE


def _near(a: Any, b: Any) -> bool:
    # The gap is 0 for the same array, and about 1 for two that have nothing to do with each other.
    return _gap(a, b) < 0.5


def _gap(a: Any, b: Any) -> float:
    """Return the distance of two arrays relative to their sizes, without entries that are masked."""
    x, y = _reals(a), _reals(b)
    kept = _kept(x) & _kept(y)
    x, y = x[kept], y[kept]
    size = float((x * x).sum() + (y * y).sum())
    return float(((x - y) ** 2).sum()) / size if size else 1.0
