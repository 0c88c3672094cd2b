"""Find the place after which two programs can be made to agree, and the values with which they do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeAlias

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.cuts import least_cut
from stablenum.diagnosis.diff.places.frontier import Frontier, Start, last_of_line, leading_to
from stablenum.diagnosis.diff.places.missing_operations import lacking
from stablenum.diagnosis.diff.places.patches import Pair, Patch, candidates, laid_out, patched
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.play import if_recorded
from stablenum.diagnosis.diff.sides.sides import MOST_ENTRIES, Side, arrays_of
from stablenum.diagnosis.replay.values import Place

__all__ = ["MOST_CALLS", "MendedPlace", "set_right", "unseen_in_loss"]

MendedPlace: TypeAlias = tuple[Frontier, list[Pair], Patch | None]
# So many places are looked at, the most likely first. Chosen, not measured.
_MOST_PLACES = 8
# Of places after the first, so many values are tried, each of which is an evaluation. Chosen, not measured.
_MOST_TRIALS = 3
# Of the calls of a line, such as those of several layers, so many are set right together. Each is an
# evaluation. Chosen, not measured.
MOST_CALLS = 16
# Losses come nearer if their gap is less than this times what it was. Chosen, not measured.
_NEARER = 0.1


def set_right(comparison: Comparison, group: Group, known: Callable[[Frontier], bool]) -> MendedPlace:
    """Return the first place after which the programs can be made to agree, with the values that correspond
    there; without such a place, and if it is known from before, the first one."""
    places = islice(comparison.frontiers(group), _MOST_PLACES)
    first = next(places)
    pairs = candidates(comparison, first)
    patch = patched(comparison, first, group, pairs)
    best = first, pairs, patch
    sure = patch is not None and (not first.doubtful or _replaces(comparison, first, patch))
    if not sure and not known(first):
        for place in (p for p in places if p.known and (patch is None or p.lacks)):
            others = [p for p in candidates(comparison, place) if _fits(place, p)]
            further = patched(comparison, place, group, others[:_MOST_TRIALS])
            if further is not None and _better(further, best[2]):
                best = place, others, further
                if further.agrees:
                    break
    if not sure and group.kind != "updated" and not known(first):
        best = _closer(comparison, group, best)
    place, pairs, patch = best
    if patch is None:
        tried = (if_recorded(partial(_all_at_once, comparison, group, p), None) for p in pairs[:_MOST_TRIALS])
        patch = next(filter(None, tried), None)
    elif not patch.agrees:
        whole = partial(_in_every_call, comparison, place, group, patch)
        patch = if_recorded(whole, None) or patch
    if not (sure or known(first)) and (place.doubtful or patch is None or not patch.agrees):
        lacked = if_recorded(partial(lacking, comparison, place, group), None)
        if lacked is not None:
            return lacked[0], pairs, lacked[1]
    if patch is None and group.kind in ("loss", "output") and not known(first):
        cut = if_recorded(partial(least_cut, comparison, group), None)
        if cut is not None:
            return cut[0], candidates(comparison, cut[0]), cut[1]
    return place if patch is None else leading_to(place, patch.left, patch.right), pairs, patch


def _in_every_call(comparison: Comparison, place: Frontier, group: Group, patch: Patch) -> Patch | None:
    """Return the patch of all calls of the two lines, such as those of several layers, one after the other;
    None if the results do not agree with that either."""
    found = _all_at_once(comparison, group, patch)
    if found is not None:
        return found
    values = dict(patch.values)
    for _ in range(MOST_CALLS if _calls(place) <= MOST_CALLS else 0):
        after = comparison.with_values(patch.side, values, until=group)
        again = next(g for g in after.groups if (g.kind, g.step) == (group.kind, group.step))
        if not again.differing:
            return replace(patch, values=values, agrees=True)
        further = next(after.frontiers(again))
        if _at(further) != _at(place):
            return None
        next_patch = patched(after, further, again, candidates(after, further))
        if next_patch is None or values.keys() >= next_patch.values.keys():
            return None
        values.update(next_patch.values)
    return None


def _all_at_once(comparison: Comparison, group: Group, pair: Pair | Patch) -> Patch | None:
    """Return the patch of all calls of the lines that give two values, each with the value of that call of
    the other side; None if the results do not agree with it."""
    mine, theirs = _alike(comparison.left, pair.left), _alike(comparison.right, pair.right)
    size = sum(math.prod(comparison.right.shapes[j]) for j in theirs)
    if len(mine) != len(theirs) or len(mine) < 2 or size > MOST_ENTRIES:
        return None
    a, b = arrays_of(comparison.left, mine), arrays_of(comparison.right, theirs)
    values = {j: laid_out(a[i], b[j]) for i, j in zip(mine, theirs, strict=True)}
    if any(array is None for array in values.values()):
        return None
    if not comparison.with_values("right", values, until=group).agrees(group):
        return None
    return Patch(pair.left, pair.right, "right", values, agrees=True, shared=getattr(pair, "shared", 0))


def _alike(side: Side, value: int) -> list[int]:
    """Return what a line gives in all of its calls, in the order of the program."""
    producer = side.trace.values[value].producer
    if producer is None:
        return []
    step = side.trace.steps[producer]
    number, own = step.outputs.index(value), (step.place, step.operation, step.primitive, step.phase)
    steps = (s for s in side.trace.steps if (s.place, s.operation, s.primitive, s.phase) == own)
    return [s.outputs[number] for s in steps if len(s.outputs) > number]


def _calls(place: Frontier) -> int:
    """Return how often the lines at a place are called on the way to what differs."""
    sides = (place.left, place.region_left), (place.right, place.region_right)
    return max(
        sum((s.place, s.operation) == (start.step.place, start.step.operation) for s in region)
        for start, region in sides
        if start is not None
    )


def _at(place: Frontier) -> list[tuple[Place | None, str] | None]:
    starts = place.left, place.right
    return [None if s is None else (s.step.place, s.step.operation) for s in starts]


def unseen_in_loss(comparison: Comparison, group: Group) -> tuple[Group, MendedPlace] | None:
    """Return the place of the forward pass at which results differ that the losses do not show: another
    epsilon of a norm may move a loss by less than rounding could, and gradients by more. None if no value
    there brings the losses nearer."""
    forward = replace(group, kind="loss", since=(-1, -1), shown_by=group.kind)
    before = _gap_of_losses(comparison, group.step)
    for place in islice(comparison.frontiers(forward) if before else (), _MOST_PLACES):
        starts = place.left, place.right
        if not place.known or any(s is None or s.step.phase != "forward" for s in starts):
            continue
        pairs = candidates(comparison, place)
        patch = patched(comparison, place, forward, pairs)
        if patch is not None:
            after = comparison.with_values(patch.side, patch.values, until=forward)
            if _gap_of_losses(after, group.step) < before * _NEARER:
                return forward, (leading_to(place, patch.left, patch.right), pairs, patch)
        return None
    return None


def _gap_of_losses(comparison: Comparison, step: int) -> float:
    """Return how far the losses or outputs of a step are apart."""
    groups = (g for g in comparison.groups if g.step == step and g.kind in ("loss", "output"))
    return max((p.error for g in groups for p in g.pairs), default=0.0)


def _closer(comparison: Comparison, group: Group, best: MendedPlace) -> MendedPlace:
    """Return a place that comes later on both sides, where more values are taken as equal, or the one that
    is given if there is none on the way to what can be set right."""
    for place in comparison.closer_frontiers(group):
        first, pairs, patch = best
        regions = (place.region_left, first.region_left), (place.region_right, first.region_right)
        if place.left is None or place.right is None or not place.known:
            continue
        if any(len(later) >= len(earlier) for later, earlier in regions):
            continue
        made = ({o for s in later for o in s.outputs} for later, _ in regions)
        if patch is None or all(v in m for v, m in zip((patch.left, patch.right), made, strict=True)):
            pairs = candidates(comparison, place)
            best = place, pairs, patched(comparison, place, group, pairs) or patch
    return best


def _replaces(comparison: Comparison, place: Frontier, patch: Patch) -> bool:
    """Return whether what one side computes takes the place of what the other one does: the programs agree
    in what follows if the results of both lines are exchanged, neither of which only moves entries."""
    starts = place.left, place.right
    if any(start is None or quiet(start.step) for start in starts):
        return False
    ends = (
        last_of_line(comparison.left, place.left, place.region_left),
        last_of_line(comparison.right, place.right, place.region_right),
    )
    made = _makes(comparison.left, place.left, patch.left), _makes(comparison.right, place.right, patch.right)
    return ends == (patch.left, patch.right) or all(made)


def _makes(side: Side, start: Start | None, value: int) -> bool:
    """Return whether the function at which a side begins to differ gives a value."""
    producer = side.trace.values[value].producer
    if start is None or start.missing or producer is None:
        return False
    step = side.trace.steps[producer]
    own = start.step.place, start.step.module, start.step.operation
    return (step.place, step.module, step.operation) == own


def _better(one: Patch, other: Patch | None) -> bool:
    """Return whether one patch makes the programs agree further than another one, which comes first in
    doubt."""
    if other is None or one.agrees:
        return True
    return not other.agrees and one.shared > other.shared


def _fits(place: Frontier, pair: Pair) -> bool:
    """Return whether the value after which a side lacks an operation, if it does, is one of a pair."""
    return all(
        start is None or start.value in (None, value)
        for start, value in ((place.left, pair.left), (place.right, pair.right))
    )
