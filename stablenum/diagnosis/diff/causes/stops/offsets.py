"""Find a number that only one of two programs adds to its loss: only the losses differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, applied, judged
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.causes.stops.stopped import Stopped
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.flow import OTHER, Flow
from stablenum.diagnosis.diff.places.frontier import Frontier, Start
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.equality import SAME_ENTRIES
from stablenum.diagnosis.diff.sides.kinds import kind
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["offset"]

_SUMS = {"add", "sub"}
# Each number is tried by an evaluation without it. Chosen, not measured.
_MOST_TRIALS = 8
_DIGITS = 9  # as many as SAME_ENTRIES compares


def offset(comparison: Comparison, group: Group, found: Frontier) -> Stopped | None:
    """Return the line that adds a number to a loss, without which the losses agree; None if there is none.

    Args:
        comparison: the two programs.
        group: the losses, which differ.
        found: where the sides part as far as values tell.
    """
    following = [g for g in comparison.groups if (g.kind, g.step) == ("gradient", group.step)]
    if group.kind != "loss" or not following or any(g.differing for g in following):
        return None
    scene = Scene(comparison, found, group)
    for name in OTHER:
        for number, steps in list(_added(comparison, name, group))[:_MOST_TRIALS]:
            trial = _without(comparison, name, steps)
            code = "missing_operation" if name == "left" else "extra_operation"
            sentence = f"only the {name} program adds {number:g} here; all gradients agree."
            proposal = Proposal(code, sentence, [trial], "Without it", by_results=True)
            verdict = judged(scene, "", [proposal])
            if verdict.confirmed:
                after = applied(comparison, trial)
                return _placed(comparison, after, group, found, (name, steps[0]), verdict.confirmed[0])
    return None


def _added(comparison: Comparison, name: str, group: Group) -> Iterator[tuple[float, list[Step]]]:
    """Yield each number that a side adds on the way to its loss, with the steps that add it."""
    flow, side = Flow(comparison, name, group), comparison.side(name)
    steps = [side.trace.steps[i] for i in sorted(flow.steps) if kind(side.trace.steps[i]) in _SUMS]
    telling = [s for s in steps if len(_depending(side, s)) == 1 and side.depends[s.outputs[0]]]
    arrays = arrays_of(side, {v for s in telling for v in (_depending(side, s)[0], s.outputs[0])})
    found: dict[float, list[Step]] = {}
    for step in telling:
        read, made = arrays[_depending(side, step)[0]], arrays[step.outputs[0]]
        number = _difference(made, read)
        if number is not None:
            found.setdefault(round(number, _DIGITS), []).append(step)
    yield from found.items()


def _depending(side: Side, step: Step) -> list[int]:
    return [i for i in step.inputs if side.depends[i]]


def _difference(made: Any, read: Any) -> float | None:
    """Return the number by which all entries differ; None if they differ by several, or by none."""
    if made.shape != read.shape or not made.size or made.dtype.kind != "f":
        return None
    if not (np.isfinite(made).all() and np.isfinite(read).all()):
        return None
    gap = made - read
    number = float(np.median(gap))
    scale = float(np.abs(read).max()) + abs(number)
    return number if number and float(np.abs(gap - number).max()) <= SAME_ENTRIES * scale else None


def _without(comparison: Comparison, name: str, steps: Sequence[Step]) -> tuple[Edit, ...]:
    edits = list[Edit]()
    for step in steps:
        side = comparison.side(name)
        read = _depending(side, step)[0]
        edits.append(Edit(name, {step.outputs[0]: arrays_of(side, [read])[read]}))
        comparison = applied(comparison, edits[-1:])
    return tuple(edits)


def _placed(
    comparison: Comparison,
    after: Comparison,
    group: Group,
    found: Frontier,
    added: tuple[str, Step],
    cause: Cause,
) -> Stopped:
    """Return the place: on the other side, what makes the first value that is common without the number."""
    name, step = added
    other = comparison.side(OTHER[name])
    there: Start | None = getattr(found, OTHER[name])
    before, now = comparison.found.known(name), after.found.known(name)
    for value in _following(Flow(comparison, name, group), step):
        new = [j for j in now.get(value, ()) if j not in before.get(value, ())]
        producer = other.trace.values[min(new)].producer if new else None
        if producer is not None:
            there = Start(other.trace.steps[producer], missing=True, value=min(new))
            break
    starts = {name: Start(step), OTHER[name]: there}
    return Stopped(starts["left"], starts["right"], cause, after)


def _following(flow: Flow, step: Step) -> Iterator[int]:
    """Yield what follows from a step, in the order of the program."""
    made = set(step.outputs)
    for index in sorted(i for i in flow.steps if i > step.index):
        if made.intersection(flow.trace.steps[index].inputs):
            made.update(flow.trace.steps[index].outputs)
            yield from flow.trace.steps[index].outputs
