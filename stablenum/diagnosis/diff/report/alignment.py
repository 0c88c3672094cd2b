"""Which operations of two programs stand beside one another on the page."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from stablenum.diagnosis.diff.differences import Row

__all__ = ["Line", "aligned"]

PHASES = ("forward", "backward", "update")

Part: TypeAlias = "tuple[int, str]"
Pair: TypeAlias = "tuple[int, int]"
Beside: TypeAlias = "tuple[int | None, int | None]"


class Line(NamedTuple):
    """A line of the page: the operation of each side that stands in it, and the module that it belongs to."""

    left: int | None
    right: int | None
    module: str


def aligned(left: Sequence[Row], right: Sequence[Row], more: Iterable[Pair] = ()) -> list[Line]:
    """Return the lines of both programs, each in its order, with as many partners in one line as possible.

    The modules are those of the left program; those of the right one if the left one has none.

    Args:
        left, right: the operations.
        more: operations to put in one line although they are no partners.
    """
    mine, theirs = _parts(left), _parts(right)
    pairs = {*_partners(left, right), *more}
    flipped = not any(row.module for row in left)
    lines: list[Line] = []
    for part in sorted({*mine, *theirs}, key=_order):
        here, there = mine.get(part, []), theirs.get(part, [])
        inside, outside = set(here), set(there)
        chain = _chain((i, j) for i, j in pairs if i in inside and j in outside)
        beside = list(_beside(here, there, chain))
        modules = (
            _modules([(j, i) for i, j in beside], right, left) if flipped else _modules(beside, left, right)
        )
        lines += [Line(i, j, module) for (i, j), module in zip(beside, modules, strict=True)]
    return lines


def _parts(rows: Sequence[Row]) -> dict[Part, list[int]]:
    """Return the rows of each phase of each step."""
    parts: dict[Part, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        parts[row.step, row.phase].append(i)
    return parts


def _order(part: Part) -> tuple[int, int]:
    step, phase = part
    return step, PHASES.index(phase)


def _partners(left: Sequence[Row], right: Sequence[Row]) -> Iterator[Pair]:
    for i, row in enumerate(left):
        if row.partner is not None:
            yield i, row.partner
    for j, row in enumerate(right):
        if row.partner is not None:
            yield row.partner, j


def _chain(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the longest chain of pairs that rises on both sides."""
    ends: list[int] = []  # of the chain of each length that ends lowest on the right
    chains: list[tuple[Pair, object]] = []
    for i, j in sorted(pairs, key=lambda pair: (pair[0], -pair[1])):
        length = bisect_left(ends, j)
        ends[length : length + 1] = [j]
        chains[length : length + 1] = [((i, j), chains[length - 1] if length else None)]
    return _unwound(chains[-1] if chains else None)


def _unwound(chain: object) -> list[Pair]:
    found = []
    while isinstance(chain, tuple):
        pair, chain = chain
        found.append(pair)
    return found[::-1]


def _beside(mine: Sequence[int], theirs: Sequence[int], chain: Sequence[Pair]) -> Iterator[Beside]:
    """Yield both sides in their orders: the pairs of a chain, and what is between them, side by side."""
    a = b = 0
    for i, j in chain:
        end, stop = bisect_left(mine, i), bisect_left(theirs, j)
        yield from zip_longest(mine[a:end], theirs[b:stop])
        yield i, j
        a, b = end + 1, stop + 1
    yield from zip_longest(mine[a:], theirs[b:])


def _modules(beside: Sequence[Beside], mine: Sequence[Row], theirs: Sequence[Row]) -> Iterator[str]:
    """Yield the module of each pair: that of its first row; without one, that of the pair before, or of the
    pair after if its second row is in the module of that one's second row only."""
    after = _following(beside)
    before: Beside | None = None
    for pair, following in zip(beside, after, strict=True):
        before = pair if pair[0] is not None else before
        near = before if pair[0] is not None else _nearer(pair, before, following, theirs)
        yield _module(mine, near[0]) if near is not None else _module(theirs, pair[1])


def _following(beside: Sequence[Beside]) -> list[Beside | None]:
    """Return for each pair the next one that has a first row."""
    found: list[Beside | None] = []
    following: Beside | None = None
    for pair in reversed(beside):
        found.append(following)
        following = pair if pair[0] is not None else following
    return found[::-1]


def _nearer(
    pair: Beside, before: Beside | None, after: Beside | None, theirs: Sequence[Row]
) -> Beside | None:
    if before is None or after is None:
        return before or after
    here = _module(theirs, pair[1])
    joins, stays = _module(theirs, after[1]) == here, _module(theirs, before[1]) == here
    return after if joins and not stays else before


def _module(rows: Sequence[Row], index: int | None) -> str:
    return "" if index is None else rows[index].module
