"""Which values two programs share, by fingerprints alone: no names, no order, no layout."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from stablenum.diagnosis.diff.fingerprints import Fingerprint, distance
from stablenum.diagnosis.diff.loops import wholes_of
from stablenum.diagnosis.diff.row_matching import rows_shared
from stablenum.diagnosis.diff.sides import Side

__all__ = ["Matching", "matched"]

_ORDER = ("forward", "backward", "update")


class Matching:
    """The values that both sides have.

    Attributes:
        left: value of the left side -> values of the right side that are equal to it.
        right: the inverse.
    """

    def __init__(self, left: Side, right: Side) -> None:
        self._sides = left, right
        self.left: dict[int, list[int]] = {}
        self.right: dict[int, list[int]] = {}

    def known(self, side: str) -> Mapping[int, list[int]]:
        """Return what corresponds to each value of a side, "left" or "right", also in parts: what one side
        computes at once, and the other one in a loop."""
        return self._known[("left", "right").index(side)]

    def with_rows(self) -> Matching:
        """Return the matching in which values also correspond of which one has some rows of the other."""
        found = Matching(*self._sides)
        rows = rows_shared(*self._sides, self.known("left"), self.known("right"))
        found.left, found.right = (
            {**more, **self.known(side)} for more, side in zip(rows, ("left", "right"), strict=True)
        )
        return found

    @cached_property
    def _known(self) -> tuple[Mapping[int, list[int]], Mapping[int, list[int]]]:
        left, right = dict[int, list[int]](), dict[int, list[int]]()
        mine, theirs = (list(_single(side)) for side in self._sides)
        loops = [list(_in_loops(s, m)) for s, m in zip(self._sides, (self.left, self.right), strict=True)]
        phases = _phases(self._sides[0]), _phases(self._sides[1])
        for a, b in (*_equal(loops[0], theirs), *_equal(mine, loops[1]), *_equal(*loops)):
            _note(left, right, (a.values, b.values), phases)
        return {**left, **self.left}, {**right, **self.right}


class _Mark(NamedTuple):
    """One or several values, with the fingerprint of all together."""

    values: tuple[int, ...]
    print: Fingerprint
    tolerance: float


def matched(left: Side, right: Side) -> Matching:
    """Return the values of the two sides that have the same fingerprint, up to rounding."""
    found, phases = Matching(left, right), (_phases(left), _phases(right))
    for a, b in _equal(_single(left), _single(right)):
        _note(found.left, found.right, (a.values, b.values), phases)
    return found


def _in_loops(side: Side, known: Mapping[int, list[int]]) -> Iterator[_Mark]:
    for whole in wholes_of(side):
        if whole.mark.entries and any(i not in known for i in whole.parts):
            yield _Mark(*whole)


def _single(side: Side) -> Iterator[_Mark]:
    for i, mark in enumerate(side.prints):
        if mark.entries and not side.neutral(i):
            yield _Mark((i,), mark, side.tolerance[i])


def _equal(mine: Iterable[_Mark], theirs: Iterable[_Mark]) -> Iterator[tuple[_Mark, _Mark]]:
    """Yield the marks that are equal."""
    rows = sorted(((math.log(a.print.absolute), i, a) for i, a in enumerate(mine)), key=lambda row: row[:2])
    sizes = [size for size, *_ in rows]
    for b in theirs:
        width = b.tolerance + 1e-3
        size = math.log(b.print.absolute)
        low, high = bisect.bisect_left(sizes, size - width), bisect.bisect_right(sizes, size + width)
        for *_, a in rows[low:high]:
            if distance(a.print, b.print) <= a.tolerance + b.tolerance:
                yield a, b


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
