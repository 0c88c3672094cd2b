"""Find the first operation that differs: all that it reads is shared, and what it gives never is again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stablenum.diagnosis.diff.kinds import called, functions_of, in_one, kind, quiet
from stablenum.diagnosis.diff.matching import Matching
from stablenum.diagnosis.diff.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Frontier", "Start", "frontier", "last_of_line", "same_line"]

_PLAIN = {"add", "sub", "mul", "div", "where", "cast", "sum"}
# A line in a loop runs again after so many steps.
_NEAR = 60


@dataclass(frozen=True, slots=True)
class Start:
    """Where one side begins to differ.

    Attributes:
        step: the first operation that differs, or, if ``missing``, the one after which it is missing.
        missing: whether this side lacks the operation that the other side has.
        value: the value on which the operation is missing.
    """

    step: Step
    missing: bool = False
    value: int | None = None


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
        first, second = _compared(a, b, here, there, shared)
    return Frontier(first, second, tuple(a.steps), tuple(b.steps))


class _Region:
    """The steps of one side on the way to results that differ, back to values that are shared, in order."""

    def __init__(
        self, side: Side, known: Mapping[int, list[int]], results: Iterable[int], since: int
    ) -> None:
        self.side, self.equal = side, known
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
                if quiet(reader) or in_one(reader, step):
                    todo += reader.outputs
                else:
                    found |= functions_of(reader)
        return found

    def of_data(self, step: Step) -> bool:
        """Return whether a step reads nothing that depends on a parameter."""
        return not any(self.side.trained[i] for i in step.inputs)

    def functions(self, step: Step) -> set[str]:
        """Return the function that a step belongs to, or those that read what it only moves."""
        return self.next_to(step) if quiet(step) else functions_of(step)

    def maker(self, value: int | None) -> Step | None:
        """Return the step that computed a value, past those that only moved it if there is one."""
        trace, first = self.side.trace, None
        while value is not None:
            producer = trace.values[value].producer
            step = None if producer is None else trace.steps[producer]
            if step is None or not quiet(step) or not step.inputs:
                return step or first
            first, value = first or step, step.inputs[0]
        return first


def _paired(found: Matching, a: _Region, b: _Region) -> tuple[Step | None, Step | None, set[int]]:
    """Return the first pair of steps that read a common value, and the left values that they share.

    What depends on parameters comes before what depends on data alone, and a pair of the same function before
    one of the same operation."""
    starts_a, starts_b = a.starts(), b.starts()
    pairs = []
    for there in starts_b:
        shared = {i for value in there.inputs for i in found.right.get(value, ())}
        for here in starts_a:
            common = shared.intersection(here.inputs)
            if common:
                data = b.of_data(there) or a.of_data(here)
                pairs.append((data, _unlike(here, there), there.index, here.index, here, there, common))
    if pairs:
        *_, here, there, common = min(pairs, key=lambda p: p[:4])
        return here, there, common
    return (starts_a[0] if starts_a else None), (starts_b[0] if starts_b else None), set()


def _unlike(here: Step, there: Step) -> int:
    """Return 0 for the same function, 1 for the same operation, 2 for neither."""
    functions = functions_of(here) & functions_of(there) - _PLAIN
    return 0 if functions else 1 if kind(here) == kind(there) else 2


def _compared(a: _Region, b: _Region, here: Step, there: Step, shared: set[int]) -> tuple[Start, Start]:
    """Return the starts of the two sides; one may lack the operation that the other has."""
    mine, theirs = a.functions(here), b.functions(there)
    if not mine & theirs and _unlike(here, there) == 2:
        if theirs & a.next_to(here) and not mine & b.next_to(there):
            return _whole(a, b, here, there, shared)
        if mine & b.next_to(there) and not theirs & a.next_to(here):
            return _whole(b, a, there, here, shared)[::-1]
    return Start(here), Start(there)


def _whole(a: _Region, b: _Region, here: Step, there: Step, shared: set[int]) -> tuple[Start, Start]:
    """Return the start of the side that has an operation, and that of the side that lacks it.

    Where only entries are moved, nothing is missing: the operation that reads them differs.
    """
    if quiet(here) or called(here) == "neg":
        return Start(here), Start(there)
    value = next((i for i in there.inputs if set(b.equal.get(i, ())) & shared), None)
    return Start(here), Start(b.maker(value) or there, missing=True, value=value)


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
