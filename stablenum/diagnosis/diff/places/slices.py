"""The operations of one side that lead from given values to one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step, Trace

__all__ = ["Slice", "given_at", "sliced"]

# A script that reproduces a difference has so many operations at most, which is a page to read; what comes
# before them is read from a file. Chosen, not measured.
_MOST_STEPS = 48


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a program.

    Attributes:
        end: the value that it computes.
        steps: the operations, in order.
        reads: the values from which they begin.
        cut: those of them that are given only because there would be too many operations.
        unwritten: the operations that cannot be written as code; what they give is read.
    """

    end: int
    steps: tuple[Step, ...]
    reads: tuple[int, ...]
    cut: frozenset[int] = frozenset()
    unwritten: tuple[Step, ...] = ()

    def holds(self, start: Start | None) -> bool:
        """Return whether the place where a side begins to differ lies in it, as far as the side has one."""
        return start is None or start.missing or any(s.index == start.step.index for s in self.steps)

    def without(self, trace: Trace, code: Mapping[int, str]) -> Slice:
        """Return the slice that starts again at the operations that have no code."""
        bad = tuple(s for s in self.steps if s.index not in code)
        if not bad:
            return self
        results = {o for s in bad for o in s.outputs}
        stops = results | set(self.reads)
        found = sliced(trace, self.end, lambda value: value in stops)
        kept = tuple(s for s in bad if set(s.outputs).intersection(found.reads))
        return Slice(self.end, found.steps, found.reads, self.cut.intersection(found.reads), kept)


def sliced(trace: Trace, end: int, given: Callable[[int], bool]) -> Slice:
    """Return the operations that lead to a value from those that are given, or from outside."""
    todo, steps, reads, cut = {end}, list[Step](), set[int](), set[int]()
    while todo:
        value = max(todo, key=lambda v: (_made(trace, v), v))
        todo.remove(value)
        producer = trace.values[value].producer
        if producer is None or given(value):
            reads.add(value)
        elif len(steps) >= _MOST_STEPS:
            reads.add(value)
            cut.add(value)
        else:
            step = trace.steps[producer]
            steps.append(step)
            todo.difference_update(step.outputs)
            todo.update(step.inputs)
    return Slice(end, tuple(sorted(steps, key=lambda s: s.index)), tuple(sorted(reads)), frozenset(cut))


def _made(trace: Trace, value: int) -> int:
    producer = trace.values[value].producer
    return -1 if producer is None else producer


def given_at(
    side: Side, start: Start | None, shared: Mapping[int, object], since: int
) -> Callable[[int], bool]:
    """Return whether a value of a side is one from which a part of it may begin: the other side has it too,
    and it does not come from where the sides begin to differ; or earlier results, which agree, follow it."""
    after = set[int]() if start is None or start.missing else _following(side.trace.steps, start.step)

    def given(value: int) -> bool:
        made = _made(side.trace, value)
        return (value in shared and value not in after) or (made <= since and side.depends[value])

    return given


def _following(steps: Iterable[Step], first: Step) -> set[int]:
    """Return the values that follow from a step."""
    found = set(first.outputs)
    for step in steps:
        if step.index > first.index and found.intersection(step.inputs):
            found.update(step.outputs)
    return found
