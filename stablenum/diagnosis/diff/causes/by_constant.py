"""Name the cause by giving one side a constant of the other one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.frontier import Start, same_line
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_constant", "code_of_constant", "numbers_near", "numbers_of_update", "strangeness"]

# Each trial evaluates a side once more. There are as many as there are pairs of numbers, the likeliest first.
# Chosen, not measured.
_MOST_TRIALS = 16
# Smaller numbers are epsilons, and any two of them may be meant to be one.
_LARGEST_EPSILON = 1e-2
# The operations of an update that are looked at for numbers, one after another. Chosen, not measured.
_MOST_STEPS = 200
# Larger numbers are masks, or infinite.
_LARGEST = 1e30
_SAME_NUMBER = "Use the same number on both sides."
_FACTORS = {"div", "mul"}
_NORMS = ("norm", "normalize", "standard", "sqrt", "var", "std")


def by_constant(scene: Scene) -> Iterator[Proposal]:
    """Give one side a constant of the other side, and see whether the results agree then."""
    mine, theirs = numbers_near(scene, "left"), numbers_near(scene, "right")
    numbers = {"left": {n for n, _ in mine.values()}, "right": {n for n, _ in theirs.values()}}
    # Numbers that both sides have come last: one of them may be another number that is the same by chance.
    trials = sorted(
        ((new in numbers[side]) + (number in numbers[other]), strangeness(number, new), side, value, number,
         new, step.index, step)
        for side, other, own in (("right", "left", theirs), ("left", "right", mine))
        for value, (number, step) in own.items()
        for new in numbers[other] - {number}
        if value >= 0 and new * number
    )  # fmt: skip
    for *_, side, value, number, new, _, step in trials[:_MOST_TRIALS]:
        lines = _of_line(scene.comparison.side(side), value, step)
        left, right = (new, number) if side == "right" else (number, new)
        code = code_of_constant(step, scene, side, (number, new))
        yield Proposal(
            code,
            f"in {step.operation}, the left program uses {left:g} and the right one {right:g}.",
            [(Edit(side, dict.fromkeys(values, np.float64(new))),) for values in lines],
            f"With {new:g} in place of {number:g} on the {side}",
            remedy=_SAME_NUMBER if code == "other_function" else None,
            same=(left, right),
            numbers=(left, right),
        )


def _of_line(side: Side, value: int, step: Step) -> list[set[int]]:
    """Return a constant with those that hold its number in other calls of its line, as of several layers or
    training steps: in the same operation, and in all of the line, as a limit that is also a slope."""
    own = step.place, step.library, step.phase
    if step.place is None and not step.library:
        return [{value}]
    calls = [s for s in side.trace.steps if (s.place, s.library, s.phase) == own]
    found = []
    for some in ([s for s in calls if s.operation == step.operation], calls):
        read = {i for s in some for i in s.inputs if _is_constant(side, i)}
        found.append({value} | {i for i in read if _number(side, i) == _number(side, value)})
    return found[:1] if found[0] == found[1] else found


def _number(side: Side, value: int) -> tuple[int, float]:
    return side.prints[value].entries, side.prints[value].total


def _is_constant(side: Side, value: int) -> bool:
    """Return whether a value is a constant, or one in another format."""
    producer = side.trace.values[value].producer
    if producer is None:
        return side.trace.values[value].role == "constant"
    step = side.trace.steps[producer]
    return not side.depends[value] and len(step.inputs) == 1 and quiet(step)


def strangeness(number: float, new: float) -> float:
    """Return how unlikely it is that one number was meant to be the other: small ones are epsilons, and whole
    ones are axes and sizes."""
    if 0 < number < _LARGEST_EPSILON and 0 < new < _LARGEST_EPSILON:
        return 0.0
    whole = (number == round(number)) + (new == round(new))
    return 1.0 + whole + (number * new <= 0)


def numbers_near(scene: Scene, name: str) -> dict[int, tuple[float, Step]]:
    """Return the numbers near the difference: by the value that holds each, or by a negative number for one
    that is part of a call and cannot be replaced."""
    side: Side = getattr(scene, name)
    start = getattr(scene.found, name)
    region = getattr(scene.found, f"region_{name}")
    if start is None:
        return {}
    if start.missing:  # what follows there may do it in another way
        start = next((Start(s) for s in region if start.value in s.inputs), start)
    near = region[:_MOST_STEPS] if scene.group.kind == "updated" else same_line(start, region)
    return _numbers_in(side, near)


def numbers_of_update(side: Side) -> set[float]:
    """Return the sizes of the numbers in the update of a side, such as the decay rates of its moments."""
    steps = [s for s in side.trace.steps if s.phase == "update"]
    return {abs(n) for n, _ in _numbers_in(side, steps).values()}


def _numbers_in(side: Side, near: Iterable[Step]) -> dict[int, tuple[float, Step]]:
    found: dict[int, tuple[float, Step]] = {}
    for step in near:
        for value in step.inputs:
            mark = side.prints[value]
            if _is_constant(side, value) and mark.entries == 1:
                found[value] = (mark.total, step)
        for number in step.scalars:
            if side.program.framework != "jax" and number == number and abs(number) < _LARGEST:
                found[-len(found) - 1] = (number, step)
    return found


def code_of_constant(step: Step, scene: Scene, side: str, numbers: tuple[float, float]) -> str:
    """Return the code of a cause where a step of a side computes with one of two numbers."""
    small = all(0 < abs(n) <= _LARGEST_EPSILON for n in numbers)
    if scene.group.kind == "updated":
        return "epsilon_value" if step.primitive == "add" else "scale"
    of_data = not any(scene.comparison.side(side).trained[i] for i in step.inputs)
    regions = (*scene.found.region_left, *scene.found.region_right)
    classes = any("log_softmax" in s.operation or "cross_entropy" in s.operation for s in regions)
    if "cross_entropy" in step.operation or (classes and of_data and step.primitive == "add"):
        return "label_smoothing"
    if small and (any(n in step.operation for n in _NORMS) or step.primitive == "add"):
        return "epsilon_value"
    if "mean" in step.operation:
        return "reduction"
    return "scale" if step.operation in _FACTORS else "other_function"
