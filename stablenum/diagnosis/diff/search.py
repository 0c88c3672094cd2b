"""Find the differences of two programs one after the other: after each, the left side's values go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from stablenum.diagnosis.diff.causes.choice import causes_of
from stablenum.diagnosis.diff.causes.judge import applied
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.causes.stops.offsets import offset
from stablenum.diagnosis.diff.causes.stops.stopped import Stopped, stopped
from stablenum.diagnosis.diff.differences import Difference
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Frontier, Start
from stablenum.diagnosis.diff.places.locations import (
    lines_of,
    location_of,
    location_of_optimizer,
    result_name,
)
from stablenum.diagnosis.diff.places.mended_places import MendedPlace, set_right, unseen_in_loss
from stablenum.diagnosis.diff.places.missing_operations import after_call
from stablenum.diagnosis.diff.places.patches import Pair, Patch
from stablenum.diagnosis.diff.places.regions import leading_steps
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.places.update_places import placed_by_cause
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.play import if_recorded
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["Found", "Stuck", "differences_of", "untold"]

# A program that differs in more places than these differs everywhere. Each takes a search of its own. Chosen,
# not measured; where the search got no further, the report says so.
_MOST_ROUNDS = 16
_PHASES = {"gradient": "backward", "updated": "update"}


@dataclass(slots=True)
class Found:
    """A difference, and the lines of both sides that belong to it.

    Attributes:
        difference: what is reported.
        place: where it begins.
        patch: the values that make the programs agree in what follows, if there are any.
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
        look = stopped if group.kind == "gradient" else offset
        stop = if_recorded(partial(look, comparison, group, place), None)
        pairs, patch = list[Pair](), None
        if group.kind == "gradient" and (stop is None or not stop.cause.evidence):
            earlier = if_recorded(partial(unseen_in_loss, comparison, group), None)
            if earlier is not None:
                group, stop, (place, pairs, patch) = earlier[0], None, earlier[1]
        if stop is None and patch is None:
            known = partial(_is_known, found)
            setting = partial(set_right, comparison, group, known)
            nothing: MendedPlace = place, [], None
            place, pairs, patch = if_recorded(setting, nothing)
        if not any(f.holds(stop or place) for f in found):
            scene = Scene(comparison, place, group, tuple(pairs), patch)
            new = _found(scene, stop)
            if _may_follow(new, group, found):
                patch = stop = None
            elif not any(_goes_on(new.difference, f.difference) for f in found):
                found.append(new)
                mended = _mended(scene, new.difference)
                if mended is not None:
                    comparison = mended
                    continue
        if patch is not None:
            comparison = comparison.with_values(patch.side, patch.values)
        elif stop is not None and stop.after is not None:
            comparison = stop.after
        else:
            if group.kind != "updated":
                stuck = stuck or Stuck(_holding(found, stop or place), group)
            comparison = _past(comparison, group, past)
    return found, stuck or Stuck(found[-1], group)


def _is_known(found: Sequence[Found], place: Frontier) -> bool:
    return any(f.holds(place) for f in found)


def _mended(scene: Scene, difference: Difference) -> Comparison | None:
    """Return the comparison with the change of one side that confirmed a cause, or with the left side's value
    in place of the right one's if that leaves no more results that differ; None without such a change."""
    if not scene.healed or not any(c.confirmed for c in difference.causes):
        return None
    edited = applied(scene.comparison, scene.healed[0])
    if scene.patch is None:
        return edited if edited.agrees(scene.group) else None
    patched = scene.comparison.with_values(scene.patch.side, scene.patch.values)
    return min(patched, edited, key=_left)


def _left(comparison: Comparison) -> int:
    return sum(len(group.differing) for group in comparison.groups)


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
    if all([c.code for c in d.causes] == ["schedule_offset"] for d in (new, known)):
        return True  # a schedule that begins late goes on late
    lines = [[None if p is None else p.where for p in (d.left, d.right)] for d in (new, known)]
    if new.step == known.step:
        return lines[0] == lines[1] or {c.code for c in new.causes} <= {c.code for c in known.causes}
    again = {(c.code, c.sentence) for c in new.causes} <= {(c.code, c.sentence) for c in known.causes}
    return lines[0] == lines[1] and again


def _in_update(difference: Difference) -> bool:
    return any(p is not None and p.phase == "update" for p in (difference.left, difference.right))


def _past(comparison: Comparison, group: Group, past: set[tuple[str, int]]) -> Comparison:
    """Leave a group as it is, and go on with the left side's gradients or updated parameters."""
    past.add((group.kind, group.step))
    following = {"loss": "gradient"}.get(group.kind, group.kind)
    values = dict[int, Any]()
    for other in comparison.groups:
        if (other.kind, other.step) == (following, group.step):
            nothing: Mapping[int, Any] = {}
            values.update(if_recorded(partial(comparison.given, other), nothing))
            past.add((other.kind, other.step))
    going_on = partial(comparison.with_values, "right", values)
    return if_recorded(going_on, comparison) if values else comparison


def _found(scene: Scene, stop: Stopped | None) -> Found:
    comparison, group, place, patch = scene.comparison, scene.group, scene.found, scene.patch
    worst = max(group.differing, key=lambda p: p.error)
    phase = _PHASES.get(group.kind, "forward")
    causes = causes_of(scene) if stop is None else (stop.cause,)
    left, right = (place.left, place.right) if stop is None else (stop.left, stop.right)
    left, right = _with_line(left, comparison.left), _with_line(right, comparison.right)
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
        within=((), ())
        if patch is None or stop is not None
        else (_within(place.region_left, patch.left), _within(place.region_right, patch.right)),
    )
    return Found(
        difference,
        place,
        patch,
        _lines(left, place.region_left, None if patch is None else patch.left),
        _lines(right, place.region_right, None if patch is None else patch.right),
        None if stop is None or group.kind != "gradient" else stop.after,
    )


def _with_line(start: Start | None, side: Side) -> Start | None:
    """Return the start of a side at the operation with a line whose result a step without one only moves."""
    step = None if start is None else start.step
    while start is not None and step is not None and step.place is None and quiet(step) and step.inputs:
        producer = side.trace.values[step.inputs[0]].producer
        step = None if producer is None else side.trace.steps[producer]
        if step is not None and step.place is not None:
            return replace(start, step=step)
    return start


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


def _within(region: Iterable[Step], last: int) -> tuple[str, ...]:
    """Return the lines of a region from which a value follows."""
    return lines_of(s.place for s in leading_steps(last, region) if s.place is not None)
