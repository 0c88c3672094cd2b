"""Name the cause by the operations of the two sides: what only one of them has, and what they sum over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.by_value import same_entries
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial, told
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.flow import OTHER
from stablenum.diagnosis.diff.places.frontier import Start, same_line
from stablenum.diagnosis.diff.places.regions import leading_steps
from stablenum.diagnosis.diff.sides.equality import SAME_MULTIPLE
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.sides.kinds import in_one, kind, primitive_of, quiet
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_lack", "by_structure", "unexplained"]


def by_structure(scene: Scene) -> Iterator[Proposal]:
    """Say what the operations of the two sides suggest."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None:
        return
    if here.missing or there.missing:
        yield _of_missing(scene)
        return
    reduced = [*_of_axes(scene, here, there)] or [*_by_sum(scene)] or [*_by_divisor(scene)]
    if reduced:
        yield from reduced
        return
    primitives, names = ({getattr(s.step, n) for s in (here, there)} for n in ("primitive", "operation"))
    if scene.found.readers is not None and not primitives & _MOVING:
        yield Proposal(
            "entry_order",
            "the same numbers are in another order relative to what they are combined with.",
            _in_order(scene),
            "With the order of the left program",
            "Sorted, they are equal; unsorted, no permutation of the axes makes all operands equal.",
            likely=True,
        )
    elif primitives & _MOVING and names & _MOVING:
        yield Proposal(
            "head_split_order",
            "the same numbers are put in another order.",
            measured="Both sides read equal numbers; afterwards no axis of one corresponds to an axis of "
            "the other.",
        )


def _in_order(scene: Scene) -> Iterator[Trial]:
    """Yield the right side with the entries of its value in the left side's order."""
    patch = scene.patch
    ends = None if patch is None else (patch.left, patch.right)
    for pair in (p for p in scene.pairs if (p.left, p.right) == ends):
        if same_entries(pair.mine, pair.theirs):
            yield (Edit("right", {pair.right: pair.mine}),)


def unexplained(scene: Scene) -> Cause | None:
    """Return what is known of two lines that differ in a forward pass, where nothing that was tried on one of
    them makes the two sides agree."""
    here, there = scene.found.left, scene.found.right
    if scene.group.kind in ("updated", "gradient") or here is None or there is None:
        return None
    tried = ", ".join(f"{what} ({count})" for what, count in scene.tried.items() if count)
    evidence = f"Tried: {tried}." if tried else "Nothing that is known could be tried here."
    if scene.agrees and _within(scene):
        evidence += " With the result of the left program's line in its place, the results agree."
    sentence = "the two lines differ; no single change that was tried makes them agree."
    return told(scene, Proposal("other_function", sentence, measured=evidence, remedy=""))


def _within(scene: Scene) -> bool:
    """Return whether the values that were exchanged are made by the two lines."""
    patch, found = scene.patch, scene.found
    sides = (found.left, found.region_left, patch and patch.left), (
        found.right, found.region_right, patch and patch.right)  # fmt: skip
    return all(
        start is not None and any(value in s.outputs for s in (start.step, *same_line(start, region)))
        for start, region, value in sides
    )


_FIRST = 8  # steps of a line, among which its first statistic is; chosen, not measured
_MOVING = {"reshape", "transpose"}
_REDUCTIONS = {"mean", "sum", "var", "std"}


def _of_axes(scene: Scene, here: Start, there: Start) -> Iterator[Proposal]:
    """Yield the cause where the sides take different numbers of statistics of the same value; a product sums,
    too, and no statistic begins with one."""
    mine = _statistics(scene.left, here, scene.found.region_left)
    theirs = _statistics(scene.right, there, scene.found.region_right)
    product = "matmul" in (here.step.operation, there.step.operation)
    if product or mine is None or theirs is None or mine[1] != theirs[1] or mine[0] == theirs[0]:
        return
    (count, size), (other, _) = mine, theirs
    told_of = f"{count} statistics of {size // count} entries each, the right one {other} of {size // other}"
    yield Proposal("norm_axis", f"the left program takes {told_of}.")


def _statistics(side: Side, start: Start, region: Iterable[Step]) -> tuple[int, int] | None:
    """Return how many sums or means a line takes first, and of how many entries."""
    for step in same_line(start, region)[:_FIRST]:
        sizes = [int(np.prod(side.shapes[v], dtype=int)) for v in (step.outputs[0], step.inputs[0])]
        if kind(step) in _REDUCTIONS and sizes[0] < sizes[1]:
            return sizes[0], sizes[1]
    return None


def by_lack(scene: Scene) -> Iterator[Proposal]:
    """Propose to add the operation that one side lacks."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None or scene.patch is None or here.missing == there.missing:
        return
    name, has, lacks = ("left", here, there) if there.missing else ("right", there, here)
    value, made = scene.patch.right, scene.patch.left
    if name == "right":
        value, made = made, value
    if lacks.value != value:
        return
    steps = leading_steps(made, (s for s in scene.region(name) if s.index >= has.step.index))
    found = _of_missing(scene, [s for s in steps if not quiet(s)])
    if found.code != "other_function":
        edit = Edit(scene.patch.side, scene.patch.values)
        yield replace(found, trials=[(edit,)], change="With what the other program computes there")


def _of_missing(scene: Scene, steps: Sequence[Step] = ()) -> Proposal:
    """Return what is said where one side lacks steps of the other one: those at which that one begins to
    differ, unless they are given."""
    here, there = scene.found.left, scene.found.right
    assert here is not None
    assert there is not None
    name, has, lacks = ("left", here, there) if there.missing else ("right", there, here)
    side = scene.comparison.side(name)
    names = list(dict.fromkeys(_name(side, s) for s in steps or [has.step]))
    if _elsewhere(scene, name, lacks, steps or [has.step]):
        return Proposal(
            "other_function",
            f"both programs have {', '.join(names)} here, for different values.",
            measured="One of them combines with a common value what the other one combines with another.",
            remedy="",
        )
    code = (
        "mask_missing"
        if names[0] in ("where", "masked_fill")
        else "scale"
        if set(names) <= {"mul", "div"}
        else "dropout"
        if names[0] == "dropout"
        else "missing_operation"
        if name == "left"
        else "extra_operation"
    )
    return Proposal(
        code,
        f"the {OTHER[name]} program has no {', '.join(names)} here.",
        measured="Both sides compute the same up to this operation, and go on with the same one after it.",
    )


def _name(side: Side, step: Step) -> str:
    """Return what a side is said to do: what the user called, or what the step itself computes if that call
    has made what it reads, so that both sides have a part of the call."""
    line = (s for s in side.trace.steps[: step.index] if (s.place, s.module) == (step.place, step.module))
    before = leading_steps(step.outputs[0], (*line, step))[:-1]
    begun = any(in_one(s, step) for s in before)
    return primitive_of(step).rstrip("_") if begun else step.operation


def _elsewhere(scene: Scene, name: str, lacks: Start, steps: Iterable[Step]) -> bool:
    """Return whether the side that goes on without steps of the other one computes the same with another
    value: it has the operation, and what the common value is combined with, too."""
    side, other = scene.comparison.side(name), scene.comparison.side(OTHER[name])
    known, met = scene.comparison.found.known(name), scene.comparison.found.known(OTHER[name])
    for step in steps:
        operands = {j for i in step.inputs if not side.neutral(i) for j in known.get(i, ())} - {lacks.value}
        for own in (s for s in other.trace.steps if operands.intersection(s.inputs)):
            if (kind(own), own.phase) == (kind(step), step.phase) and not any(o in met for o in own.outputs):
                return True
    return False


# --- sums ---------------------------------------------------------------------------------------------------

# Of the steps of a line, so many are looked at, and of an array so many axes, which have 15 sums. Chosen, not
# measured.
_FIRST_SUMS, _MOST_AXES = 4, 4


def _by_sum(scene: Scene) -> Iterator[Proposal]:
    """Find a value of one line that is the sum or mean of the other line's over some axes."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None or here.missing or there.missing or scene.group.kind not in _KINDS:
        return
    mine = _reduced(scene.left, here, scene.found.region_left)
    theirs = _reduced(scene.right, there, scene.found.region_right)
    for name, keeps, sums in (("left", mine, theirs), ("right", theirs, mine)) if scene.agrees else ():
        for x, y in ((x, y) for x in keeps for y in sums if 1 < y.size < x.size):
            how = next((h for h, z in _summed(x) if _same(z, y)), None)
            if how is not None:
                yield Proposal(
                    "reduction",
                    f"the other program takes {how} of what the {name} one keeps apart, "
                    f"{y.size} values of {x.size}.",
                    measured="With what the left program computes, the results agree.",
                )
                return


def _by_divisor(scene: Scene) -> Iterator[Proposal]:
    """Propose a count for a number by which one line divides a sum, such as a sum of weights."""
    patch = scene.patch
    if patch is None or not patch.agrees or scene.group.kind not in _KINDS:
        return
    ends = ((p.mine, p.theirs) for p in scene.pairs if (p.left, p.right) == (patch.left, patch.right))
    mine, theirs = next(ends, (None, None))
    for name, side, value, other in (
        ("right", scene.right, patch.right, mine),
        ("left", scene.left, patch.left, theirs),
    ):
        found = None if other is None or other.size != 1 else _divided(side, value, float(other.reshape(())))
        if found is not None:
            total, divisor, count = found
            yield Proposal(
                "reduction",
                f"the {name} program divides the sum by {divisor:.6g}, the other one by {count}.",
                [(Edit(name, {value: np.full(side.shapes[value], total / count)}),)],
                f"With {count} on the {name}",
            )


def _divided(side: Side, value: int, other: float) -> tuple[float, float, int] | None:
    """Return a sum, the number by which it was divided to give a value, and the count that gives another
    value; None if there is none."""
    producer = side.trace.values[value].producer
    step = None if producer is None else side.trace.steps[producer]
    if step is None or kind(step) != "div" or [side.shapes[i] for i in step.inputs] != [(), ()]:
        return None
    arrays = arrays_of(side, step.inputs)
    total, divisor = (float(arrays[i]) for i in step.inputs)
    count = round(total / other) if other else 0
    fits = count > 0 and count != divisor and abs(total - count * other) < SAME_MULTIPLE * abs(total)
    return (total, divisor, count) if fits else None


_KINDS = ("loss", "output")
_SUMMING = {"matmul", "mean", "sum"}


def _reduced(side: Side, start: Start, region: Iterable[Step]) -> list[Any]:
    """Return the first arrays that a line makes by sums over axes."""
    steps = [s for s in same_line(start, region)[:_FIRST_SUMS] if kind(s) in _SUMMING]
    return list(arrays_of(side, [o for s in steps for o in s.outputs if not side.neutral(o)]).values())


def _summed(x: Any) -> Iterator[tuple[str, Any]]:
    axes = range(min(x.ndim, _MOST_AXES))
    for count in range(1, len(axes) + 1):
        for over in combinations(axes, count):
            yield "the sum", x.sum(axis=over)
            yield "the mean", x.mean(axis=over)


def _same(a: Any, b: Any) -> bool:
    return bool(a.size == b.size and distance(fingerprint(a), fingerprint(b)) < SAME_MULTIPLE)
