"""Which values two programs share, by fingerprints alone: no names, no order, no layout."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint, distance
from stablenum.diagnosis.diff.sides.loops import wholes_of
from stablenum.diagnosis.diff.sides.row_matching import rows_shared
from stablenum.diagnosis.diff.sides.sides import Side

__all__ = ["Matching", "matched"]

_ORDER = ("forward", "backward", "update")
# The tolerance of most values is a hundredth of this; those of larger ones are looked for farther away.
_FINE = 1e-8
# The sizes of equal values differ by less; those of different ones differ by more than the least tolerance,
# which is 1e-10.
_SAME_SIZE = 1e-11
# Of equal values, such as those of a loop that has converged, so many are known to be equal to one of the
# other side: with all pairs of n iterations, a loop would cost n squared. Chosen, not measured.
_MOST_COPIES = 32


class Matching:
    """The values that both sides have.

    Args:
        left, right: the sides.
        equal: value of the right side -> values of the left side that are equal to it, in any phase.
        like: the matching of sides of which these are copies with other values.

    Attributes:
        left: value of the left side -> values of the right side that are equal to it.
        right: the inverse.
    """

    def __init__(
        self, left: Side, right: Side, equal: Mapping[int, Sequence[int]], like: Matching | None = None
    ) -> None:
        like_left, like_right = (None, None) if like is None else like._sides
        self._sides: tuple[_Values, _Values] = _Values(left, like_left), _Values(right, like_right)
        self._alike = equal
        self.left: dict[int, list[int]] = {}
        self.right: dict[int, list[int]] = {}
        for j in sorted(equal):
            for i in equal[j]:
                _note(self.left, self.right, ((i,), (j,)), self._phases)

    def known(self, side: str) -> Mapping[int, list[int]]:
        """Return what corresponds to each value of a side, "left" or "right", also in parts: what one side
        computes at once, and the other one in a loop."""
        return self._known[("left", "right").index(side)]

    def with_rows(self) -> Matching:
        """Return the matching in which a value also corresponds to one that has some of its rows."""
        left, right = (values.side for values in self._sides)
        found = Matching(left, right, {}, self)
        rows = rows_shared(left, right, self.known("left"), self.known("right"))
        found.left, found.right = (
            {**more, **self.known(side)} for more, side in zip(rows, ("left", "right"), strict=True)
        )
        return found

    def after(self, left: Side, right: Side) -> Matching:
        """Return the matching of copies of the sides, one or both of which have other values."""
        equal, (mine, theirs) = self._alike, self._sides
        if changed := mine.changed_in(left):
            equal, mine = _with_left(equal, left, changed, theirs.index), _Values(left, mine)
        if changed := theirs.changed_in(right):
            equal = _with_right(equal, right, changed, mine.index)
        return Matching(left, right, equal, self)

    @property
    def _phases(self) -> tuple[list[int], list[int]]:
        return self._sides[0].phases, self._sides[1].phases

    @cached_property
    def _known(self) -> tuple[Mapping[int, list[int]], Mapping[int, list[int]]]:
        left, right = dict[int, list[int]](), dict[int, list[int]]()
        sides = [values.side for values in self._sides]
        mine, theirs = (list(_single(side)) for side in sides)
        loops = [list(_in_loops(s, m)) for s, m in zip(sides, (self.left, self.right), strict=True)]
        counts = len(sides[0].prints), len(sides[1].prints)
        pairs = [_equal(a, b, counts) for a, b in ((loops[0], theirs), (mine, loops[1]), loops)]
        for a, b in itertools.chain(*pairs):
            _note(left, right, (a.values, b.values), self._phases)
        return {**left, **self.left}, {**right, **self.right}


class _Mark(NamedTuple):
    """One or several values, with the fingerprint of all together."""

    values: tuple[int, ...]
    print: Fingerprint
    tolerance: float

    def equals(self, other: _Mark) -> bool:
        """Return whether two marks are equal up to rounding."""
        return distance(self.print, other.print) <= self.tolerance + other.tolerance


class _Index:
    """Marks in the order of their sizes.

    Args:
        marks: the marks.
        count: how many values the side has, among which their places are.
    """

    def __init__(self, marks: Iterable[_Mark], count: int) -> None:
        self._count = count
        given = list(marks)
        fine = [m for m in given if m.tolerance <= _FINE]
        self._tiers = [_Tier(m) for m in (fine, [m for m in given if m.tolerance > _FINE]) if m]

    def equal_to(self, other: _Mark, place: float) -> Iterator[_Mark]:
        """Yield the marks that are equal to another one; of many copies those around a place from 0 to 1."""
        size = _size(other.print)
        for tier in self._tiers:
            for mark in tier.near(size, other.tolerance, round(place * self._count)):
                if mark.equals(other):
                    yield mark


class _Tier:
    """Marks of similar tolerance, in groups of nearly the same size."""

    def __init__(self, marks: Iterable[_Mark]) -> None:
        rows = sorted(((_size(mark.print), mark.values[0], mark) for mark in marks), key=itemgetter(0, 1))
        self._widest = max(mark.tolerance for *_, mark in rows)
        self._sizes, self._groups = list[float](), list[list[tuple[int, _Mark]]]()
        for size, value, mark in rows:
            if not self._sizes or size - self._sizes[-1] > _SAME_SIZE:
                self._sizes.append(size)
                self._groups.append([])
            self._groups[-1].append((value, mark))
        for group in self._groups:
            group.sort(key=itemgetter(0))

    def near(self, size: float, tolerance: float, value: int) -> Iterator[_Mark]:
        """Yield the marks of about a size; of a group of many those around a value."""
        width = tolerance + self._widest
        low = bisect.bisect_left(self._sizes, size - width - _SAME_SIZE)
        high = bisect.bisect_right(self._sizes, size + width)
        for group in self._groups[low:high]:
            some = group
            if len(group) > _MOST_COPIES:
                at = bisect.bisect_left(group, value, key=itemgetter(0))
                begin = min(max(at - _MOST_COPIES // 2, 0), len(group) - _MOST_COPIES)
                some = group[begin : begin + _MOST_COPIES]
            yield from (mark for _, mark in some)


class _Values:
    """What is known of the values of a side.

    Args:
        side: the side.
        like: the same of a side of which this is a copy with other values.
    """

    def __init__(self, side: Side, like: _Values | None) -> None:
        self.side = side
        self.phases: list[int] = _phases(side) if like is None else like.phases
        if like is not None and like.side.prints is side.prints:
            self.index = like.index

    @cached_property
    def index(self) -> _Index:
        """The values that tell something."""
        return _Index(_single(self.side), len(self.side.prints))

    def changed_in(self, side: Side) -> list[int]:
        """Return the values that are others in a copy of the side."""
        pairs = zip(self.side.prints, side.prints, strict=True)
        return [i for i, (old, new) in enumerate(pairs) if old is not new]


def matched(left: Side, right: Side) -> Matching:
    """Return the values of the two sides that have the same fingerprint, up to rounding."""
    return Matching(
        left, right, _with_right({}, right, range(len(right.prints)), _Index(_single(left), len(left.prints)))
    )


def _with_right(
    equal: Mapping[int, Sequence[int]], right: Side, changed: Iterable[int], left: _Index
) -> dict[int, Sequence[int]]:
    """Return which values are equal if some of the right side are others."""
    found = dict(equal)
    for j in changed:
        found.pop(j, None)
    for b in _single(right, changed):
        several = [a.values[0] for a in left.equal_to(b, b.values[0] / len(right.prints))]
        if several:
            found[b.values[0]] = several
    return found


def _with_left(
    equal: Mapping[int, Sequence[int]], left: Side, changed: Iterable[int], right: _Index
) -> dict[int, Sequence[int]]:
    """Return which values are equal if some of the left side are others."""
    gone, more = set(changed), dict[int, list[int]]()
    for a in _single(left, changed):
        for b in right.equal_to(a, a.values[0] / len(left.prints)):
            more.setdefault(b.values[0], []).append(a.values[0])
    found = dict[int, Sequence[int]]()
    for j in equal.keys() | more.keys():
        several = [*(i for i in equal.get(j, ()) if i not in gone), *more.get(j, ())]
        if several:
            found[j] = sorted(several, key=lambda i: (_size(left.prints[i]), i))
    return found


def _in_loops(side: Side, known: Mapping[int, list[int]]) -> Iterator[_Mark]:
    for whole in wholes_of(side):
        if whole.mark.entries and any(i not in known for i in whole.parts):
            yield _Mark(*whole)


def _single(side: Side, chosen: Iterable[int] | None = None) -> Iterator[_Mark]:
    """Yield the values that tell something, of those that are chosen."""
    for i in range(len(side.prints)) if chosen is None else chosen:
        mark = side.prints[i]
        if mark.entries and not side.neutral(i):
            yield _Mark((i,), mark, side.tolerance[i])


def _equal(
    mine: Iterable[_Mark], theirs: Iterable[_Mark], counts: tuple[int, int]
) -> Iterator[tuple[_Mark, _Mark]]:
    """Yield the marks that are equal."""
    index = _Index(mine, counts[0])
    for b in theirs:
        yield from ((a, b) for a in index.equal_to(b, b.values[0] / counts[1]))


def _size(mark: Fingerprint) -> float:
    """Return by what marks are found that may be equal."""
    return math.log(mark.absolute)


def _note(
    left: dict[int, list[int]],
    right: dict[int, list[int]],
    pair: tuple[tuple[int, ...], tuple[int, ...]],
    phases: tuple[list[int], list[int]],
) -> None:
    """Note that values are equal. What a later phase computes again says nothing of an earlier one."""
    mine, theirs = pair
    here, there = max(phases[0][i] for i in mine), max(phases[1][j] for j in theirs)
    if there <= here:
        for i in mine:
            left.setdefault(i, []).extend(theirs)
    if here <= there:
        for j in theirs:
            right.setdefault(j, []).extend(mine)


def _phases(side: Side) -> list[int]:
    """Return the phase of each value as a number."""
    found = [0] * len(side.trace.values)
    for step in side.trace.steps:
        for output in step.outputs:
            found[output] = _ORDER.index(step.phase)
    return found
