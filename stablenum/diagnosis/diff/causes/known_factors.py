"""Say of a factor between two values whether it is one that programs are written with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.flow import size
from stablenum.diagnosis.diff.places.patches import Pair
from stablenum.diagnosis.diff.sides.equality import SAME_MULTIPLE
from stablenum.diagnosis.diff.sides.kinds import kind
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of

__all__ = ["follows_number", "well_known"]

# A factor is compared with the ratios of so many numbers, of which there are 10 000: the more, the likelier
# one is near by accident. Chosen, not measured.
_MOST_NUMBERS = 100


def follows_number(scene: Scene, pair: Pair, factor: float) -> str:
    """Return the numbers by which both sides multiply the same if they compute them otherwise: two numbers
    always have a factor. "" if they do not, and for a factor that is well known."""
    told = []
    for name, value in (("left", pair.left), ("right", pair.right)):
        side = scene.comparison.side(name)
        number = None if well_known(scene, factor) else _number(scene, name, value)
        if number is None:
            return ""
        array = arrays_of(side, [number])[number]
        told.append(f"{float(array.reshape(-1)[0]):.6g} on the {name}")
    return " and ".join(told)


def _number(scene: Scene, name: str, value: int) -> int | None:
    """Return the number of a side's own, computed from its values, by which it multiplies to give one."""
    side, known = scene.comparison.side(name), scene.comparison.found.known(name)
    producer = side.trace.values[value].producer
    step = None if producer is None else side.trace.steps[producer]
    if step is None or kind(step) not in ("mul", "div"):
        return None
    single = (i for i in step.inputs if size(side, i) == 1 and side.depends[i] and i not in known)
    return next(single, None)


def well_known(scene: Scene, factor: float) -> bool:
    """Return whether a factor is one that programs are written with: a power of two, or a ratio of two sizes
    or written numbers, or its root."""
    size_of = abs(factor)
    if not size_of or not math.isfinite(size_of):
        return False
    if abs(math.log2(size_of) - round(math.log2(size_of))) < SAME_MULTIPLE:
        return True
    numbers = np.array(sorted(_numbers(scene))[:_MOST_NUMBERS])
    ratios = (numbers[:, None] / numbers).reshape(-1)
    return any(bool((np.abs(ratios / f - 1) < SAME_MULTIPLE).any()) for f in (size_of, size_of**2))


def _numbers(scene: Scene) -> set[float]:
    """Return 1, the sizes of both sides, and the absolute values of the numbers that are written in them."""
    found = {1.0}
    for side in (scene.left, scene.right):
        found |= {float(n) for shape in side.shapes for n in shape if n}
        found |= {n for n in _written(side) if n and math.isfinite(n)}
    return found


def _written(side: Side) -> Iterator[float]:
    constants: Iterable[int] = (v.id for v in side.trace.values if v.role == "constant")
    yield from (float(abs(side.prints[v].total)) for v in constants if side.prints[v].entries == 1)
    yield from (float(abs(n)) for s in side.trace.steps for n in s.scalars)
