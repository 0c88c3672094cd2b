"""Find where only one of two programs ends the flow of gradients: a ``detach``, a ``stop_gradient``, a part
without gradients.

The losses agree then, and the gradients do not. A step at which one side ends the flow is told from the
others by the value that it reads: the other side has an equal one, reads it for the same purpose, and passes
gradients through. Without what passes there, the gradients agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stablenum.diagnosis.diff.comparison import Comparison
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.frontier import Frontier, Start
from stablenum.diagnosis.diff.kinds import functions_of, kind, quiet
from stablenum.diagnosis.diff.remedies import REMEDIES
from stablenum.diagnosis.diff.results import Group
from stablenum.diagnosis.diff.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Stopped", "stopped"]

_OTHER = {"left": "right", "right": "left"}
_MOST_PLACES = 8
_MOST_TRIALS = 8
_SUMS = {"add", "sub"}


class Stopped(NamedTuple):
    """A place at which only one side ends the flow of gradients.

    Attributes:
        left, right: the step that ends it, and the step that reads the same value on the other side.
        cause: what is said of it.
        after: the comparison without what passes on the other side; None if that is not known.
    """

    left: Start
    right: Start
    cause: Cause
    after: Comparison | None


@dataclass(frozen=True, slots=True)
class _Case:
    """Steps of one line that end the flow on one side, and the steps that pass it on the other side.

    Attributes:
        side: the side that ends it.
        stop: the first of its steps.
        code: of the cause.
        reads: the value that is read on the other side, and the step that reads it.
    """

    side: str
    stop: Step
    code: str
    reads: tuple[tuple[int, Step], ...]


def stopped(comparison: Comparison, group: Group, found: Frontier) -> Stopped | None:
    """Return the place from which gradients differ because only one side ends their flow.

    A place at which that was tried and makes more gradients agree comes before others.
    """
    cases = [case for side in _OTHER for case in _cases(comparison, side, group)][:_MOST_PLACES]
    likely: Stopped | None = None
    for case in cases:
        after, evidence = _tried(comparison, group, found, case)
        this = _stopped(case, after, evidence)
        if evidence:
            return this
        likely = likely or this
    return likely


def _stopped(case: _Case, after: Comparison | None, evidence: str) -> Stopped:
    value, step = case.reads[0]
    here, there = Start(case.stop), Start(step, missing=True, value=value)
    cause = Cause(
        code=case.code,
        sentence=_SENTENCES[case.code].format(stops=case.side, passes=_OTHER[case.side]),
        evidence=evidence,
        remedy=REMEDIES[case.code],
        confirmed=bool(evidence),
    )
    return Stopped(*((here, there) if case.side == "left" else (there, here)), cause, after)


_SENTENCES = {
    "stopped_gradient": "the {stops} program passes no gradient on here; the {passes} one does.",
    "straight_through_missing": "the {stops} program passes the gradient by what it rounds or chooses here; "
    "the {passes} one passes it through.",
    "accumulation": "the {stops} program passes no gradient on to the parts of the loss that were added "
    "before; the {passes} one does.",
}


# --- candidates ---


def _cases(comparison: Comparison, name: str, group: Group) -> Iterator[_Case]:
    """Yield the lines of a side at which only that side ends the flow, in the order of the program."""
    side, other = _Flow(comparison, name, group), _Flow(comparison, _OTHER[name], group)
    stops = [side.trace.steps[i] for i in sorted(side.stops)]
    places = {s.place: s for s in reversed([s for s in stops if s.place is not None])}
    for place, first in sorted(places.items(), key=lambda item: item[1].index):
        here = [s for s in stops if s.place == place]
        passed = [r for s in here for r in _passed_by(side, other, s)]
        if passed:
            yield _Case(name, first, "straight_through_missing", tuple(passed))
            continue
        read = [r for s in here for r in _read(side, other, s)]
        if read:
            code = "accumulation" if _adds_up(side, here) else "stopped_gradient"
            yield _Case(name, first, code, tuple(read))


class _Flow:
    """The forward pass of a side up to the loss, and where it ends the flow of gradients."""

    def __init__(self, comparison: Comparison, name: str, group: Group) -> None:
        own: Side = comparison.side(name)
        self.side, self.trace, self.stops = own, own.trace, own.play.stops
        self.equal = comparison.found.left if name == "left" else comparison.found.right
        losses = [r.value for r in own.play.results if (r.kind, r.step) == ("loss", group.step)]
        self.steps, live = set[int](), set[int]()
        _reached(own, losses, self.steps, frozenset())
        _reached(own, losses, live, self.stops)
        self.live = live
        self.readers: dict[int, list[Step]] = {}
        for index in sorted(self.steps):
            for value in own.trace.steps[index].inputs:
                self.readers.setdefault(value, []).append(own.trace.steps[index])

    def read_by(self, values: Iterable[int]) -> list[tuple[int, Step]]:
        """Return the steps that compute with values, past those that only move them, and which they read."""
        todo, found, seen = [(v, v) for v in values], list[tuple[int, Step]](), set[int]()
        while todo:
            first, value = todo.pop(0)
            for step in self.readers.get(value, ()):
                if step.index in seen or step.index in self.stops:
                    continue
                seen.add(step.index)
                if quiet(step):
                    todo += [(first, o) for o in step.outputs]
                else:
                    found.append((first, step))
        return found

    def equals(self, value: int) -> list[int]:
        """Return the values of the other side's forward pass that are equal to one of this side."""
        return list(self.equal.get(value, ()))

    def stopped_values(self) -> set[int]:
        """Return the values at which the flow ends."""
        return {i for s in self.stops if s in self.steps for i in self.trace.steps[s].inputs}


def _reached(side: Side, values: Iterable[int], steps: set[int], without: frozenset[int]) -> None:
    """Add the steps from which values are computed, without going past some."""
    todo = list(values)
    while todo:
        producer = side.trace.values[todo.pop()].producer
        if producer is None or producer in steps or producer in without:
            continue
        steps.add(producer)
        todo += side.trace.steps[producer].inputs


def _users(side: _Flow, stop: Step) -> list[Step]:
    """Return the steps that compute with what a stop gives: itself if it computes."""
    if not quiet(stop):
        return [stop] if stop.index in side.steps else []
    return [step for _, step in side.read_by(stop.outputs)]


def _read(side: _Flow, other: _Flow, stop: Step) -> list[tuple[int, Step]]:
    """Return what the other side reads, and passes gradients through, where this side stops them."""
    found = []
    ended = other.stopped_values()
    for value in stop.inputs:
        same = side.equals(value)
        if side.side.neutral(value) or not same or ended.intersection(same):
            continue
        ranked = [
            (_unlike(side, mine, theirs), theirs.index, v, theirs)
            for mine in _users(side, stop)
            for v, theirs in other.read_by(same)
            if theirs.index in other.live
        ]
        best = min((r[:2] for r in ranked), default=None)
        if best is not None and best[0] < 2:
            found += [(v, step) for rank, index, v, step in ranked if (rank, index) == best][:1]
    return found


def _unlike(side: _Flow, mine: Step, theirs: Step) -> int:
    """Return 0 for steps that give the same, 1 for those that compute the same, 2 for others."""
    if any(set(side.equals(o)).intersection(theirs.outputs) for o in mine.outputs):
        return 0
    return 1 if kind(mine) == kind(theirs) or functions_of(mine) & functions_of(theirs) else 2


def _passed_by(side: _Flow, other: _Flow, stop: Step) -> list[tuple[int, Step]]:
    """Return the value of the other side that takes the place of a sum which only passes gradients by:
    ``z + stop_gradient(q - z)``, equal to q."""
    for step in _users(side, stop):
        if kind(step) not in _SUMS or not quiet(stop):
            continue
        same = side.equals(step.outputs[0])
        twins = {i for j in same for i in other.equals(j) if i < step.outputs[0]} - set(step.inputs)
        straight = {o for s in other.stops for u in _users(other, other.trace.steps[s]) for o in u.outputs}
        if not same or straight.intersection(same) or not _before(side, stop, twins | set(stop.inputs), same):
            continue
        first = min(same)
        maker = _maker(other, first)
        if maker is not None:
            return [(first, maker)]
    return []


def _before(side: _Flow, stop: Step, values: set[int], same: list[int]) -> bool:
    """Return whether one of some values was there before a stop and equals what follows it."""
    return any(set(side.equals(v)).intersection(same) for v in values if v < stop.outputs[0])


def _maker(side: _Flow, value: int) -> Step | None:
    """Return the step that computed a value, past those that only moved it."""
    producer = side.trace.values[value].producer
    while producer is not None:
        step = side.trace.steps[producer]
        if not quiet(step) or not step.inputs:
            return step
        producer = side.trace.values[step.inputs[0]].producer
    return None


def _adds_up(side: _Flow, stops: list[Step]) -> bool:
    """Return whether what is stopped is a part of the loss, to which others are added."""
    scalars = all(np.prod(side.side.shapes[s.inputs[0]], dtype=int) == 1 for s in stops if s.inputs)
    return scalars and all(kind(u) == "add" for s in stops for u in _users(side, s))


# --- trials ---


def _tried(
    comparison: Comparison, group: Group, found: Frontier, case: _Case
) -> tuple[Comparison | None, str]:
    """Return the comparison in which what passes on the other side is left out, and what that shows; nothing
    if no more gradients agree then."""
    if case.code == "straight_through_missing":
        return None, _cut(comparison, group, found, case)
    before = {p.right.name for p in group.differing}
    name = _OTHER[case.side]
    for values in _contributions(comparison.side(name), case):
        zeros = {v: np.zeros(comparison.side(name).shapes[v]) for v in values}
        after = comparison.with_values(name, zeros, until=group)
        left = {p.right.name for p in _same(after, group).differing}
        if left < before:
            told = "all gradients agree" if not left else f"{len(before) - len(left)} more gradients agree"
            return comparison.with_values(name, zeros), f"Without what passes there, {told}."
    return None, ""


def _same(comparison: Comparison, group: Group) -> Group:
    return next(g for g in comparison.groups if (g.kind, g.step) == (group.kind, group.step))


def _contributions(side: Side, case: _Case) -> Iterator[set[int]]:
    """Yield sets of values of the backward pass, each of which may be all that passes on a side: of each
    derivative of the line that reads the values, one."""
    lines = [
        [s for s in side.trace.steps if s.phase == "backward" and s.place == step.place and s.where == where]
        for step, where in {(s.place, s.where): (s, s.where) for _, s in case.reads}.values()
    ]
    sizes = {int(np.prod(side.shapes[v], dtype=int)) for v, _ in case.reads}
    per_line = [
        [o for s in steps for o in s.outputs if int(np.prod(side.shapes[o], dtype=int)) in sizes][::-1]
        for steps in lines
    ]
    for values in list(zip(*per_line, strict=False))[:_MOST_TRIALS]:
        yield set(values)


def _cut(comparison: Comparison, group: Group, found: Frontier, case: _Case) -> str:
    """Leave out, on both sides, a gradient that both have and that only one passes on. Return what that
    shows; nothing if gradients differ without it too."""
    size = int(np.prod(comparison.side(_OTHER[case.side]).shapes[case.reads[0][0]], dtype=int))
    region = found.region_left if case.side == "left" else found.region_right
    own = comparison.side(case.side)
    equal = comparison.found.left if case.side == "left" else comparison.found.right
    made = {o for s in region for o in s.outputs}
    read = dict.fromkeys(i for s in region for i in s.inputs if i not in made and i in equal)
    for value in [i for i in read if int(np.prod(own.shapes[i], dtype=int)) == size][:_MOST_TRIALS]:
        after = comparison.with_values(case.side, {value: np.zeros(own.shapes[value])})
        for other in equal[value][:1]:
            shape = comparison.side(_OTHER[case.side]).shapes[other]
            after = after.with_values(_OTHER[case.side], {other: np.zeros(shape)})
        if after.agrees(group):
            return "Without the gradient of what follows here, all gradients agree."
    return ""
