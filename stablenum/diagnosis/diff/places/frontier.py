"""Find the first operation that differs: all that it reads is shared, and what it gives never is again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from stablenum.diagnosis.diff.places.regions import (
    PLAIN,
    Region,
    Start,
    last_of_line,
    leading_steps,
    same_line,
)
from stablenum.diagnosis.diff.sides.equality import SAME_ARRAY, SAME_ENTRIES
from stablenum.diagnosis.diff.sides.fingerprints import distance
from stablenum.diagnosis.diff.sides.kinds import both_at_indices, called, functions_of, kind, quiet
from stablenum.diagnosis.diff.sides.matching import Matching
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Frontier", "Start", "frontiers", "last_of_line", "leading_to", "same_line"]

# After the most likely place, those of so many pairs of operations are yielded. Chosen, not measured.
_MOST_PAIRS = 4


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where two programs part.

    Attributes:
        left, right: where each side begins to differ; None where nothing of it leads to the difference.
        region_left, region_right: all operations from there to the values that differ.
        doubtful: whether the two operations are unlike, so that one side may lack what the other one has.
        readers: the operations of both sides before which the same entries lie in another order; None if the
            sides do not differ in that.
    """

    left: Start | None
    right: Start | None
    region_left: tuple[Step, ...]
    region_right: tuple[Step, ...]
    doubtful: bool = False
    readers: tuple[Step, Step] | None = None

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
    a = Region(left, found.known("left"), [i for i, _ in pairs], since[0])
    b = Region(right, found.known("right"), [j for _, j in pairs], since[1])
    regions = tuple(a.steps), tuple(b.steps)
    choices = _pairs(a, b)
    if not choices:
        yield Frontier(*_alike(a, b), *regions)
        return
    first = _compared(a, b, choices[0])
    alike = (
        not _nothing_alike(choices[0]) or _stand_for_each_other(a, b, choices[0]) or _mask(a, b, choices[0])
    )
    doubtful = not alike and not any(s.missing for s in first)
    yield Frontier(*first, *regions, doubtful=doubtful)
    for pair in choices[:_MOST_PAIRS]:
        for starts in _further(a, b, pair):
            if starts != first:
                yield Frontier(*starts, *regions)


def _further(a: Region, b: Region, pair: _Pair) -> Iterator[tuple[Start, Start]]:
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


def _pairs(a: Region, b: Region) -> list[_Pair]:
    """Return the pairs of steps that read a common value, the most likely first.

    What gives the same but for repeats comes last, such as positions that one side looks up once and the
    other one for each row of a batch; before it, what stands aside; before that, what reads values that are
    equal although they follow from another pair, such as the mean of an image that was resized in another
    way. A pair of the same function comes before one of the same operation."""
    pairs = list(_reading_the_same(a, b))
    paired = {(p.left.index, p.right.index) for p in pairs}

    def rank(pair: _Pair) -> tuple[int, ...]:
        aside = b.aside(pair.right) or a.aside(pair.left)
        mine, theirs = a.led_to_by(pair.shared_left), b.led_to_by(pair.shared_right)
        follows = not paired.isdisjoint(product(mine, theirs))
        unlike, entry = _unlike(pair.left, pair.right), b.entry(pair.right)
        repeats = _repeats(a.side, pair.left, b.side, pair.right)
        return (
            repeats,
            aside,
            follows,
            unlike,
            entry,
            pair.right.index,
            -len(pair.shared_right),
            pair.left.index,
        )

    return sorted(pairs, key=rank)


def _reading_the_same(a: Region, b: Region) -> Iterator[_Pair]:
    starts = a.starts()
    for there in b.starts():
        equal = {j: set(b.equal.get(j, ())) for j in there.inputs}
        for here in starts:
            mine = frozenset(here.inputs).intersection(set().union(*equal.values()))
            if mine:
                yield _Pair(here, there, mine, frozenset(j for j in there.inputs if equal[j] & mine))
            elif _in_equal_calls(a, b, here, there):
                yield _Pair(here, there, *(frozenset(r.common(s)) for r, s in ((a, here), (b, there))))


def _in_equal_calls(a: Region, b: Region, here: Step, there: Step) -> bool:
    """Return whether two steps belong to calls of one function that read a common value, and each step reads
    what its call has made of that value."""
    if quiet(here) or _unlike(here, there) != 0:
        return False
    theirs = b.read_by_call(there)
    return any(theirs.intersection(a.equal.get(i, ())) for i in a.read_by_call(here))


def _alike(a: Region, b: Region) -> tuple[Start | None, Start | None]:
    """Return the first steps of the same function, if possible one whose line reads what the other one reads;
    else those that read a common value, one of which reads something else that differs, too; else the first
    of all."""
    same = [(s, t) for t in b.starts() for s in a.starts() if not quiet(s) and _unlike(s, t) == 0]
    meeting = ((s, t) for s, t in same if _line_shares(a, s, t) or _line_shares(b, t, s))
    met = ((s, t) for s, t in ((s, _met(s, b)) for s in a.starts()) if t is not None)
    meets = ((s, t) for s, t in ((_met(t, a), t) for t in b.starts()) if s is not None)
    for pairs in (meeting, same, met, meets):
        for here, there in pairs:
            return Start(here), Start(there)
    return a.first(), b.first()


def _line_shares(side: Region, step: Step, other: Step) -> bool:
    """Return whether the line of a step reads a telling value that a step of the other side reads."""
    return any(side.shares(s, other) for s in same_line(Start(step), side.steps))


def _met(step: Step, other: Region) -> Step | None:
    """Return the first step of the other side that reads a telling value that a step reads."""
    return next((r for r in other.steps if not quiet(r) and other.shares(r, step)), None)


def _unlike(here: Step, there: Step) -> int:
    """Return 0 for the same function, 1 for the same operation, 2 for neither."""
    functions = functions_of(here) & functions_of(there) - PLAIN
    return 0 if functions or both_at_indices(here, there) else 1 if kind(here) == kind(there) else 2


def _nothing_alike(pair: _Pair) -> bool:
    """Return whether two steps compute nothing of one kind."""
    alike = functions_of(pair.left) & functions_of(pair.right)
    return not alike and _unlike(pair.left, pair.right) == 2


def _compared(a: Region, b: Region, pair: _Pair) -> tuple[Start, Start]:
    """Return the starts of the two sides; one may lack the operation that the other has."""
    here, there = Start(pair.left), Start(pair.right)
    mine, theirs = a.functions(pair.left), b.functions(pair.right)
    lacks = _lacking(a, b, pair)
    if _multiply(a, pair.left, pair.right) or _multiply(b, pair.right, pair.left):
        return here, there
    if _stand_for_each_other(a, b, pair) or _mask(a, b, pair) or both_at_indices(pair.left, pair.right):
        return here, there
    if not mine & theirs and _unlike(pair.left, pair.right) == 2:
        if theirs & a.next_to(pair.left) and not mine & b.after(pair.right):
            return here, lacks[1] or there
        if mine & b.next_to(pair.right) and not theirs & a.after(pair.left):
            return lacks[0] or here, there
    return here, there


def _multiply(side: Region, one: Step, other: Step) -> bool:
    """Return whether one side multiplies and sums what the other one does as a product of matrices."""
    return kind(one) == "mul" and kind(other) == "matmul" and "sum" in side.next_to(one)


def _stand_for_each_other(a: Region, b: Region, pair: _Pair) -> bool:
    """Return whether one side takes a part of what the other one sums up into as many entries, as a class
    token and a mean over all tokens are: neither lacks an operation then."""
    if a.takes_part(pair.left) == b.takes_part(pair.right):
        return False
    fewer = [side.fewer(step) for side, step in ((a, pair.left), (b, pair.right))]
    return fewer[0] is not None and fewer[0] == fewer[1]


def _mask(a: Region, b: Region, pair: _Pair) -> bool:
    """Return whether both steps mask entries, the one by a choice and the other one by a sum: what one masks
    in place of the other may set the programs right, and still neither lacks a mask."""
    return a.masks(pair.left) and b.masks(pair.right)


def _lacking(a: Region, b: Region, pair: _Pair) -> tuple[Start | None, Start | None]:
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


def _after(side: Region, step: Step, shared: frozenset[int], begun: bool) -> Start:
    """Return the start of a side that lacks what the other one does with a common value that a step reads. If
    that value is a part of what the other side does there, its maker is what differs."""
    made_by, value = side.maker(next(i for i in step.inputs if i in shared))
    if made_by is not None and (begun or _changes_nothing(side.side, made_by)):
        return Start(made_by, value=value)
    if made_by is None or side.picks(made_by):  # the line that reads a part says more
        made_by = step
    return Start(made_by, missing=True, value=value)


def _repeats(a: Side, here: Step, b: Side, there: Step) -> bool:
    """Return whether one step gives the values of the other one several times."""
    mine, theirs = a.prints[here.outputs[0]], b.prints[there.outputs[0]]
    fewer, more = sorted((mine, theirs), key=lambda mark: mark.absolute)
    times = round(more.absolute / fewer.absolute) if fewer.absolute else 0
    if times < 2 or (fewer.least, fewer.greatest) != (more.least, more.greatest):
        return False
    copies = fewer._replace(
        **{k: times * getattr(fewer, k) for k in ("total", "absolute", "squares", "signed")}
    )
    return distance(copies, more) <= SAME_ENTRIES


def _changes_nothing(side: Side, step: Step) -> bool:
    """Return whether a function gives what it reads, as a relu does of positive numbers: then it is not
    missing where the other side computes another function."""
    made = side.prints[step.outputs[0]]
    return not quiet(step) and any(
        side.shapes[i] == side.shapes[step.outputs[0]] and distance(side.prints[i], made) <= SAME_ARRAY
        for i in step.inputs
    )


def leading_to(place: Frontier, left: int, right: int) -> Frontier:
    """Return a place whose starts lead to values that correspond: a step that does not is replaced by the
    first one of its region that reads only common values and does."""
    return replace(
        place,
        left=_leading(place.left, place.region_left, left),
        right=_leading(place.right, place.region_right, right),
    )


def _leading(start: Start | None, region: Iterable[Step], value: int) -> Start | None:
    steps = list(region)
    made = {o for s in steps for o in s.outputs}
    if start is None or not made.intersection(start.step.outputs):
        return start
    before = leading_steps(value, steps)
    firsts = [s for s in before if made.isdisjoint(s.inputs)]
    return start if not firsts or any(s.index == start.step.index for s in before) else Start(firsts[0])
