"""Find where only one of two programs ends the flow of gradients: a ``detach``, a ``stop_gradient``, a part
without gradients.

The losses agree then, and the gradients do not. A step at which one side ends the flow is recognised by the
value that it reads: the other side has an equal one, reads it for the same purpose, and passes gradients
through. Without what passes there, the gradients agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from typing import NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.remedies import REMEDIES
from stablenum.diagnosis.diff.causes.stops.cases import SUMS, Case, cases_of
from stablenum.diagnosis.diff.causes.stops.hidden import Hidden, goes_on, hidden_stop, part_without_gradients
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.flow import OTHER, Read, line_between, size
from stablenum.diagnosis.diff.places.frontier import Frontier, Start
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.values import Place

__all__ = ["Stopped", "stopped"]

# What may pass through a line is tried set by set, each by an evaluation; of pairs of lines so many, with so
# many sets of each line: 3 x 4 x 4. Chosen, not measured.
_MOST_TRIALS, _MOST_PAIRS, _MOST_OF_TWO = 9, 3, 4


class Stopped(NamedTuple):
    """A place at which only one side ends the flow of gradients.

    Attributes:
        left, right: the step that ends it, and the step that reads the same value on the other side.
        cause: what is said of it.
        after: the comparison without what passes on the other side; None if that is not known.
    """

    left: Start | None
    right: Start | None
    cause: Cause
    after: Comparison | None


def stopped(comparison: Comparison, group: Group, found: Frontier) -> Stopped | None:
    """Return the place from which gradients differ because only one side ends their flow.

    A place at which that was tried and makes more gradients agree comes before others; two places that do so
    together come one after the other.
    """
    cases = cases_of(comparison, group)
    for case in cases:
        after, evidence = _tried(comparison, group, found, case)
        if evidence:
            ends = goes_on(comparison, group, case.side, case.stop)
            part = part_without_gradients(comparison, group) if ends else None
            return _stopped(comparison.side(OTHER[case.side]), part or case, after, evidence)
    part = part_without_gradients(comparison, group)
    if part is not None:
        after, evidence = _tried(comparison, group, found, part)
        case = _in_line(cases, part) or part
        return _stopped(comparison.side(OTHER[case.side]), case, after, evidence or _MEASURED)
    two = _of_two(comparison, group, cases)
    if two is not None:
        return two
    hidden = hidden_stop(comparison, group)
    if hidden is not None:
        known = _in_line(cases, hidden)
        other = comparison.side(OTHER[hidden.side])
        return _of_hidden(hidden, found) if known is None else _stopped(other, known, None, _MEASURED)
    return _stopped(comparison.side(OTHER[cases[0].side]), cases[0], None, "") if cases else None


def _in_line(cases: Iterable[Case], place: Case | Hidden) -> Case | None:
    """Return the case at the line of a place, which may say more; None if there is none."""
    return next((c for c in cases if (c.side, c.stop.place) == (place.side, place.stop.place)), None)


def _of_hidden(hidden: Hidden, found: Frontier) -> Stopped:
    here, there = Start(hidden.stop), hidden.passes or getattr(found, OTHER[hidden.side])
    cause = Cause(
        code="stopped_gradient",
        sentence=_SENTENCES["stopped_gradient"].format(stops=hidden.side, passes=OTHER[hidden.side]),
        evidence=_MEASURED,
        remedy=REMEDIES["stopped_gradient"],
        confirmed=True,
    )
    left, right = (here, there) if hidden.side == "left" else (there, here)
    return Stopped(left, right, cause, None)


def _of_two(comparison: Comparison, group: Group, cases: Sequence[Case]) -> Stopped | None:
    """Return the first of two places without which together all gradients agree."""
    apart = [p for p in combinations(cases, 2) if p[0].stop.place != p[1].stop.place]
    for one, two in apart[:_MOST_PAIRS]:
        sides = OTHER[one.side], OTHER[two.side]
        firsts, seconds = (
            list(islice(_contributions(comparison.side(name), case.reads), _MOST_OF_TWO))
            for name, case in zip(sides, (one, two), strict=True)
        )
        for values in firsts if seconds else ():
            first = _without(comparison, {sides[0]: values})
            if any(_without(first, {sides[1]: others}, group).agrees(group) for others in seconds):
                where = "" if two.stop.place is None else f" and at line {two.stop.place.line}"
                return _stopped(
                    comparison.side(sides[0]),
                    one,
                    first,
                    f"Without what passes there{where}, all gradients agree.",
                )
    return None


def _stopped(other: Side, case: Case, after: Comparison | None, evidence: str) -> Stopped:
    value, step = case.reads[-1]
    line = line_between(other, case.reads[-1]) if case.missing else None
    here, there = Start(case.stop), Start(step, missing=case.missing, value=value, place=line)
    cause = Cause(
        code=case.code,
        sentence=_SENTENCES[case.code].format(stops=case.side, passes=OTHER[case.side]),
        evidence=evidence,
        remedy=REMEDIES[case.code],
        confirmed=bool(evidence) and evidence is not _ON_BOTH,
    )
    return Stopped(*((here, there) if case.side == "left" else (there, here)), cause, after)


# This shows the place, and not what either side does there.
_ON_BOTH = "Without the gradient of what follows here, on both sides, all gradients agree."
_MEASURED = "Finite differences show that its gradients lack what would pass here."
_SENTENCES = {
    "stopped_gradient": "the {stops} program blocks the gradient here; the {passes} one does not.",
    "straight_through_missing": "the {stops} program passes the gradient around what it rounds or chooses "
    "here; the {passes} one does not.",
    "accumulation": "the {stops} program blocks the gradient of the parts of the loss that were added "
    "before; the {passes} one does not.",
}


def _tried(
    comparison: Comparison, group: Group, found: Frontier, case: Case
) -> tuple[Comparison | None, str]:
    """Return the comparison in which what passes on the other side is left out, and what that shows; nothing
    if no more gradients agree then."""
    if case.code == "straight_through_missing":
        return None, _cut(comparison, group, found, case)
    before = {p.right.name for p in group.differing}
    name = OTHER[case.side]
    for values in _contributions(comparison.side(name), case.reads):
        after = _without(comparison, {name: values}, group)
        left = {p.right.name for p in _same(after, group).differing}
        if left < before:
            told = "all gradients agree" if not left else f"{len(before) - len(left)} more gradients agree"
            return _without(comparison, {name: values}), f"Without what passes there, {told}."
    return None, ""


def _cut(comparison: Comparison, group: Group, found: Frontier, case: Case) -> str:
    """Leave out the gradient that only one side passes by: on both sides if both have it. Return what that
    shows; nothing if gradients differ without it too."""
    own, other = comparison.side(case.side), OTHER[case.side]
    equal = comparison.found.left if case.side == "left" else comparison.found.right
    region = found.region_left if case.side == "left" else found.region_right
    made, sizes = {o for s in region for o in s.outputs}, {own.shapes[r.value] for r in case.own}
    known = dict.fromkeys(i for s in region for i in s.inputs if i not in made and i in equal)
    alone = [{case.side: values} for values in _contributions(own, case.own)]
    both = [{case.side: {i}, other: {equal[i][0]}} for i in known if own.shapes[i] in sizes]
    for values in [*alone, *both[:_MOST_TRIALS]]:
        if _without(comparison, values, group).agrees(group):
            return _ON_BOTH if len(values) > 1 else "Without what passes there, all gradients agree."
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


def _contributions(side: Side, reads: Sequence[Read]) -> Iterator[set[int]]:
    """Yield sets of values of the backward pass, each of which may be all that passes through what is read:
    one from the derivative of each step that reads. Values of the step itself come before values of its line.
    After those steps come all steps that do the same in the same line, such as in a loop.
    """
    if not reads:
        return
    lines = dict.fromkeys(r.step.place for r in reads)
    kinds = {(r.step.place, r.step.primitive, r.step.operation) for r in reads}
    sizes = {size(side, r.value) for r in reads}
    alike = [
        s.index
        for s in side.trace.steps
        if s.phase == "forward" and (s.place, s.primitive, s.operation) in kinds
    ]
    made: dict[int, list[int]] = {i: [] for i in alike}
    for step in sorted(side.trace.steps, key=lambda s: (kind(s) in SUMS, -s.index)):
        if step.phase == "backward" and step.place in lines and step.forward is not None and not quiet(step):
            of = min(alike, key=lambda i, at=step.forward: abs(i - at))  # type: ignore[misc]
            values = [o for o in step.outputs if side.prints[o].floating and size(side, o) in sizes]
            made[of] = values + made[of] if step.forward == of else made[of] + values
    for steps in dict.fromkeys((tuple(r.step.index for r in reads), tuple(alike))):
        options = [_given_in_line(side, steps, made, place) for place in lines]
        yield from (set().union(*sets) for sets in islice(product(*filter(None, options)), _MOST_TRIALS))


def _given_in_line(
    side: Side, steps: Iterable[int], made: Mapping[int, list[int]], place: Place | None
) -> list[set[int]]:
    """Return sets with one value of each step of a line."""
    values = [made[i] for i in steps if made[i] and side.trace.steps[i].place == place]
    return [set(v) for v in zip(*values, strict=False)]
