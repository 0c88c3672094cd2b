"""Find where only one of two programs ends the flow of gradients: a ``detach``, a ``stop_gradient``, a part
without gradients.

The losses agree then, and the gradients do not. A step at which one side ends the flow is recognised by the
value that it reads: the other side has an equal one, reads it for the same purpose, and passes gradients
through. Without what passes there, the gradients agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, islice, product
from typing import NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial, applied, judged, told
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.causes.stops.cases import SUMS, Case, cases_of
from stablenum.diagnosis.diff.causes.stops.hidden import Hidden, goes_on, hidden_stop, part_without_gradients
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.flow import OTHER, Read, line_between, size
from stablenum.diagnosis.diff.places.frontier import Frontier, Start
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.values import Place

__all__ = ["Stopped", "stopped"]

# What may pass through a line is tried set by set, each by an evaluation; of pairs of lines so many, with so
# many sets of each line: 3 x 4 x 4. Chosen, not measured.
_MOST_TRIALS, _MOST_PAIRS, _MOST_OF_TWO = 9, 3, 4


class Stopped(NamedTuple):
    """A place at which only one side ends the flow of gradients.

    Attributes:
        left, right: the step that ends it, and the step that reads the same value on the other side.
        cause: what is said of it.
        after: the comparison without what passes on the other side; None if that is not known.
    """

    left: Start | None
    right: Start | None
    cause: Cause
    after: Comparison | None


def stopped(comparison: Comparison, group: Group, found: Frontier) -> Stopped | None:
    """Return the place from which gradients differ because only one side ends their flow.

    A place at which that was tried and makes more gradients agree comes before others; two places that do so
    together come one after the other.
    """
    scene = Scene(comparison, found, group)
    cases = cases_of(comparison, group)
    for case in cases:
        tried = _tried(scene, case)
        if tried is not None:
            ends = goes_on(comparison, group, case.side, case.stop)
            part = part_without_gradients(comparison, group) if ends else None
            other = None if part is None else _in_part(part)
            return _stopped(comparison.side(OTHER[case.side]), other or case, *tried)
    part = part_without_gradients(comparison, group)
    if part is not None:
        case = _in_part(part)
        known = _in_line(cases, part) or case
        cause, after = _tried(scene, case) or (_measured(scene, case.code, part), None)
        return _stopped(comparison.side(OTHER[known.side]), known, replace(cause, code=known.code), after)
    two = _of_two(scene, cases)
    if two is not None:
        return two
    hidden = hidden_stop(comparison, group)
    if hidden is not None:
        at = _in_line(cases, hidden)
        cause = _measured(scene, "stopped_gradient" if at is None else at.code, hidden)
        return (
            _of_hidden(hidden, found, cause)
            if at is None
            else _stopped(comparison.side(OTHER[at.side]), at, cause, None)
        )
    if not cases:
        return None
    return _stopped(comparison.side(OTHER[cases[0].side]), cases[0], told(scene, _proposal(cases[0])), None)


def _in_part(part: Hidden) -> Case:
    return Case(part.side, part.stop, "stopped_gradient", part.reads)


def _in_line(cases: Iterable[Case], place: Hidden) -> Case | None:
    """Return the case at the line of a place, which may say more; None if there is none."""
    return next((c for c in cases if (c.side, c.stop.place) == (place.side, place.stop.place)), None)


def _proposal(
    case: Case, trials: Iterable[Trial] | None = None, change: str = "", measured: str = ""
) -> Proposal:
    sentence = _SENTENCES[case.code].format(stops=case.side, passes=OTHER[case.side])
    return Proposal(case.code, sentence, trials, change, measured, likely=True, by_results=True)


def _measured(scene: Scene, code: str, place: Hidden) -> Cause:
    """Return the cause at a place of which finite differences show what would pass there."""
    case = Case(place.side, place.stop, code, place.reads)
    return told(scene, _proposal(case, [place.slope], _MEASURED))


def _of_hidden(hidden: Hidden, found: Frontier, cause: Cause) -> Stopped:
    here, there = Start(hidden.stop), hidden.passes or getattr(found, OTHER[hidden.side])
    left, right = (here, there) if hidden.side == "left" else (there, here)
    return Stopped(left, right, cause, None)


def _of_two(scene: Scene, cases: Sequence[Case]) -> Stopped | None:
    """Return the first of two places without which together all gradients agree."""
    comparison = scene.comparison
    apart = [p for p in combinations(cases, 2) if p[0].stop.place != p[1].stop.place]
    for one, two in apart[:_MOST_PAIRS]:
        sides = [comparison.side(OTHER[case.side]) for case in (one, two)]
        firsts, seconds = (
            list(islice(_contributions(side, case.reads), _MOST_OF_TWO))
            for side, case in zip(sides, (one, two), strict=True)
        )
        trials = [
            (_zeros(OTHER[one.side], sides[0], a), _zeros(OTHER[two.side], sides[1], b))
            for a, b in product(firsts, seconds)
        ]
        where = "" if two.stop.place is None else f" and at line {two.stop.place.line}"
        for edits in trials:
            if applied(comparison, edits, scene.group).agrees(scene.group):
                cause = told(scene, _proposal(one, [edits], f"{_WITHOUT}{where}"))
                return _stopped(sides[0], one, cause, applied(comparison, edits[:1]))
    return None


def _stopped(other: Side, case: Case, cause: Cause, after: Comparison | None) -> Stopped:
    value, step = case.reads[-1]
    line = line_between(other, case.reads[-1]) if case.missing else None
    here, there = Start(case.stop), Start(step, missing=case.missing, value=value, place=line)
    return Stopped(*((here, there) if case.side == "left" else (there, here)), cause, after)


# This shows the place, and not what either side does there.
_ON_BOTH = "Without the gradient of what follows here, on both sides, all gradients agree."
_MEASURED = "Finite differences show that its gradients lack what would pass here"
_WITHOUT = "Without what passes there"
_SENTENCES = {
    "stopped_gradient": "the {stops} program blocks the gradient here; the {passes} one does not.",
    "straight_through_missing": "the {stops} program passes the gradient around what it rounds or chooses "
    "here; the {passes} one does not.",
    "accumulation": "the {stops} program blocks the gradient of the parts of the loss that were added "
    "before; the {passes} one does not.",
}


def _tried(scene: Scene, case: Case) -> tuple[Cause, Comparison | None] | None:
    """Leave out what passes on the other side. Return the cause with what that shows, and the comparison
    without it; None if no more gradients agree then."""
    straight, name = case.code == "straight_through_missing", OTHER[case.side]
    if straight:
        trials: Iterable[Trial] = _cuts(scene, case)
    else:
        side = scene.comparison.side(name)
        trials = ((_zeros(name, side, values),) for values in _contributions(side, case.reads))
    verdict = judged(scene, "", [_proposal(case, trials, _WITHOUT)])
    if verdict.confirmed:
        return verdict.confirmed[0], None if straight else applied(scene.comparison, scene.healed[-1])
    on_both = straight and _cut(scene, case)
    return (told(scene, _proposal(case, measured=_ON_BOTH)), None) if on_both else None


def _cuts(scene: Scene, case: Case) -> Iterator[Trial]:
    """Yield the side that passes a gradient by without it."""
    side = scene.comparison.side(case.side)
    yield from ((_zeros(case.side, side, values),) for values in _contributions(side, case.own))


def _cut(scene: Scene, case: Case) -> bool:
    """Return whether all gradients agree without the gradient of one value that both sides have, on both."""
    comparison, other = scene.comparison, OTHER[case.side]
    own, equal = comparison.side(case.side), comparison.found.known(case.side)
    region = scene.region(case.side)
    made, sizes = {o for s in region for o in s.outputs}, {own.shapes[r.value] for r in case.own}
    known = dict.fromkeys(i for s in region for i in s.inputs if i not in made and i in equal)
    both = (
        (_zeros(case.side, own, {i}), _zeros(other, comparison.side(other), {equal[i][0]}))
        for i in known
        if own.shapes[i] in sizes
    )
    return any(applied(comparison, e, scene.group).agrees(scene.group) for e in islice(both, _MOST_TRIALS))


def _zeros(name: str, side: Side, values: Iterable[int]) -> Edit:
    """Return a side without what passes through values: with zeros in their place."""
    return Edit(name, {v: np.zeros(side.shapes[v]) for v in values})


def _contributions(side: Side, reads: Sequence[Read]) -> Iterator[set[int]]:
    """Yield sets of values of the backward pass, each of which may be all that passes through what is read:
    one from the derivative of each step that reads. Values of the step itself come before values of its line.
    After those steps come all steps that do the same in the same line, such as in a loop.
    """
    if not reads:
        return
    lines = dict.fromkeys(r.step.place for r in reads)
    kinds = {(r.step.place, r.step.primitive, r.step.operation) for r in reads}
    sizes = {size(side, r.value) for r in reads}
    alike = [
        s.index
        for s in side.trace.steps
        if s.phase == "forward" and (s.place, s.primitive, s.operation) in kinds
    ]
    made: dict[int, list[int]] = {i: [] for i in alike}
    for step in sorted(side.trace.steps, key=lambda s: (kind(s) in SUMS, -s.index)):
        if step.phase == "backward" and step.place in lines and step.forward is not None and not quiet(step):
            of = min(alike, key=lambda i, at=step.forward: abs(i - at))  # type: ignore[misc]
            values = [o for o in step.outputs if side.prints[o].floating and size(side, o) in sizes]
            made[of] = values + made[of] if step.forward == of else made[of] + values
    for steps in dict.fromkeys((tuple(r.step.index for r in reads), tuple(alike))):
        options = [_given_in_line(side, steps, made, place) for place in lines]
        yield from (set().union(*sets) for sets in islice(product(*filter(None, options)), _MOST_TRIALS))


def _given_in_line(
    side: Side, steps: Iterable[int], made: Mapping[int, list[int]], place: Place | None
) -> list[set[int]]:
    """Return sets with one value of each step of a line."""
    values = [made[i] for i in steps if made[i] and side.trace.steps[i].place == place]
    return [set(v) for v in zip(*values, strict=False)]
