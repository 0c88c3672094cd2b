"""Name the cause by the operations of the two sides: what only one of them has, and what they sum over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from stablenum.diagnosis.diff.causes.by_sum import by_divisor, by_sum
from stablenum.diagnosis.diff.causes.by_value import same_entries
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial, told
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.frontier import Start, same_line
from stablenum.diagnosis.diff.places.regions import leading_steps
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_lack", "by_structure", "unexplained"]


def by_structure(scene: Scene) -> Iterator[Proposal]:
    """Say what the operations of the two sides suggest."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None:
        return
    if here.missing or there.missing:
        yield _of_missing(here, there)
        return
    reduced = [*_of_axes(scene, here, there)] or [*by_sum(scene)] or [*by_divisor(scene)]
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
    if here is None or there is None or scene.patch is None:
        return
    has, values = (here, there) if there.missing else (there, here)
    value, made = scene.patch.right, scene.patch.left
    region = scene.found.region_left
    if not there.missing:
        value, made, region = made, value, scene.found.region_right
    if not values.missing or has.missing or values.value != value:
        return
    steps = leading_steps(made, (s for s in region if s.index >= has.step.index))
    operations = dict.fromkeys(s.operation for s in steps if not quiet(s))
    found = _of_missing(here, there, list(operations))
    yield replace(
        found,
        trials=[(Edit(scene.patch.side, scene.patch.values),)],
        change="With what the other program computes there",
    )


def _of_missing(here: Start, there: Start, operations: Sequence[str] = ()) -> Proposal:
    side, step = ("right", here.step) if there.missing else ("left", there.step)
    names = list(operations) or [step.operation]
    code = (
        "mask_missing"
        if names[0] in ("where", "masked_fill")
        else "scale"
        if set(names) <= {"mul", "div"}
        else "dropout"
        if names[0] == "dropout"
        else "missing_operation"
        if side == "right"
        else "extra_operation"
    )
    return Proposal(
        code,
        f"the {side} program has no {', '.join(names)} here.",
        measured="Both sides compute the same up to this operation, and go on with the same one after it.",
    )
