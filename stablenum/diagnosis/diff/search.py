"""Find the differences of two programs one after the other: after each, the left side's values go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from stablenum.diagnosis.diff.causes import causes_of
from stablenum.diagnosis.diff.comparison import Comparison
from stablenum.diagnosis.diff.differences import Difference
from stablenum.diagnosis.diff.frontier import Frontier, Start, last_of_line, leading_to
from stablenum.diagnosis.diff.kinds import quiet
from stablenum.diagnosis.diff.lacks import after_call, lacking
from stablenum.diagnosis.diff.locations import location_of, location_of_optimizer, result_name
from stablenum.diagnosis.diff.offsets import offset
from stablenum.diagnosis.diff.patches import Pair, Patch, candidates, patched
from stablenum.diagnosis.diff.results import Group
from stablenum.diagnosis.diff.scene import Scene
from stablenum.diagnosis.diff.stops import Stopped, stopped
from stablenum.diagnosis.diff.update_places import placed_by_cause
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["Found", "Stuck", "differences_of", "untold"]

_Place: TypeAlias = tuple[Frontier, list[Pair], Patch | None]
_MOST_ROUNDS = 16
_MOST_PLACES = 8
# Of places after the first, so many values are tried.
_MOST_TRIALS = 3
# Of the calls of a line, so many are set right together.
_MOST_CALLS = 16
# Losses come nearer if their gap is less than this times what it was.
_NEARER = 0.1
_PHASES = {"gradient": "backward", "updated": "update"}


@dataclass(slots=True)
class Found:
    """A difference, and the lines of both sides that belong to it.

    Attributes:
        difference: what is reported.
        place: where it begins.
        patch: the values after which the programs go on alike, if such were found.
        left, right: the lines.
        without: the comparison without the gradient that only one side passes on there; None if that is not
            the difference.
    """

    difference: Difference
    place: Frontier
    patch: Patch | None
    left: set[Place]
    right: set[Place]
    without: Comparison | None = None

    @property
    def forward(self) -> bool:
        """Whether a side begins to differ in its forward pass."""
        return any(
            p is not None and p.phase == "forward" for p in (self.difference.left, self.difference.right)
        )

    def holds(self, place: Frontier | Stopped) -> bool:
        """Return whether a place lies on these lines."""
        return any(
            start is not None and start.step.place in lines
            for start, lines in ((place.left, self.left), (place.right, self.right))
        )


class Stuck(NamedTuple):
    """A difference after which results could not be made to agree.

    Attributes:
        found: the difference.
        group: the results.
    """

    found: Found
    group: Group


def differences_of(comparison: Comparison) -> tuple[list[Found], Stuck | None]:
    """Return where the programs part, the first place first, and where the search got no further, if all was
    not looked at.

    A line that differs again, such as that of a layer that is used several times, or in its derivative, is
    named once. Results that agree as the programs are do not count if they differ once a value is replaced:
    an update may be set right by another gradient.
    """
    found: list[Found] = []
    stuck: Stuck | None = None
    past: set[tuple[str, int]] = set()
    agreeing = {(g.kind, g.step) for g in comparison.groups if not g.differing}
    for _ in range(_MOST_ROUNDS):
        groups = [
            g
            for g in comparison.groups
            if g.differing and (g.kind, g.step) not in past | agreeing and not untold(comparison, g, found)
        ]
        if not groups:
            return found, stuck
        group = groups[0]
        place = next(comparison.frontiers(group))
        stop = (stopped if group.kind == "gradient" else offset)(comparison, group, place)
        pairs, patch = list[Pair](), None
        if group.kind == "gradient" and (stop is None or not stop.cause.confirmed):
            earlier = _unseen_in_loss(comparison, group)
            if earlier is not None:
                group, stop, (place, pairs, patch) = earlier[0], None, earlier[1]
        if stop is None and patch is None:
            place, pairs, patch = _set_right(comparison, group, found)
        if not any(f.holds(stop or place) for f in found):
            new = _found(Scene(comparison, place, group, tuple(pairs), patch), stop)
            if _may_follow(new, group, found):
                patch = stop = None
            elif not any(_goes_on(new.difference, f.difference) for f in found):
                found.append(new)
        if patch is not None:
            comparison = comparison.with_values(patch.side, patch.values)
        elif stop is not None and stop.after is not None:
            comparison = stop.after
        else:
            if group.kind != "updated":
                stuck = stuck or Stuck(_holding(found, stop or place), group)
            comparison = _past(comparison, group, past)
    return found, stuck or Stuck(found[-1], group)


def _holding(found: Sequence[Found], place: Frontier | Stopped) -> Found:
    """Return the difference to whose lines a place belongs, or else the last one."""
    return next((f for f in found if f.holds(place)), found[-1])


def untold(comparison: Comparison, group: Group, found: Iterable[Found]) -> bool:
    """Return whether updates may differ because the parameters do: both sides keep their own, and a
    difference of the forward pass is known."""
    own = group.kind == "updated" and not comparison.weights.carried
    return own and any(f.forward for f in found)


def _may_follow(new: Found, group: Group, found: Iterable[Found]) -> bool:
    """Return whether gradients may differ because of a difference of the forward pass, whose derivative
    differs too: one is known, and to set the new one right does not make all gradients agree."""
    alone = new.without is not None or (new.patch is not None and new.patch.agrees)
    if group.kind != "gradient" or alone:
        return False
    return any(f.forward and f.difference.step == new.difference.step for f in found)


def _goes_on(new: Difference, known: Difference) -> bool:
    """Return whether a difference of an update is that of another parameter or step: at the same lines, or of
    the same cause, and in a later step with no cause of its own."""
    if not _in_update(new) or not _in_update(known):
        return False
    lines = [[None if p is None else p.where for p in (d.left, d.right)] for d in (new, known)]
    if new.step == known.step:
        return lines[0] == lines[1] or {c.code for c in new.causes} <= {c.code for c in known.causes}
    again = {(c.code, c.sentence) for c in new.causes} <= {(c.code, c.sentence) for c in known.causes}
    return lines[0] == lines[1] and again


def _in_update(difference: Difference) -> bool:
    return any(p is not None and p.phase == "update" for p in (difference.left, difference.right))


def _set_right(comparison: Comparison, group: Group, found: Iterable[Found]) -> _Place:
    """Return the first place after which the programs can be made to agree, with the values that correspond
    there; without such a place, and if it was found before, the first one."""
    places = islice(comparison.frontiers(group), _MOST_PLACES)
    first = next(places)
    pairs = candidates(comparison, first)
    patch = patched(comparison, first, group, pairs)
    best = first, pairs, patch
    sure = patch is not None and (not first.doubtful or _replaces(comparison, first, patch))
    if not sure and not any(f.holds(first) for f in found):
        for place in (p for p in places if p.known and (patch is None or p.lacks)):
            others = [p for p in candidates(comparison, place) if _fits(place, p)]
            further = patched(comparison, place, group, others[:_MOST_TRIALS])
            if further is not None and _better(further, best[2]):
                best = place, others, further
                if further.agrees:
                    break
    if not sure and group.kind != "updated" and not any(f.holds(first) for f in found):
        best = _closer(comparison, group, best)
    place, pairs, patch = best
    if patch is not None and not patch.agrees:
        patch = _in_every_call(comparison, place, group, patch) or patch
    if not sure and (place.doubtful or patch is None or not patch.agrees):
        lacked = lacking(comparison, place, group)
        if lacked is not None:
            return lacked[0], pairs, lacked[1]
    return place if patch is None else leading_to(place, patch.left, patch.right), pairs, patch


def _in_every_call(comparison: Comparison, place: Frontier, group: Group, patch: Patch) -> Patch | None:
    """Return the patch of all calls of the two lines, such as those of several layers, one after the other;
    None if the results do not agree with that either."""
    values = dict(patch.values)
    for _ in range(_MOST_CALLS):
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


def _at(place: Frontier) -> list[tuple[Place | None, str] | None]:
    starts = place.left, place.right
    return [None if s is None else (s.step.place, s.step.operation) for s in starts]


def _unseen_in_loss(comparison: Comparison, group: Group) -> tuple[Group, _Place] | None:
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


def _closer(comparison: Comparison, group: Group, best: _Place) -> _Place:
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
    """Return whether what one side computes takes the place of what the other one does: the programs go on
    alike if the results of both lines are exchanged, neither of which only moves entries."""
    starts = place.left, place.right
    if any(start is None or quiet(start.step) for start in starts):
        return False
    ends = (
        last_of_line(comparison.left, place.left, place.region_left),
        last_of_line(comparison.right, place.right, place.region_right),
    )
    return ends == (patch.left, patch.right)


def _better(one: Patch, other: Patch | None) -> bool:
    """Return whether the programs go on alike after one patch, and less so after another one that comes
    first in doubt."""
    if other is None or one.agrees:
        return True
    return not other.agrees and one.shared > other.shared


def _fits(place: Frontier, pair: Pair) -> bool:
    """Return whether the value after which a side lacks an operation, if it does, is one of a pair."""
    return all(
        start is None or start.value in (None, value)
        for start, value in ((place.left, pair.left), (place.right, pair.right))
    )


def _past(comparison: Comparison, group: Group, past: set[tuple[str, int]]) -> Comparison:
    """Leave a group as it is, and go on with the left side's gradients or updated parameters."""
    past.add((group.kind, group.step))
    following = {"loss": "gradient"}.get(group.kind, group.kind)
    values = dict[int, Any]()
    for other in comparison.groups:
        if (other.kind, other.step) == (following, group.step):
            values.update(comparison.given(other))
            past.add((other.kind, other.step))
    return comparison.with_values("right", values) if values else comparison


def _found(scene: Scene, stop: Stopped | None) -> Found:
    comparison, group, place, patch = scene.comparison, scene.group, scene.found, scene.patch
    worst = max(group.differing, key=lambda p: p.error)
    phase = _PHASES.get(group.kind, "forward")
    causes = causes_of(scene) if stop is None else (stop.cause,)
    left, right = (place.left, place.right) if stop is None else (stop.left, stop.right)
    left, right = (
        after_call(left, comparison.left, right, comparison.right),
        after_call(right, comparison.right, left, comparison.left),
    )
    if group.kind == "updated" and causes:
        left, right = placed_by_cause(causes[0].code, place, comparison.left, comparison.right)
        place = _named(place, left, right)
    places = [
        location_of(start, side, phase) or (location_of_optimizer(side) if phase == "update" else None)
        for start, side in ((left, comparison.left), (right, comparison.right))
    ]
    difference = Difference(
        left=places[0],
        right=places[1],
        result=result_name(group.results, worst.left.name),
        step=group.step,
        error=worst.error,
        allowed=worst.allowed,
        causes=causes,
    )
    return Found(
        difference,
        place,
        patch,
        _lines(left, place.region_left, None if patch is None else patch.left),
        _lines(right, place.region_right, None if patch is None else patch.right),
        None if stop is None or group.kind != "gradient" else stop.after,
    )


def _named(place: Frontier, left: Start | None, right: Start | None) -> Frontier:
    """Return a place with the operations that a cause names, if both sides have them on the way to what
    differs: they are what is to be reproduced."""
    on_the_way = all(
        start is not None and not start.missing and any(s is start.step for s in region)
        for start, region in ((left, place.region_left), (right, place.region_right))
    )
    return replace(place, left=left, right=right) if on_the_way else place


def _lines(start: Start | None, region: Iterable[Step], last: int | None) -> set[Place]:
    """Return the lines from a start to the step that makes a value."""
    if start is None:
        return set()
    lines = {start.step.place}
    steps = list(region)
    end = next((s.index for s in steps if last in s.outputs), start.step.index)
    lines |= {s.place for s in steps if start.step.index <= s.index <= end}
    return {place for place in lines if place is not None}
