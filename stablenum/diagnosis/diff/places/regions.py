"""The operations of one side from shared values to results that differ, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from stablenum.diagnosis.diff.sides.kinds import functions_of, in_one, kind, quiet
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["PLAIN", "STEPS_AHEAD", "Region", "Start", "last_of_line", "leading_steps", "same_line"]

# Functions that nearly every line has.
PLAIN = {"add", "sub", "mul", "div", "where", "cast", "sum"}
# A line in a loop runs again after so many steps. Chosen, not measured.
_NEAR = 60
# From the step at which a side begins to differ, so many are looked at: one step of the other side may stand
# for several. Chosen, not measured.
STEPS_AHEAD = 24
_CHOICES = {"masked_fill", "select_n", "where"}
# So many functions one after another are looked at to see what one side lacks. Chosen, not measured.
_FAR = 6


@dataclass(frozen=True, slots=True)
class Start:
    """Where one side begins to differ.

    Attributes:
        step: the first operation that differs, or, if ``missing``, the one after which it is missing.
        missing: whether this side lacks the operation that the other side has.
        value: the value on which the operation is missing, or which the step gives if that is common.
        place: the line that differs, if that is not the step's: one of the optimizer, or one that leads
            to the step.
    """

    step: Step
    missing: bool = False
    value: int | None = None
    place: Place | None = None


class Region:
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
        self._made = {o for s in self.steps for o in s.outputs}
        self.readers: dict[int, list[Step]] = {}
        for step in self.steps:
            for value in step.inputs:
                self.readers.setdefault(value, []).append(step)

    def starts(self) -> list[Step]:
        """Return the steps that read nothing from the region, nor choose by what the region computes."""
        return self._starts

    @cached_property
    def _starts(self) -> list[Step]:
        return [s for s in self.steps if self._made.isdisjoint(self._read(s))]

    def _read(self, step: Step) -> set[int]:
        """Return what a step reads, and what its indices and flags are computed from, back to common values
        and those of the region."""
        trace, found, todo = self.side.trace, set[int](), list(step.inputs)
        while todo:
            value = todo.pop()
            producer = trace.values[value].producer
            further = value not in found and value not in self._made and value not in self.equal
            found.add(value)
            if further and producer is not None:
                todo += trace.steps[producer].inputs
        return found

    def first(self) -> Start | None:
        """Return the first of these steps, if possible one that reads what depends on a parameter; None if
        there is none."""
        starts = sorted(self.starts(), key=self._of_data)
        return Start(starts[0]) if starts else None

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

    def after(self, step: Step) -> set[str]:
        """Return the functions that compute with what a step gives, up to a few of them one after another;
        those that nearly every line has are left out after the first."""
        found, todo, seen = self.next_to(step), list(step.outputs), {step.index}
        for _ in range(_FAR):
            readers = [s for v in todo for s in self.readers.get(v, ()) if s.index not in seen]
            seen.update(s.index for s in readers)
            found |= {f for s in readers if not quiet(s) for f in functions_of(s) - PLAIN}
            todo = [o for s in readers for o in s.outputs]
        return found

    def aside(self, step: Step) -> bool:
        """Return whether a step reads nothing that depends on a parameter, and something else that differs
        is read where its result meets what does."""
        if self._of_data(step):
            meets = self._meets(step)
            return meets is None or any(i in self._made and self.side.trained[i] for i in meets.inputs)
        return False

    def entry(self, step: Step) -> int:
        """Return when the result of a step meets what depends on a parameter."""
        meets = self._meets(step) if self._of_data(step) else None
        return step.index if meets is None else meets.index

    def _of_data(self, step: Step) -> bool:
        """Return whether a step reads nothing that depends on a parameter."""
        return not any(self.side.trained[i] for i in step.inputs)

    def _meets(self, step: Step) -> Step | None:
        """Return the first step that reads what depends on a parameter, and what follows from a step."""
        todo, seen, found = [step], {step.index}, list[Step]()
        while todo:
            for reader in (r for o in todo.pop().outputs for r in self.readers.get(o, ())):
                if reader.index not in seen:
                    seen.add(reader.index)
                    (todo if self._of_data(reader) else found).append(reader)
        return min(found, key=lambda s: s.index, default=None)

    def common(self, step: Step) -> list[int]:
        """Return what a step reads that the other side has, too."""
        return [i for i in step.inputs if i in self.equal]

    def read_by_call(self, step: Step) -> set[int]:
        """Return the telling values that the call that a step belongs to reads, as far as they lead to what
        the step reads."""
        todo, found, at = self.common(step), set[int](), (step.place, step.module)
        while todo:
            value = todo.pop()
            producer = self.side.trace.values[value].producer
            made_by = None if producer is None else self.side.trace.steps[producer]
            if made_by is not None and in_one(made_by, step) and (made_by.place, made_by.module) == at:
                todo += [i for i in made_by.inputs if not self.side.neutral(i)]
            else:
                found.add(value)
        return found

    def led_to_by(self, values: Iterable[int]) -> set[int]:
        """Return the steps of the forward pass that read nothing from the region, and from which values
        follow, by their indices."""
        if not self._firsts:
            return set()
        trace, todo, seen = self.side.trace, list(values), set[int]()
        while todo:
            producer = trace.values[todo.pop()].producer
            if producer is not None and producer >= min(self._firsts) and producer not in seen:
                seen.add(producer)
                todo += trace.steps[producer].inputs
        return self._firsts & seen

    @cached_property
    def _firsts(self) -> set[int]:
        return {s.index for s in self.starts() if s.phase == "forward"}

    def shares(self, step: Step, other: Step) -> bool:
        """Return whether a step reads a telling value that a step of the other side reads, too."""
        telling = (i for i in step.inputs if not self.side.neutral(i))
        return any(set(other.inputs).intersection(self.equal.get(i, ())) for i in telling)

    def functions(self, step: Step) -> set[str]:
        """Return the function that a step belongs to, or those that read what it only moves."""
        return self.next_to(step) if quiet(step) else functions_of(step)

    def begins(self, step: Step, shared: Iterable[int]) -> bool:
        """Return whether the call that a step belongs to has made a common value."""
        producers = (self.side.trace.values[i].producer for i in shared)
        made_by = [self.side.trace.steps[p] for p in producers if p is not None]
        at = step.place, step.module
        return any(in_one(m, step) and (m.place, m.module) == at and not quiet(m) for m in made_by)

    def picks(self, step: Step) -> bool:
        """Return whether a step only takes a part of what was computed before."""
        return quiet(step) and any(self.side.trace.values[i].producer is not None for i in step.inputs[:1])

    def takes_part(self, step: Step) -> bool:
        """Return whether a step takes a part of a value."""
        return quiet(step) and self.fewer(step) is not None

    def fewer(self, step: Step) -> int | None:
        """Return how many entries the function that a step belongs to gives, if it reads more."""
        last = last_of_line(self.side, Start(step), self.steps)
        if last is None:
            return None
        count, read = (prod(self.side.shapes[i]) for i in (last, step.inputs[0]))
        return count if count < read else None

    def masks(self, step: Step) -> bool:
        """Return whether a step masks entries of one value: it chooses between that and what depends on no
        parameter, or adds what holds nothing but zeros and masks."""
        others = [i for i in step.inputs if not self.side.trained[i]]
        if len(others) == len(step.inputs) or len(step.inputs) - len(others) > 1:
            return False
        if kind(step) in _CHOICES:
            return True
        return kind(step) == "add" and any(not self.side.prints[i].entries for i in others)

    def maker(self, value: int) -> tuple[Step | None, int]:
        """Return the step that computed a value, and what it gave: past those that only moved it, as long as
        the other side has what they read as the same value."""
        trace, same = self.side.trace, set(self.equal.get(value, ()))
        made_by = trace.values[value].producer
        while made_by is not None and quiet(trace.steps[made_by]) and trace.steps[made_by].inputs:
            before = trace.steps[made_by].inputs[0]
            if trace.values[before].producer is None or not same.intersection(self.equal.get(before, ())):
                break
            value, made_by = before, trace.values[before].producer
        return (None if made_by is None else trace.steps[made_by]), value


def leading_steps(value: int, steps: Iterable[Step]) -> list[Step]:
    """Return those of some steps from which a value follows, in order."""
    made, found, todo = {o: s for s in steps for o in s.outputs}, dict[int, Step](), [value]
    while todo:
        step = made.get(todo.pop())
        if step is not None and step.index not in found:
            found[step.index] = step
            todo += step.inputs
    return [found[k] for k in sorted(found)]


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
