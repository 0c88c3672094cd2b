"""Find the first operation that differs: all that it reads is shared, and what it gives never is again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from stablenum.diagnosis.diff.kinds import called, functions_of, in_one, kind, quiet
from stablenum.diagnosis.diff.matching import Matching
from stablenum.diagnosis.diff.sides import Side
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["Frontier", "Start", "frontiers", "last_of_line", "leading_to", "same_line"]

_PLAIN = {"add", "sub", "mul", "div", "where", "cast", "sum"}
# A line in a loop runs again after so many steps.
_NEAR = 60
_FAR = 6
_MOST_PAIRS = 4


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


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where two programs part.

    Attributes:
        left, right: where each side begins to differ; None where nothing of it leads to the difference.
        region_left, region_right: all operations from there to the values that differ.
        doubtful: whether the two operations are unlike, so that one side may lack what the other one has.
    """

    left: Start | None
    right: Start | None
    region_left: tuple[Step, ...]
    region_right: tuple[Step, ...]
    doubtful: bool = False

    @property
    def known(self) -> bool:
        """Whether the lines are known, or are those of the optimizer."""
        starts = [start for start in (self.left, self.right) if start is not None]
        return all(start.step.place is not None or start.step.phase == "update" for start in starts)

    @property
    def lacks(self) -> bool:
        """Whether one side goes on from a common value without what the other one computes with it."""
        return any(start is not None and start.value is not None for start in (self.left, self.right))


def frontiers(
    left: Side, right: Side, found: Matching, differing: Iterable[tuple[int, int]], since: tuple[int, int]
) -> Iterator[Frontier]:
    """Yield where the results that differ may begin to differ, the most likely place first.

    After the first place come those at which one side may lack the operation of the other, and the same for
    further operations that read common values.

    Args:
        left, right: the sides.
        found: the values that they share.
        differing: pairs of results that are not equal.
        since: for each side, the step up to which everything is taken as equal, because the results that
            follow from it are.
    """
    pairs = list(differing)
    a = _Region(left, found.known("left"), [i for i, _ in pairs], since[0])
    b = _Region(right, found.known("right"), [j for _, j in pairs], since[1])
    regions = tuple(a.steps), tuple(b.steps)
    choices = _pairs(a, b)
    if not choices:
        yield Frontier(*_alike(a, b), *regions)
        return
    first = _compared(a, b, choices[0])
    alike = not _nothing_alike(choices[0]) or _stand_for_each_other(a, b, choices[0])
    doubtful = not alike and not any(s.missing for s in first)
    yield Frontier(*first, *regions, doubtful=doubtful)
    for pair in choices[:_MOST_PAIRS]:
        for starts in _further(a, b, pair):
            if starts != first:
                yield Frontier(*starts, *regions)


def _further(a: _Region, b: _Region, pair: _Pair) -> Iterator[tuple[Start, Start]]:
    """Yield where the two sides may begin to differ, given steps that read a common value."""
    here, there = Start(pair.left), Start(pair.right)
    if _nothing_alike(pair):
        mine, theirs = _lacking(a, b, pair)
        if theirs is not None:
            yield here, theirs
        if mine is not None:
            yield mine, there
    yield here, there


class _Pair(NamedTuple):
    """Two steps that read a common value.

    Attributes:
        left, right: the steps.
        shared_left, shared_right: the common values as either side has them.
    """

    left: Step
    right: Step
    shared_left: frozenset[int]
    shared_right: frozenset[int]


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
        self._made = {o for s in self.steps for o in s.outputs}
        self.readers: dict[int, list[Step]] = {}
        for step in self.steps:
            for value in step.inputs:
                self.readers.setdefault(value, []).append(step)

    def starts(self) -> list[Step]:
        """Return the steps that read nothing from the region."""
        return [s for s in self.steps if not self._made.intersection(s.inputs)]

    def first(self) -> Start | None:
        """Return the first of these steps; None if there is none."""
        return next((Start(step) for step in self.starts()), None)

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
            found |= {f for s in readers if not quiet(s) for f in functions_of(s) - _PLAIN}
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

    def follows(self, values: Iterable[int]) -> bool:
        """Return whether values of the forward pass follow from some of the region."""
        return all(self._follows(value) for value in values)

    def _follows(self, value: int) -> bool:
        trace, todo, seen = self.side.trace, [value], set[int]()
        first = self.steps[0].index if self.steps else 0
        while todo:
            producer = trace.values[todo.pop()].producer
            if producer is None or producer < first or producer in seen:
                continue
            seen.add(producer)
            step = trace.steps[producer]
            if step.phase == "forward" and self._made.intersection(step.outputs):
                return True
            todo += step.inputs
        return False

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


def _pairs(a: _Region, b: _Region) -> list[_Pair]:
    """Return the pairs of steps that read a common value, the most likely first.

    What stands aside comes last; before it, what reads values that are equal although they follow from some
    that differ, such as the mean of an image that was resized in another way. A pair of the same function
    comes before one of the same operation."""
    starts_a, starts_b = a.starts(), b.starts()
    ranked = []
    for there in starts_b:
        equal = {j: set(b.equal.get(j, ())) for j in there.inputs}
        for here in starts_a:
            mine = frozenset(here.inputs).intersection(set().union(*equal.values()))
            if mine:
                theirs = frozenset(j for j in there.inputs if equal[j] & mine)
                pair = _Pair(here, there, mine, theirs)
            elif _in_equal_calls(a, b, here, there):
                pair = _Pair(here, there, *(frozenset(r.common(s)) for r, s in ((a, here), (b, there))))
            else:
                continue
            aside = b.aside(there) or a.aside(here)
            late = a.follows(pair.shared_left) and b.follows(pair.shared_right)
            rank = aside, late, _unlike(here, there), b.entry(there), there.index, here.index
            ranked.append((rank, pair))
    return [pair for _, pair in sorted(ranked, key=lambda p: p[0])]


def _in_equal_calls(a: _Region, b: _Region, here: Step, there: Step) -> bool:
    """Return whether two steps belong to calls of one function that read a common value, of which each step
    reads what its call has made of it."""
    if quiet(here) or _unlike(here, there) != 0:
        return False
    theirs = b.read_by_call(there)
    return any(theirs.intersection(a.equal.get(i, ())) for i in a.read_by_call(here))


def _alike(a: _Region, b: _Region) -> tuple[Start | None, Start | None]:
    """Return the first steps of the same function; without such, those that read a common value, one of which
    reads something else that differs, too; without such, the first of all."""
    same = ((s, t) for s in a.starts() for t in b.starts() if not quiet(s) and _unlike(s, t) == 0)
    met = ((s, t) for s, t in ((s, _met(s, b)) for s in a.starts()) if t is not None)
    meets = ((s, t) for s, t in ((_met(t, a), t) for t in b.starts()) if s is not None)
    for pairs in (same, met, meets):
        for here, there in pairs:
            return Start(here), Start(there)
    return a.first(), b.first()


def _met(step: Step, other: _Region) -> Step | None:
    """Return the first step of the other side that reads a telling value that a step reads."""
    return next((r for r in other.steps if not quiet(r) and other.shares(r, step)), None)


def _unlike(here: Step, there: Step) -> int:
    """Return 0 for the same function, 1 for the same operation, 2 for neither."""
    functions = functions_of(here) & functions_of(there) - _PLAIN
    return 0 if functions else 1 if kind(here) == kind(there) else 2


def _nothing_alike(pair: _Pair) -> bool:
    """Return whether two steps compute nothing of one kind."""
    alike = functions_of(pair.left) & functions_of(pair.right)
    return not alike and _unlike(pair.left, pair.right) == 2


def _compared(a: _Region, b: _Region, pair: _Pair) -> tuple[Start, Start]:
    """Return the starts of the two sides; one may lack the operation that the other has."""
    here, there = Start(pair.left), Start(pair.right)
    mine, theirs = a.functions(pair.left), b.functions(pair.right)
    lacks = _lacking(a, b, pair)
    if _multiply(a, pair.left, pair.right) or _multiply(b, pair.right, pair.left):
        return here, there
    if _stand_for_each_other(a, b, pair):
        return here, there
    if not mine & theirs and _unlike(pair.left, pair.right) == 2:
        if theirs & a.next_to(pair.left) and not mine & b.after(pair.right):
            return here, lacks[1] or there
        if mine & b.next_to(pair.right) and not theirs & a.after(pair.left):
            return lacks[0] or here, there
    return here, there


def _multiply(side: _Region, one: Step, other: Step) -> bool:
    """Return whether one side multiplies and sums what the other one does as a product of matrices."""
    return kind(one) == "mul" and kind(other) == "matmul" and "sum" in side.next_to(one)


def _stand_for_each_other(a: _Region, b: _Region, pair: _Pair) -> bool:
    """Return whether one side takes a part of what the other one sums up into as many entries, as a class
    token and a mean over all tokens are: neither lacks an operation then."""
    if a.takes_part(pair.left) == b.takes_part(pair.right):
        return False
    fewer = [side.fewer(step) for side, step in ((a, pair.left), (b, pair.right))]
    return fewer[0] is not None and fewer[0] == fewer[1]


def _lacking(a: _Region, b: _Region, pair: _Pair) -> tuple[Start | None, Start | None]:
    """Return the start of each side if it lacks what the other one does with the common value; None where the
    other one only moves entries: then nothing is missing, but the operation that reads them differs."""
    return (
        None
        if _moves(pair.right)
        else _after(a, pair.left, pair.shared_left, b.begins(pair.right, pair.shared_right)),
        None
        if _moves(pair.left)
        else _after(b, pair.right, pair.shared_right, a.begins(pair.left, pair.shared_left)),
    )


def _moves(step: Step) -> bool:
    return quiet(step) or called(step) == "neg"


def _after(side: _Region, step: Step, shared: frozenset[int], begun: bool) -> Start:
    """Return the start of a side that lacks what the other one does with a common value that a step reads. If
    that value is a part of what the other side does there, its maker is what differs."""
    made_by, value = side.maker(next(i for i in step.inputs if i in shared))
    if begun and made_by is not None:
        return Start(made_by, value=value)
    if made_by is None or side.picks(made_by):  # the line that reads a part says more
        made_by = step
    return Start(made_by, missing=True, value=value)


def leading_to(place: Frontier, left: int, right: int) -> Frontier:
    """Return a place whose starts lead to values that correspond: a step that does not is replaced by the
    first one of its region that reads only common values and does."""
    return replace(
        place,
        left=_leading(place.left, place.region_left, left),
        right=_leading(place.right, place.region_right, right),
    )


def _leading(start: Start | None, region: Iterable[Step], value: int) -> Start | None:
    steps = {o: s for s in region for o in s.outputs}
    if start is None or not set(start.step.outputs) & set(steps):
        return start
    before, todo = dict[int, Step](), [value]
    while todo:
        step = steps.get(todo.pop())
        if step is not None and step.index not in before:
            before[step.index] = step
            todo += step.inputs
    firsts = [s for _, s in sorted(before.items()) if not any(i in steps for i in s.inputs)]
    return start if start.step.index in before or not firsts else Start(firsts[0])


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
