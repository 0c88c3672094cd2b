"""Find the lines at which only one of two programs may end the flow of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.flow import OTHER, Flow, Read, maker, size
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.equality import SAME_ENTRIES
from stablenum.diagnosis.diff.sides.fingerprints import distance
from stablenum.diagnosis.diff.sides.kinds import functions_of, kind, quiet
from stablenum.diagnosis.replay.trace import Step

__all__ = ["SUMS", "Case", "cases_of"]

# Each line that may end the flow, and each value that the other side may read in its place, takes
# evaluations. Chosen, not measured.
_MOST_CASES, _MOST_CHOICES = 8, 3
# The sums after a stop: ``stop(q) - stop(z) + z`` has two. Chosen, not measured.
_MOST_SUMS = 2
_UNLIKE = 3  # of steps that do nothing alike, in a row of 0 to 3
SUMS = {"add", "sub"}
# A sum of products is also a product of matrices.
_PRODUCTS = {"matmul", "mul"}
_ROUNDING = {"round", "floor", "ceil", "trunc", "sign"}


@dataclass(frozen=True, slots=True)
class Case:
    """Steps of one line that end the flow on one side, and what passes it on the other side.

    Attributes:
        side: the side that ends it.
        stop: the last of its steps, at which the backward pass comes first.
        code: of the cause.
        reads: what the other side reads where gradients pass.
        own: what this side computes with a sum that passes gradients by.
        missing: whether the other side lacks the stop; else both sides round, and one passes gradients by.
    """

    side: str
    stop: Step
    code: str
    reads: tuple[Read, ...]
    own: tuple[Read, ...] = ()
    missing: bool = True


def cases_of(comparison: Comparison, group: Group) -> list[Case]:
    """Return the lines at which only one side ends the flow; without such, what only one side rounds
    without a gradient."""
    found = [case for side in OTHER for case in _cases(comparison, side, group)][:_MOST_CASES]
    return found or [case for side in OTHER for case in _rounded(comparison, side, group)][:1]


def _cases(comparison: Comparison, name: str, group: Group) -> Iterator[Case]:
    """Yield the lines of a side at which only that side ends the flow, in the order of the program."""
    side, other = Flow(comparison, name, group), Flow(comparison, OTHER[name], group)
    stops = [side.trace.steps[i] for i in sorted(side.stops) if i in side.steps]
    for place in dict.fromkeys(s.place for s in stops):
        here = [s for s in stops if s.place == place]
        passed = [p for s in here for p in _passed_by(side, other, s)]
        if passed:
            own = tuple(r for mine, _ in passed for r in side.read_by([mine]))
            yield Case(name, here[-1], "straight_through_missing", tuple(r for _, r in passed), own)
            continue
        choices = [c for s in here for c in _read(side, other, s)]
        code = "accumulation" if _adds_up(side, here) else "stopped_gradient"
        for k in range(max(map(len, choices), default=0)):
            yield Case(name, here[-1], code, tuple(c[min(k, len(c) - 1)] for c in choices))


def _rounded(comparison: Comparison, name: str, group: Group) -> Iterator[Case]:
    """Yield what both sides round, if only the other side gives no gradient to some parameters: the
    derivative of rounding is zero, unless it is written otherwise."""
    other = comparison.side(OTHER[name])
    results = [getattr(p, OTHER[name]).value for p in group.differing]
    if all(np.any(other.arrays[v]) for v in results):
        return
    side, there = Flow(comparison, name, group), Flow(comparison, OTHER[name], group)
    for step in (there.trace.steps[i] for i in sorted(there.steps)):
        same = there.equals(step.outputs[0]) if kind(step) in _ROUNDING else []
        makers = [m for m in (maker(side, v) for v in same) if m is not None and m.index in side.steps]
        if makers and other.trained[step.outputs[0]]:
            read = Read(step.outputs[0], step)
            own = tuple(side.read_by([makers[0].outputs[0]]))
            yield Case(name, makers[0], "straight_through_missing", (read,), own, missing=False)


def _users(side: Flow, stop: Step) -> list[Step]:
    """Return the steps that compute with what a stop gives: itself if it computes."""
    if not quiet(stop):
        return [stop] if stop.index in side.steps else []
    return [step for _, step in side.read_by(stop.outputs)]


def _read(side: Flow, other: Flow, stop: Step) -> Iterator[list[Read]]:
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
            if read.step.index in other.live and read.value in other.fed
        }
        most = max(1, min((key[0] for key in ranked), default=_UNLIKE))
        first = {
            read.step.index: read
            for key, read in sorted(ranked.items(), key=itemgetter(0))
            if key[0] <= most < _UNLIKE
        }
        if first:
            yield list(first.values())[:_MOST_CHOICES]


def _unlike(side: Flow, mine: Step, theirs: Step) -> int:
    """Return 0 for steps that give the same, 1 for those that compute the same, 2 for products of numbers or
    of matrices, and 3 for others."""
    if any(set(side.equals(o)).intersection(theirs.outputs) for o in mine.outputs):
        return 0
    if kind(mine) == kind(theirs) or functions_of(mine) & functions_of(theirs):
        return 1
    return 2 if {kind(mine), kind(theirs)} <= _PRODUCTS else _UNLIKE


def _passed_by(side: Flow, other: Flow, stop: Step) -> Iterator[tuple[int, Read]]:
    """Yield a sum that only passes gradients by, such as ``z + stop_gradient(q - z)``, which equals q, and
    what the other side has in its place, with the step that made it."""
    straight = {o for s in other.stops for u in _sums(other, other.trace.steps[s]) for o in u.outputs}
    for step in _sums(side, stop):
        same = _same(side, other, step.outputs[0])
        before = {i for j in same for i in _same(other, side, j) if i < stop.outputs[0]}
        made_by = maker(other, min(same)) if same else None
        if before and made_by is not None and not straight.intersection(same):
            yield step.outputs[0], Read(min(same), made_by)


def _sums(side: Flow, stop: Step) -> Iterator[Step]:
    """Yield the sums that follow from a stop that only moves a value, one after the other."""
    todo = _users(side, stop) if quiet(stop) else []
    for _ in range(_MOST_SUMS):
        todo = [s for s in todo if kind(s) in SUMS]
        yield from todo
        todo = [r.step for s in todo for r in side.read_by(s.outputs)]


def _same(side: Flow, other: Flow, value: int) -> list[int]:
    """Return the values of the other side's forward pass that are equal to one: also those that say nothing
    about agreement, such as choices of 0 and 1, if no other value is equal to it."""
    mark = side.side.prints[value]
    return side.equals(value) or [
        o
        for i in sorted(other.steps if mark.simple else ())
        for o in other.trace.steps[i].outputs
        if size(other.side, o) == size(side.side, value)
        and distance(other.side.prints[o], mark) <= SAME_ENTRIES
    ]


def _adds_up(side: Flow, stops: list[Step]) -> bool:
    """Return whether what is stopped is a part of the loss, to which others are added."""
    scalars = all(size(side.side, s.inputs[0]) == 1 for s in stops if s.inputs)
    return scalars and all(kind(u) == "add" for s in stops for u in _users(side, s))
