"""Name the cause by giving an operation its operands in another way: transposed, exchanged, repeated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.by_value import same_entries
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial, calls_like, in_all_of
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.frontier import same_line
from stablenum.diagnosis.diff.places.mended_places import MOST_CALLS
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = [
    "by_exchange",
    "by_flip",
    "by_order",
    "by_repetition",
    "by_transposition",
]

# Each pair of values that is exchanged takes an evaluation. Chosen, not measured.
_MOST_TRIALS = 6


def by_transposition(scene: Scene) -> Iterator[Proposal]:
    """Transpose a square matrix that a product reads."""
    if any(kind(s.step) != "matmul" for *_, s, _ in scene.forward_starts()):
        return
    for name, side, start, _ in scene.forward_starts():
        square = [i for i in start.step.inputs if _is_square(side, i)]
        for value, array in arrays_of(side, square).items():
            yield Proposal(
                "transposed_weight",
                "one program multiplies by the transpose of what the other one multiplies by.",
                [(Edit(name, {value: array.T.copy()}),)],
                f"With {list(array.shape)} transposed on the {name}",
            )


def _is_square(side: Side, value: int) -> bool:
    shape = side.shapes[value]
    return len(shape) == 2 and shape[0] == shape[1] and side.trained[value]


def by_flip(scene: Scene) -> Iterator[Proposal]:
    """Flip the kernel that a convolution reads."""
    for name, side, start, _ in scene.forward_starts():
        for value, roles in zip(start.step.inputs, start.step.roles, strict=False):
            window = [axis for axis, role in enumerate(roles) if role.startswith("window")]
            if not window or not side.trained[value] or value not in scene.comparison.found.known(name):
                continue
            array = arrays_of(side, [value])[value]
            yield Proposal(
                "flipped_kernel",
                "one program convolves with the other one's kernel, flipped.",
                [(Edit(name, {value: np.flip(array, tuple(window)).copy()}),)],
                f"With the kernel {list(array.shape)} flipped on the {name}",
            )


def by_order(scene: Scene) -> Iterator[Proposal]:
    """Give the right program's convolution the images of the left one, whose entries are the same in another
    order: flipped, reshaped in another layout, or with channels put together the other way round."""
    starts = [start.step for *_, start, _ in scene.forward_starts()]
    if len(starts) < 2:
        return
    there, here = starts if scene.found.readers is None else reversed(scene.found.readers)
    left, right = scene.left, scene.right
    images = [
        [(v, r) for v, r in zip(s.inputs, s.roles, strict=False) if _of_images(r)] for s in (here, there)
    ]
    for (i, mine), (j, theirs) in zip(*images, strict=False):
        if j not in scene.shared or i not in scene.shared[j] or sorted(mine) != sorted(theirs):
            continue
        array = arrays_of(left, [i])[i].transpose([mine.index(role) for role in theirs])
        own = arrays_of(right, [j])[j]
        if array.shape == own.shape and same_entries(array, own) and not np.array_equal(array, own):
            yield Proposal(
                "entry_order",
                "the convolution reads the same numbers in another order.",
                [(Edit("right", {j: array}),)],
                "With the order of the left program",
                "Sorted, they are equal.",
            )


def _of_images(roles: Sequence[str]) -> bool:
    return "batch" in roles and any(role.startswith("window") for role in roles)


def by_exchange(scene: Scene) -> Iterator[Proposal]:
    """Exchange two values of one shape that a line reads."""
    for name, side, start, region in scene.forward_starts():
        line = same_line(start, region)
        made = {o for s in line for o in s.outputs}
        read = dict.fromkeys(i for s in line for i in s.inputs if i not in made and not side.neutral(i))
        pairs = [p for p in combinations(read, 2) if side.shapes[p[0]] == side.shapes[p[1]]]
        arrays = arrays_of(side, {v for p in pairs[:_MOST_TRIALS] for v in p})
        for a, b in pairs[:_MOST_TRIALS]:
            parts = _whole(side, a) is not None and _whole(side, a) == _whole(side, b)
            yield Proposal(
                "head_split_order" if parts else "other_function",
                "the two programs use the parts of one value the other way round."
                if parts
                else "the two programs use two values the other way round.",
                _exchanges(scene, name, start.step, {a: arrays[b], b: arrays[a]}),
                f"With the two exchanged on the {name}",
            )


def _exchanges(scene: Scene, name: str, step: Step, values: Mapping[int, Any]) -> Iterator[Trial]:
    """Yield the exchange of two values, and that of the operands of all calls of their line."""
    yield (Edit(name, values),)
    if values.keys() <= set(step.inputs):
        first, second = (step.inputs.index(v) for v in values)

        def exchanged(side: Side, call: Step) -> Mapping[int, Any]:
            a, b = call.inputs[first], call.inputs[second]
            arrays = arrays_of(side, {a, b})
            return {a: arrays[b], b: arrays[a]} if arrays[a].shape == arrays[b].shape else {}

        yield from in_all_of(scene, name, calls_like(scene, name, step), exchanged)


def _whole(side: Side, value: int) -> int | None:
    """Return the value that another one is a part of."""
    producer = side.trace.values[value].producer
    step = None if producer is None else side.trace.steps[producer]
    return step.inputs[0] if step is not None and quiet(step) and step.inputs else None


def by_repetition(scene: Scene) -> Iterator[Proposal]:
    """Repeat each entry in turn where a side repeats them all one after the other, or the reverse."""
    for name, _, start, region in scene.forward_starts():
        function = _function(start.step)
        steps = {o: s for s in region for o in s.outputs if _function(s) == function}
        merges = [o for o, s in steps.items() if kind(s) == "reshape"]
        comparison, values = scene.comparison, dict[int, Any]()
        for module in list(dict.fromkeys(steps[o].module for o in merges))[:MOST_CALLS]:
            side, new = comparison.side(name), dict[int, Any]()
            for value in (o for o in merges if steps[o].module == module):
                new.update(_turned(side, value, steps))
            if new:
                values.update(new)
                comparison = comparison.with_values(name, new, until=scene.group)
        if values:
            yield Proposal(
                "head_split_order",
                "one program repeats each entry in turn, the other one all of them one after the other.",
                [(Edit(name, values),)],
                f"With the other order on the {name}",
            )


def _function(step: Step) -> tuple[str, str] | None:
    """Return the function of the user's whose line calls a step."""
    return None if step.place is None else (step.place.file, step.place.function)


def _turned(side: Side, value: int, steps: Mapping[int, Step]) -> dict[int, Any]:
    """Return what a reshape gives if the axis along which entries were repeated before lies on the other side
    of its neighbour; nothing if it merges no such axis."""
    chain = list(_before(value, steps))
    repeats = next((s for s in chain if kind(s) == "broadcast"), None)
    if repeats is None:
        return {}
    wide, given = side.shapes[repeats.outputs[0]], side.shapes[repeats.inputs[0]]
    axes = [k for k, n in enumerate(wide) if len(given) == len(wide) and given[k] == 1 < n]
    shape = side.shapes[value]
    array = arrays_of(side, [repeats.outputs[0]])[repeats.outputs[0]]
    for axis in axes:
        for other in (axis - 1, axis + 1):
            merged = (*wide[: min(axis, other)], wide[axis] * wide[other], *wide[max(axis, other) + 1 :]) if (
                0 <= other < len(wide)) else ()  # fmt: skip
            if merged == tuple(shape):
                return {value: np.swapaxes(array, axis, other).reshape(shape)}
    return {}


def _before(value: int, steps: Mapping[int, Step]) -> Iterable[Step]:
    """Yield the steps that only moved a value, the last first."""
    while value in steps and quiet(steps[value]) and steps[value].inputs:
        yield steps[value]
        value = steps[value].inputs[0]
