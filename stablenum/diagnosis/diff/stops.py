"""Find where only one of two programs ends the flow of gradients: a ``detach``, a ``stop_gradient``, a part
without gradients.

The losses agree then, and the gradients do not. A step at which one side ends the flow is told from the
others by the value that it reads: the other side has an equal one, reads it for the same purpose, and passes
gradients through. Without what passes there, the gradients agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product
from operator import itemgetter
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
from stablenum.diagnosis.replay.values import Place

__all__ = ["Stopped", "stopped"]

_OTHER = {"left": "right", "right": "left"}
_MOST_CASES = 8
_MOST_TRIALS = 9
_MOST_CHOICES = 3
_MOST_PAIRS = 3
_MOST_OF_TWO = 4
_SUMS = {"add", "sub"}
_ROUNDING = {"round", "floor", "ceil", "trunc", "sign"}


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


class _Read(NamedTuple):
    """A value, and a step that computes with it."""

    value: int
    step: Step


@dataclass(frozen=True, slots=True)
class _Case:
    """Steps of one line that end the flow on one side, and what passes it on the other side.

    Attributes:
        side: the side that ends it.
        stop: the first of its steps.
        code: of the cause.
        reads: what the other side reads where gradients pass.
        own: what this side computes with a sum that passes gradients by.
        missing: whether the other side lacks the stop; else both sides round, and one passes gradients by.
    """

    side: str
    stop: Step
    code: str
    reads: tuple[_Read, ...]
    own: tuple[_Read, ...] = ()
    missing: bool = True


def stopped(comparison: Comparison, group: Group, found: Frontier) -> Stopped | None:
    """Return the place from which gradients differ because only one side ends their flow.

    A place at which that was tried and makes more gradients agree comes before others; two places that do so
    together come one after the other.
    """
    cases = [case for side in _OTHER for case in _cases(comparison, side, group)][:_MOST_CASES]
    cases = cases or [case for side in _OTHER for case in _rounded(comparison, side, group)][:1]
    for case in cases:
        after, evidence = _tried(comparison, group, found, case)
        if evidence:
            return _stopped(case, after, evidence)
    return _of_two(comparison, group, cases) or (_stopped(cases[0], None, "") if cases else None)


def _of_two(comparison: Comparison, group: Group, cases: Sequence[_Case]) -> Stopped | None:
    """Return the first of two places without which together all gradients agree."""
    apart = [p for p in combinations(cases, 2) if p[0].stop.place != p[1].stop.place]
    for one, two in apart[:_MOST_PAIRS]:
        sides = _OTHER[one.side], _OTHER[two.side]
        options = (
            list(islice(_contributions(comparison.side(name), case.reads), _MOST_OF_TWO))
            for name, case in zip(sides, (one, two), strict=True)
        )
        for values, others in product(*options):
            first = _without(comparison, {sides[0]: values})
            if _without(first, {sides[1]: others}, group).agrees(group):
                where = "" if two.stop.place is None else f" and at line {two.stop.place.line}"
                return _stopped(one, first, f"Without what passes there{where}, all gradients agree.")
    return None


def _stopped(case: _Case, after: Comparison | None, evidence: str) -> Stopped:
    value, step = case.reads[0]
    here, there = Start(case.stop), Start(step, missing=case.missing, value=value)
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
    "straight_through_missing": "the {stops} program passes the gradient around what it rounds or chooses "
    "here; the {passes} one does not.",
    "accumulation": "the {stops} program passes no gradient on to the parts of the loss that were added "
    "before; the {passes} one does.",
}


# --- candidates ---


def _cases(comparison: Comparison, name: str, group: Group) -> Iterator[_Case]:
    """Yield the lines of a side at which only that side ends the flow, in the order of the program."""
    side, other = _Flow(comparison, name, group), _Flow(comparison, _OTHER[name], group)
    stops = [side.trace.steps[i] for i in sorted(side.stops) if i in side.steps]
    for place in dict.fromkeys(s.place for s in stops):
        here = [s for s in stops if s.place == place]
        passed = [p for s in here for p in _passed_by(side, other, s)]
        if passed:
            own = tuple(r for mine, _ in passed for r in side.read_by([mine]))
            yield _Case(name, here[0], "straight_through_missing", tuple(r for _, r in passed), own)
            continue
        choices = [c for s in here for c in _read(side, other, s)]
        code = "accumulation" if _adds_up(side, here) else "stopped_gradient"
        for k in range(max(map(len, choices), default=0)):
            yield _Case(name, here[0], code, tuple(c[min(k, len(c) - 1)] for c in choices))


def _rounded(comparison: Comparison, name: str, group: Group) -> Iterator[_Case]:
    """Yield what both sides round, if only the other side gives no gradient to some parameters: the
    derivative of rounding is zero, unless it is written otherwise."""
    other = comparison.side(_OTHER[name])
    results = [getattr(p, _OTHER[name]).value for p in group.differing]
    if all(np.any(other.arrays[v]) for v in results):
        return
    side, there = _Flow(comparison, name, group), _Flow(comparison, _OTHER[name], group)
    for step in (there.trace.steps[i] for i in sorted(there.steps)):
        same = there.equals(step.outputs[0]) if kind(step) in _ROUNDING else []
        makers = [m for m in (_maker(side, v) for v in same) if m is not None and m.index in side.steps]
        if makers and other.trained[step.outputs[0]]:
            read = _Read(step.outputs[0], step)
            own = tuple(side.read_by([makers[0].outputs[0]]))
            yield _Case(name, makers[0], "straight_through_missing", (read,), own, missing=False)


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

    def read_by(self, values: Iterable[int]) -> list[_Read]:
        """Return what computes with values, past the steps that only move them."""
        todo, found, seen = [(v, v) for v in values], list[_Read](), set[int]()
        while todo:
            first, value = todo.pop(0)
            for step in self.readers.get(value, ()):
                if step.index in seen or step.index in self.stops:
                    continue
                seen.add(step.index)
                if quiet(step):
                    todo += [(first, o) for o in step.outputs]
                else:
                    found.append(_Read(first, step))
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


def _read(side: _Flow, other: _Flow, stop: Step) -> Iterator[list[_Read]]:
    """Yield, for each value whose gradient ends at a stop, what the other side may read in its place where
    gradients pass, the most likely first."""
    ended = other.stopped_values()
    for value in stop.inputs:
        same = side.equals(value)
        if side.side.neutral(value) or not same or ended.intersection(same):
            continue
        ranked = {
            (_unlike(side, mine, read.step), read.step.index): read
            for mine in _users(side, stop)
            for read in other.read_by(same)
            if read.step.index in other.live
        }
        first = {
            read.step.index: read for key, read in sorted(ranked.items(), key=itemgetter(0)) if key[0] < 2
        }
        if first:
            yield list(first.values())[:_MOST_CHOICES]


def _unlike(side: _Flow, mine: Step, theirs: Step) -> int:
    """Return 0 for steps that give the same, 1 for those that compute the same, 2 for others."""
    if any(set(side.equals(o)).intersection(theirs.outputs) for o in mine.outputs):
        return 0
    return 1 if kind(mine) == kind(theirs) or functions_of(mine) & functions_of(theirs) else 2


def _passed_by(side: _Flow, other: _Flow, stop: Step) -> Iterator[tuple[int, _Read]]:
    """Yield a sum that only passes gradients by, such as ``z + stop_gradient(q - z)``, which equals q, and
    what the other side has in its place, with the step that made it."""
    for step in _users(side, stop) if quiet(stop) else ():
        same = side.equals(step.outputs[0])
        if kind(step) not in _SUMS or not same:
            continue
        before = {i for j in same for i in other.equals(j) if i < stop.outputs[0]}
        straight = {o for s in other.stops for u in _users(other, other.trace.steps[s]) for o in u.outputs}
        maker = _maker(other, min(same))
        if before and maker is not None and not straight.intersection(same):
            yield step.outputs[0], _Read(min(same), maker)


def _maker(side: _Flow, value: int) -> Step | None:
    """Return the step that computed a value, past those that only moved it if there is one."""
    producer, first = side.trace.values[value].producer, None
    while producer is not None:
        step = side.trace.steps[producer]
        first = first or step
        if not quiet(step) or not step.inputs:
            return step
        producer = side.trace.values[step.inputs[0]].producer
    return first


def _adds_up(side: _Flow, stops: list[Step]) -> bool:
    """Return whether what is stopped is a part of the loss, to which others are added."""
    scalars = all(_size(side.side, s.inputs[0]) == 1 for s in stops if s.inputs)
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
    for values in _contributions(comparison.side(name), case.reads):
        after = _without(comparison, {name: values}, group)
        left = {p.right.name for p in _same(after, group).differing}
        if left < before:
            told = "all gradients agree" if not left else f"{len(before) - len(left)} more gradients agree"
            return _without(comparison, {name: values}), f"Without what passes there, {told}."
    return None, ""


def _cut(comparison: Comparison, group: Group, found: Frontier, case: _Case) -> str:
    """Leave out the gradient that only one side passes by: on both sides if both have it. Return what that
    shows; nothing if gradients differ without it too."""
    own, other = comparison.side(case.side), _OTHER[case.side]
    equal = comparison.found.left if case.side == "left" else comparison.found.right
    region = found.region_left if case.side == "left" else found.region_right
    made, sizes = {o for s in region for o in s.outputs}, {own.shapes[r.value] for r in case.own}
    known = dict.fromkeys(i for s in region for i in s.inputs if i not in made and i in equal)
    both = [{case.side: {i}, other: {equal[i][0]}} for i in known if own.shapes[i] in sizes]
    alone = [{case.side: values} for values in _contributions(own, case.own)]
    for values in [*both[:_MOST_TRIALS], *alone]:
        if _without(comparison, values, group).agrees(group):
            return "Without the gradient of what follows here, all gradients agree."
    return ""


def _without(
    comparison: Comparison, values: Mapping[str, set[int]], until: Group | None = None
) -> Comparison:
    """Return the comparison with zeros in place of values of the sides."""
    for name, wanted in values.items():
        shapes = comparison.side(name).shapes
        comparison = comparison.with_values(name, {v: np.zeros(shapes[v]) for v in wanted}, until)
    return comparison


def _same(after: Comparison, group: Group) -> Group:
    return next(g for g in after.groups if (g.kind, g.step) == (group.kind, group.step))


def _contributions(side: Side, reads: Sequence[_Read]) -> Iterator[set[int]]:
    """Yield sets of values of the backward pass, each of which may be all that passes through what is read:
    of the derivative of each step that reads, one. Those of the step itself come before those of its line.
    After those steps, all are taken that do the same in the same line, such as those of a loop.
    """
    if not reads:
        return
    lines = dict.fromkeys(r.step.place for r in reads)
    kinds = {(r.step.place, r.step.primitive, r.step.operation) for r in reads}
    sizes = {_size(side, r.value) for r in reads}
    alike = [
        s.index
        for s in side.trace.steps
        if s.phase == "forward" and (s.place, s.primitive, s.operation) in kinds
    ]
    made: dict[int, list[int]] = {i: [] for i in alike}
    for step in sorted(side.trace.steps, key=lambda s: (kind(s) in _SUMS, -s.index)):
        if step.phase == "backward" and step.place in lines and step.forward is not None and not quiet(step):
            of = min(alike, key=lambda i, at=step.forward: abs(i - at))  # type: ignore[misc]
            values = [o for o in step.outputs if _size(side, o) in sizes]
            made[of] = values + made[of] if step.forward == of else made[of] + values
    for steps in dict.fromkeys((tuple(r.step.index for r in reads), tuple(alike))):
        options = [_in_line(side, steps, made, place) for place in lines]
        yield from (set().union(*sets) for sets in islice(product(*filter(None, options)), _MOST_TRIALS))


def _in_line(
    side: Side, steps: Iterable[int], made: Mapping[int, list[int]], place: Place | None
) -> list[set[int]]:
    """Return sets with one value of each step of a line."""
    values = [made[i] for i in steps if made[i] and side.trace.steps[i].place == place]
    return [set(v) for v in zip(*values, strict=False)]


def _size(side: Side, value: int) -> int:
    return int(np.prod(side.shapes[value], dtype=int))
