"""Name the cause by the operations of the two sides: what only one of them has, and what they sum over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stablenum.diagnosis.diff.causes.by_sum import by_divisor, by_sum
from stablenum.diagnosis.diff.causes.scene import Scene, cause
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.frontier import Start, same_line
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_lack", "by_structure"]


def by_structure(scene: Scene) -> Cause | None:
    here, there = scene.found.left, scene.found.right
    if here is None or there is None:
        return None
    if here.missing or there.missing:
        return _of_missing(here, there)
    axes = _of_axes(scene, here, there)
    sums = axes or by_sum(scene) or by_divisor(scene)
    if sums is not None:
        return sums
    if scene.found.readers is not None and not {here.step.primitive, there.step.primitive} & _MOVING:
        return cause(
            "entry_order",
            "the same numbers are in another order relative to what they are combined with.",
            "Sorted, they are equal; unsorted, no permutation of the axes makes all operands equal.",
            confirmed=scene.agrees,
        )
    names = {here.step.operation, there.step.operation}
    if {here.step.primitive, there.step.primitive} & _MOVING and names & _MOVING:
        return cause(
            "head_split_order",
            "the same numbers are put in another order.",
            "Both sides read equal numbers; afterwards no axis of one corresponds to an axis of the other.",
            confirmed=False,
        )
    return _other(scene)


def _other(scene: Scene) -> Cause | None:
    """Return what is known of two lines that differ in a forward pass, where nothing that was tried on one of
    them makes the two sides agree."""
    if scene.group.kind in ("updated", "gradient"):
        return None
    agrees = scene.agrees and _within(scene)
    return cause(
        "other_function",
        "the two lines differ; no single change that was tried makes them agree.",
        _TRIED
        + (" With the result of the left program's line in its place, the results agree." if agrees else ""),
        confirmed=False,
        remedy="",
    )


def _within(scene: Scene) -> bool:
    """Return whether the values that were exchanged are made by the two lines."""
    patch, found = scene.patch, scene.found
    sides = (found.left, found.region_left, patch and patch.left), (
        found.right, found.region_right, patch and patch.right)  # fmt: skip
    return all(
        start is not None and any(value in s.outputs for s in (start.step, *same_line(start, region)))
        for start, region, value in sides
    )


_TRIED = (
    "Tried: known functions and their settings, the other side's constants and parameters, operands "
    "exchanged, transposed, flipped or repeated, masks, sums and factors."
)
_FIRST = 8  # steps of a line, among which its first statistic is; chosen, not measured
_MOVING = {"reshape", "transpose"}
_REDUCTIONS = {"mean", "sum", "var", "std"}


def _of_axes(scene: Scene, here: Start, there: Start) -> Cause | None:
    """Return the cause where the sides take different numbers of statistics of the same value."""
    if "matmul" in (
        here.step.operation,
        there.step.operation,
    ):  # sums of products, which no statistic begins with
        return None
    mine = _statistics(scene.left, here, scene.found.region_left)
    theirs = _statistics(scene.right, there, scene.found.region_right)
    if mine is None or theirs is None or mine[1] != theirs[1] or mine[0] == theirs[0]:
        return None
    (count, size), (other, _) = mine, theirs
    told = f"{count} statistics of {size // count} entries each, the right one {other} of {size // other}"
    return cause("norm_axis", f"the left program takes {told}.", "", confirmed=False)


def _statistics(side: Side, start: Start, region: Iterable[Step]) -> tuple[int, int] | None:
    """Return how many sums or means a line takes first, and of how many entries."""
    for step in same_line(start, region)[:_FIRST]:
        sizes = [int(np.prod(side.shapes[v], dtype=int)) for v in (step.outputs[0], step.inputs[0])]
        if kind(step) in _REDUCTIONS and sizes[0] < sizes[1]:
            return sizes[0], sizes[1]
    return None


def by_lack(scene: Scene) -> Cause | None:
    """Return the cause where one side lacks an operation, if the results agree with it."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None or scene.patch is None or not scene.agrees:
        return None
    has, values = (here, there) if there.missing else (there, here)
    value, made = scene.patch.right, scene.patch.left
    region = scene.found.region_left
    if not there.missing:
        value, made, region = made, value, scene.found.region_right
    if not values.missing or has.missing or values.value != value:
        return None
    found = _of_missing(here, there, list(dict.fromkeys(s.operation for s in _up_to(made, has, region))))
    return cause(
        found.code,
        found.sentence,
        "With what the other program computes there, the results agree.",
        confirmed=True,
    )


def _up_to(value: int, start: Start, region: Iterable[Step]) -> list[Step]:
    """Return the steps from a start that lead to a value and do more than move entries."""
    steps = {o: s for s in region if s.index >= start.step.index for o in s.outputs}
    found, todo = dict[int, Step](), [value]
    while todo:
        step = steps.get(todo.pop())
        if step is not None and step.index not in found:
            found[step.index] = step
            todo += step.inputs
    return [s for _, s in sorted(found.items()) if not quiet(s)]


def _of_missing(here: Start, there: Start, operations: Sequence[str] = ()) -> Cause:
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
    return cause(
        code,
        f"the {side} program has no {', '.join(names)} here.",
        "Both sides compute the same up to this operation, and go on with the same one after it.",
        confirmed=False,
    )
