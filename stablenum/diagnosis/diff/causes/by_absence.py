"""Name the cause where a line reads a parameter that nothing of the other program stands for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stablenum.diagnosis.diff.causes.scene import Scene, cause
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.frontier import same_line
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.sides import Side

__all__ = ["by_absence"]

# Without a bias, and without a scale.
_NEUTRAL = (0.0, 1.0)
# Each parameter takes an evaluation with either. Chosen, not measured.
_MOST_TRIALS = 4


def by_absence(scene: Scene) -> Cause | None:
    """Return the cause where only one side has a bias, a scale or the like, and try it: the sides agree if
    the parameter changes nothing."""
    for name, value, parameter in _alone(scene):
        side, other = scene.comparison.side(name), "right" if name == "left" else "left"
        shape = side.shapes[value]
        numbers = (n for n in _NEUTRAL if scene.mends(name, {value: np.full(shape, n)}))
        number = next(numbers, None)
        told = "" if number is None else f"With {number:g} in its place, the two sides agree."
        return cause(
            "missing_operation" if name == "left" else "extra_operation",
            f"the {name} program reads {parameter} here, and nothing in the {other} one stands for it.",
            told,
            confirmed=number is not None,
            remedy=f"Give both programs the parameter {parameter}, or neither.",
        )
    return None


def _alone(scene: Scene) -> Iterator[tuple[str, int, str]]:
    """Yield the side, value and name of each parameter that a line reads and that has no counterpart."""
    origins = scene.comparison.weights.origins
    mapped = {"left": {n for o in origins.values() for n in o.names}, "right": set(origins)}
    found = 0
    for name, side, start, region in scene.forward_starts():
        read = (i for s in same_line(start, region) for i in s.inputs)
        for value in dict.fromkeys(_unmoved(side, i) for i in read):
            known = side.trace.values[value]
            if known.role == "parameter" and known.name not in mapped[name] and found < _MOST_TRIALS:
                found += 1
                yield name, value, known.name


def _unmoved(side: Side, value: int) -> int:
    """Return the value that another one holds, moved or repeated."""
    producer = side.trace.values[value].producer
    while producer is not None and quiet(side.trace.steps[producer]) and side.trace.steps[producer].inputs:
        value = side.trace.steps[producer].inputs[0]
        producer = side.trace.values[value].producer
    return value
