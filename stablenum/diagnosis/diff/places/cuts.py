"""Find the place of a difference by exchange: the least that has to be set right so that the results agree.

A cut is a pair of values, one of each side. If the results agree with the left one's array in place of the
right one's, all that differs lies before it. Of the cuts that heal, the one with the fewest lines behind it,
back to values that both sides have, is where the programs differ. Nothing of this looks at names, operations
or the order of the lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Frontier, Start
from stablenum.diagnosis.diff.places.patches import Patch, laid_out
from stablenum.diagnosis.diff.places.regions import Region, leading_steps
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.sides import MOST_ENTRIES, Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["least_cut"]

# Each exchange is an evaluation; 7 are needed in the median of the pairs of ``tests/pairs``. Chosen, not
# measured.
_MOST_EXCHANGES = 24
# The weight of a side that computes nothing before a cut: more than that of a line. Chosen, not measured.
_NOTHING = 1.5
# Numbers of ways grow exponentially; they are counted modulo a prime.
_PRIME = 2**61 - 1


class _Cut(NamedTuple):
    """A value through which every way to the results leads, and the steps before it; none for a value that
    the other side has, too."""

    value: int
    before: Sequence[Step]

    @property
    def weight(self) -> float:
        """How much lies before it: lines, and operations that compute."""
        lines = {s.place for s in self.before}
        return len(lines) + 0.1 * sum(not quiet(s) for s in self.before) if self.before else _NOTHING


def least_cut(comparison: Comparison, group: Group) -> tuple[Frontier, Patch] | None:
    """Return the place before the least cut after which the results of a group agree; None without one."""
    results = [(p.left.value, p.right.value) for p in group.differing]
    ends = [i for i, _ in results], [j for _, j in results]
    names = ("left", "right")
    regions = [
        Region(comparison.side(n), comparison.found.known(n), end, since)
        for n, end, since in zip(names, ends, group.since, strict=True)
    ]
    mine, theirs = (_cuts(region, end) for region, end in zip(regions, ends, strict=True))
    for a, b in islice(_in_order(comparison, mine, theirs), _MOST_EXCHANGES):
        array, own = arrays_of(comparison.left, [a.value]), arrays_of(comparison.right, [b.value])
        new = laid_out(array[a.value], own[b.value]) if a.value in array and b.value in own else None
        if new is None:
            continue
        if comparison.with_values("right", {b.value: new}, until=group).agrees(group):
            starts = (_start(comparison.left, a), _start(comparison.right, b))
            place = Frontier(*starts, tuple(regions[0].steps), tuple(regions[1].steps))
            return place, Patch(a.value, b.value, "right", {b.value: new}, agrees=True, shared=0)
    return None


def _in_order(
    comparison: Comparison, mine: Iterable[_Cut], theirs: Iterable[_Cut]
) -> Iterator[tuple[_Cut, _Cut]]:
    """Yield the pairs of cuts of one size, one of which is not common, those with the fewest lines
    before them first."""
    left, right, theirs = comparison.left, comparison.right, list(theirs)
    pairs = [
        (a, b)
        for a in mine
        for b in theirs
        if math.prod(left.shapes[a.value]) == math.prod(right.shapes[b.value]) <= MOST_ENTRIES
        and (a.before or b.before)
        and b.value not in comparison.found.left.get(a.value, ())
    ]
    yield from sorted(pairs, key=lambda p: (p[0].weight + p[1].weight, p[1].value, p[0].value))


def _cuts(region: Region, results: Sequence[int]) -> list[_Cut]:
    """Return the cuts of a side: of its region, and the values that the first ones read."""
    made = {o: s for s in region.steps for o in s.outputs}
    ways = dict[int, int]()
    for step in region.steps:
        count = sum(ways[i] for i in step.inputs if i in made) or 1
        ways.update(dict.fromkeys(step.outputs, count % _PRIME))
    onward = dict.fromkeys(made, 0) | dict.fromkeys((r for r in results if r in made), 1)
    for step in reversed(region.steps):
        for value in (i for i in step.inputs if i in made):
            onward[value] += sum(onward[o] for o in step.outputs)
            onward[value] %= _PRIME
    total = sum(ways[r] for r in results if r in ways) % _PRIME
    side = region.side
    found = [v for v in made if ways[v] * onward[v] % _PRIME == total and side.prints[v].floating]
    cuts = [_Cut(v, leading_steps(v, region.steps)) for v in found if kind(made[v]) != "broadcast"]
    read = dict.fromkeys(i for c in cuts[:1] for s in c.before for i in s.inputs if i not in made)
    return cuts + [_Cut(v, ()) for v in read if side.depends[v] and side.prints[v].floating]


def _start(side: Side, cut: _Cut) -> Start | None:
    """Return where a side begins to differ before a cut: at its first operation with a line that computes, or
    after what both have."""
    steps = [s for s in cut.before if s.place is not None] or cut.before
    if steps:
        return Start(next((s for s in steps if not quiet(s)), steps[0]))
    producer = side.trace.values[cut.value].producer
    step = None if producer is None else side.trace.steps[producer]
    return None if step is None else Start(step, missing=True, value=cut.value)
