"""Find the first operation that differs: all that it reads is shared, and what it gives never is again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from stablenum.diagnosis.diff.matching import Matching
from stablenum.diagnosis.diff.sides import Side
from stablenum.diagnosis.replay.operations import MOVING, SELECTING
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Frontier", "Start", "frontier", "kind", "last_of_line", "same_line"]

_PLAIN = {"add", "sub", "mul", "div", "where", "cast", "sum"}
# A line in a loop runs again after so many steps.
_NEAR = 60
_QUIET = (MOVING - SELECTING) | {"cast", "to"}


@dataclass(frozen=True, slots=True)
class Start:
    """Where one side begins to differ.

    Attributes:
        step: the first operation that differs, or, if ``missing``, the one after which it is missing.
        missing: whether this side lacks the operation that the other side has.
    """

    step: Step
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where two programs part.

    Attributes:
        left, right: where each side begins to differ; None where nothing of it leads to the difference.
        region_left, region_right: all operations from there to the values that differ.
    """

    left: Start | None
    right: Start | None
    region_left: tuple[Step, ...]
    region_right: tuple[Step, ...]


def frontier(
    left: Side, right: Side, found: Matching, differing: Iterable[tuple[int, int]], since: tuple[int, int]
) -> Frontier:
    """Return where the results that differ begin to differ.

    Args:
        left, right: the sides.
        found: the values that they share.
        differing: pairs of results that are not equal.
        since: for each side, the step up to which everything is taken as equal, because the results that
            follow from it are.
    """
    pairs = list(differing)
    a = _Region(left, found.left, [i for i, _ in pairs], since[0])
    b = _Region(right, found.right, [j for _, j in pairs], since[1])
    here, there, shared = _paired(found, a, b)
    if here is None or there is None or not shared:
        first = None if here is None else Start(here)
        second = None if there is None else Start(there)
    else:
        first, second = _compared(a, b, here, there)
    return Frontier(first, second, tuple(a.steps), tuple(b.steps))


class _Region:
    """The steps of one side on the way to results that differ, back to values that are shared, in order."""

    def __init__(self, side: Side, known: Collection[int], results: Iterable[int], since: int) -> None:
        self.side = side
        trace, seen, todo = side.trace, set[int](), list(results)
        while todo:
            producer = trace.values[todo.pop()].producer
            if producer is None or producer in seen or producer <= since:
                continue
            step = trace.steps[producer]
            seen.add(producer)
            todo += [i for i in step.inputs if i not in known and not side.neutral(i)]
        self.steps = [trace.steps[i] for i in sorted(seen)]
        self.readers: dict[int, list[Step]] = {}
        for step in self.steps:
            for value in step.inputs:
                self.readers.setdefault(value, []).append(step)

    def starts(self) -> list[Step]:
        """Return the steps that read nothing from the region."""
        made = {o for s in self.steps for o in s.outputs}
        return [s for s in self.steps if not made.intersection(s.inputs)]

    def next_to(self, step: Step) -> set[str]:
        """Return the functions that compute with what the function that a step belongs to gives."""
        todo, found, seen = list(step.outputs), set[str](), set[int]()
        while todo:
            for reader in self.readers.get(todo.pop(), ()):
                if reader.index in seen:
                    continue
                seen.add(reader.index)
                if kind(reader) in _QUIET or reader.operation == step.operation:
                    todo += reader.outputs
                else:
                    found.add(_called(reader))
        return found

    def producer(self, value: int) -> Step | None:
        """Return the step that computed a value, past those that moved it."""
        trace = self.side.trace
        while True:
            producer = trace.values[value].producer
            if producer is None:
                return None
            step = trace.steps[producer]
            if kind(step) not in _QUIET or not step.inputs:
                return step
            value = step.inputs[0]


def kind(step: Step) -> str:
    """Return the name of what a step computes, the same in both frameworks."""
    name = step.operation if step.primitive.startswith("aten.") else step.primitive
    return {"pow": "square", "integer_pow": "square", "amax": "max", "logistic": "sigmoid"}.get(name, name)


def _called(step: Step) -> str:
    """Return the function that the user called, the same in both frameworks."""
    return {"masked_fill": "where", "integer_pow": "pow", "square": "pow", "to": "cast", "rsqrt": "sqrt"}.get(
        step.operation, step.operation
    )


def _paired(found: Matching, a: _Region, b: _Region) -> tuple[Step | None, Step | None, set[int]]:
    """Return the first pair of steps that read a common value, and the values that the right one reads of
    it. A pair of the same function comes first, then one of the same operation."""
    starts_a, starts_b = a.starts(), b.starts()
    pairs = []
    for there in starts_b:
        shared = {i for value in there.inputs for i in found.right.get(value, ())}
        for here in starts_a:
            common = shared.intersection(here.inputs)
            if common:
                pairs.append((_unlike(here, there), there.index, here.index, here, there, common))
    if pairs:
        _, _, _, here, there, common = min(pairs, key=lambda p: p[:3])
        return here, there, common
    return (starts_a[0] if starts_a else None), (starts_b[0] if starts_b else None), set()


def _unlike(here: Step, there: Step) -> int:
    """Return 0 for the same function, 1 for the same operation, 2 for neither."""
    functions = {_called(here), kind(here)} & {_called(there), kind(there)} - _PLAIN
    return 0 if functions else 1 if kind(here) == kind(there) else 2


def _compared(a: _Region, b: _Region, here: Step, there: Step) -> tuple[Start, Start]:
    """Return the starts of the two sides; one may lack the operation that the other has."""
    mine, theirs = _called(here), _called(there)
    if mine != theirs and _unlike(here, there) == 2:
        if theirs in a.next_to(here) and mine not in b.next_to(there):
            return Start(here), _after(b, there)
        if mine in b.next_to(there) and theirs not in a.next_to(here):
            return _after(a, here), Start(there)
    return Start(here), Start(there)


def _after(region: _Region, step: Step) -> Start:
    """Return the step whose result a step reads: after it, an operation is missing."""
    makers = [region.producer(i) for i in step.inputs if not region.side.neutral(i)]
    found = max((m for m in makers if m is not None), key=lambda m: m.index, default=step)
    return Start(found, missing=True)


def same_line(start: Start, region: Iterable[Step]) -> list[Step]:
    """Return the steps of a region that the same line of the same module calls, soon after the start."""
    at = start.step
    return [s for s in region if (s.place, s.module) == (at.place, at.module) and s.index < at.index + _NEAR]


def last_of_line(side: Side, start: Start | None, region: Iterable[Step]) -> int | None:
    """Return the last telling value that the function at a start computes; None if there is none."""
    if start is None:
        return None
    near = [s for s in same_line(start, region) if s.operation == start.step.operation]
    values = [o for s in near for o in s.outputs if not side.neutral(o)]
    return values[-1] if values else None
