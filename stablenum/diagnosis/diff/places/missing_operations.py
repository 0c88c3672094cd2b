"""Find by trial what only one of two programs does with a value that both have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.flow import OTHER, size
from stablenum.diagnosis.diff.places.frontier import Frontier, Start, same_line
from stablenum.diagnosis.diff.places.patches import Patch, laid_out_like
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["after_call", "lacking"]

# Each trial evaluates the side that lacks an operation once more. Chosen, not measured.
_MOST_TRIALS = 8


def after_call(lacks: Start | None, side: Side, has: Start | None, other: Side) -> Start | None:
    """Return where a side lacks an operation: if the other side has it in the line of a call that returns
    what it reads, and this one has such a call too, then there, rather than at the last line of the call."""
    if lacks is None or has is None or lacks.place is not None or not lacks.missing or lacks.value is None:
        return lacks
    reader = next((s for s in side.trace.steps if lacks.value in s.inputs), None)
    within = [s for s in (_maker(other, i) for i in has.step.inputs) if s is not None]
    if reader is None or not any(_call_of(s, has.step) == has.step.place for s in within):
        return lacks
    made_by = _maker(side, lacks.value)
    return lacks if made_by is None else replace(lacks, place=_call_of(made_by, reader))


def _maker(side: Side, value: int) -> Step | None:
    producer = side.trace.values[value].producer
    return None if producer is None else side.trace.steps[producer]


def _call_of(made_by: Step, reader: Step) -> Place | None:
    """Return the line of the function to which a step belongs that calls the one to which another step
    belongs; None if it does not call it there."""
    depth = len(reader.frames) - 1
    if (
        depth < 0
        or len(made_by.frames) <= len(reader.frames)
        or made_by.frames[:depth] != reader.frames[:depth]
    ):
        return None
    line, own = made_by.frames[depth], reader.frames[depth]
    return line if (line.file, line.function) == (own.file, own.function) else None


class _Trial(NamedTuple):
    """A line of one side that makes a value of another one, which the other side has and goes on with.

    Attributes:
        read, made: the values of the side that has the line.
        same: the value of the side that lacks it, equal to the one that is read.
    """

    read: int
    made: int
    same: int


def lacking(comparison: Comparison, place: Frontier, group: Group) -> tuple[Frontier, Patch] | None:
    """Return the place at which one side lacks what the line of the other one does with a common value: with
    that, the results agree. None if that explains nothing.

    Args:
        comparison: the two programs.
        place: where they part as far as values tell.
        group: the results that differ.
    """
    for has in OTHER if group.kind != "updated" else ():
        start: Start | None = getattr(place, has)
        if start is None or start.missing or quiet(start.step):
            continue
        lacks = comparison.side(OTHER[has])
        trials = list(_trials(comparison, place, has))[:_MOST_TRIALS]
        own = arrays_of(comparison.side(has), {v for t in trials for v in (t.read, t.made)})
        others = arrays_of(lacks, {t.same for t in trials})
        for trial in trials:
            array = laid_out_like(own[trial.made], own[trial.read], others[trial.same])
            producer = lacks.trace.values[trial.same].producer
            if array is None or producer is None:
                continue
            after = comparison.with_values(OTHER[has], {trial.same: array}, until=group)
            if after.agrees(group):
                missing = Start(lacks.trace.steps[producer], missing=True, value=trial.same)
                values = (trial.made, trial.same) if has == "left" else (trial.same, trial.made)
                patch = Patch(*values, OTHER[has], {trial.same: array}, agrees=True, shared=0)
                return _with(place, OTHER[has], missing), patch
    return None


def _with(place: Frontier, side: str, start: Start) -> Frontier:
    return replace(place, left=start) if side == "left" else replace(place, right=start)


def _trials(comparison: Comparison, place: Frontier, has: str) -> Iterator[_Trial]:
    """Yield what the line may make of a value that it reads, the last first."""
    side, other = comparison.side(has), comparison.side(OTHER[has])
    start, region = getattr(place, has), getattr(place, f"region_{has}")
    equal = comparison.found.known(has)
    line = same_line(start, region)
    made = [o for s in reversed(line) for o in s.outputs if not side.neutral(o)]
    for read in (i for i in start.step.inputs if i in equal and not side.neutral(i)):
        for value in (v for v in made if side.shapes[v] == side.shapes[read]):
            for same in sorted(j for j in set(equal[read]) if size(other, j) == size(side, read)):
                yield _Trial(read, value, same)
