"""Name the cause where one number differs: a parameter or buffer of one entry, or one that is computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.flow import size
from stablenum.diagnosis.diff.places.patches import Pair
from stablenum.diagnosis.diff.sides.equality import SAME_MULTIPLE
from stablenum.diagnosis.diff.sides.kinds import called, kind
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_number", "follows_number", "well_known"]

# A factor is compared with the ratios of so many numbers, of which there are 10 000: the more, the likelier
# one is near by accident. Chosen, not measured.
_MOST_NUMBERS = 100
# Each trial evaluates the right side once more. Chosen, not measured.
_MOST_TRIALS = 4


def by_number(scene: Scene) -> Iterator[Proposal]:
    """Give the right program the number that the left one holds in a parameter, buffer or argument of one
    entry, and see whether the results agree then."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None or here.missing or there.missing or scene.group.kind == "updated":
        return
    own = [_held(scene, name, start.step) for name, start in (("left", here), ("right", there))]
    for i, j in itertools.islice(itertools.product(*own), _MOST_TRIALS):
        mine, theirs = arrays_of(scene.left, [i])[i], arrays_of(scene.right, [j])[j]
        given = mine.astype(np.float64).reshape(theirs.shape)
        told = [_told(side, v, x) for side, v, x in ((scene.left, i, mine), (scene.right, j, theirs))]
        yield Proposal(
            "other_input",
            f"{called(here.step)} reads {told[0]} in the left program, and {told[1]} in the right one.",
            [(Edit("right", {j: given}),)],
            "With the number that the left program reads, the two sides agree.",
        )


def _held(scene: Scene, name: str, step: Step) -> list[int]:
    """Return the single numbers from outside that a step reads, or that only changed their form before, and
    that the other side does not have."""
    side, known = scene.comparison.side(name), scene.comparison.found.known(name)
    found, todo = list[int](), list(step.inputs)
    while todo:
        value = todo.pop(0)
        if value in known or size(side, value) != 1 or not side.prints[value].floating:
            continue
        producer = side.trace.values[value].producer
        if producer is not None:
            todo += side.trace.steps[producer].inputs
        elif side.trace.values[value].role in ("parameter", "buffer", "input"):
            found.append(value)
    return list(dict.fromkeys(found))


def _told(side: Side, value: int, array: np.ndarray) -> str:
    known = side.trace.values[value]
    return f"{known.role} {known.name}".strip() + f" = {float(array.reshape(-1)[0]):.6g}"


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
