"""Name the cause by giving an operation its operands in another way: transposed, exchanged, repeated."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice, product, takewhile
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.flow import OTHER
from stablenum.diagnosis.diff.frontier import Start, same_line
from stablenum.diagnosis.diff.kinds import LOOKUPS, called, kind, quiet
from stablenum.diagnosis.diff.scene import Scene, cause
from stablenum.diagnosis.diff.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = [
    "by_entries",
    "by_exchange",
    "by_flip",
    "by_input",
    "by_order",
    "by_repetition",
    "by_transposition",
]

_MOST_TRIALS = 6
_MOST_MODULES = 16
_MOST_READ = 3
_SAME = 1e-12
_SIDES = ("right", "left")
_COMBINES = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def _starts(scene: Scene) -> Iterator[tuple[str, Side, Start, tuple[Step, ...]]]:
    """Yield the sides that have an operation where the programs part in the forward pass, the right first."""
    for name in _SIDES:
        start = getattr(scene.found, name)
        if start is not None and not start.missing and scene.group.kind in ("loss", "output"):
            yield name, scene.comparison.side(name), start, getattr(scene.found, f"region_{name}")


def by_transposition(scene: Scene) -> Cause | None:
    """Transpose a square matrix that a product reads."""
    if any(kind(s.step) != "matmul" for *_, s, _ in _starts(scene)):
        return None
    for name, side, start, _ in _starts(scene):
        square = [i for i in start.step.inputs if _is_square(side, i)]
        for value, array in arrays_of(side, square).items():
            if scene.mends(name, {value: array.T.copy()}):
                return cause(
                    "transposed_weight",
                    f"the {name} program multiplies by the transposed of what the other one does.",
                    f"With {list(array.shape)} transposed on the {name}, the two sides agree.",
                    confirmed=True,
                )
    return None


def _is_square(side: Side, value: int) -> bool:
    shape = side.shapes[value]
    return len(shape) == 2 and shape[0] == shape[1] and side.trained[value]


def by_flip(scene: Scene) -> Cause | None:
    """Flip the kernel that a convolution reads."""
    for name, side, start, _ in _starts(scene):
        for value, roles in zip(start.step.inputs, start.step.roles, strict=False):
            window = [axis for axis, role in enumerate(roles) if role.startswith("window")]
            if not window or not side.trained[value] or value not in scene.comparison.found.known(name):
                continue
            array = arrays_of(side, [value])[value]
            if scene.mends(name, {value: np.flip(array, tuple(window)).copy()}):
                return cause(
                    "flipped_kernel",
                    f"the {name} program convolves with the flipped kernel of the other one.",
                    f"With the kernel {list(array.shape)} flipped on the {name}, the two sides agree.",
                    confirmed=True,
                )
    return None


def by_order(scene: Scene) -> Cause | None:
    """Give the right program's convolution the images of the left one, whose entries are the same in another
    order: flipped, reshaped in another layout, or with channels put together the other way round."""
    starts = [start.step for *_, start, _ in _starts(scene)]
    if len(starts) < 2:
        return None
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
        if array.shape == own.shape and not np.allclose(array, own) and scene.mends("right", {j: array}):
            return cause(
                "entry_order",
                "the convolution reads the same numbers in another order.",
                "Sorted, they are equal; in the order of the left program, the two sides agree.",
                confirmed=True,
            )
    return None


def _of_images(roles: Sequence[str]) -> bool:
    return "batch" in roles and any(role.startswith("window") for role in roles)


def by_input(scene: Scene) -> Cause | None:
    """Say which other values one side reads in the same operation, or in the same function of the user's: one
    that reads another common value beside."""
    starts = {name: (side, start.step) for name, side, start, _ in _starts(scene)}
    for inner in product((True, False), repeat=2) if len(starts) == 2 else ():
        calls = dict(zip(_SIDES, inner, strict=True))
        reads = {name: _read_by_call(*starts[name], inner=i) for name, i in calls.items()}
        common = {name: _met(scene, name, reads[OTHER[name]][1]) for name in calls}
        kept = {name: _unmet_parameters(scene, name, reads[name][0]) for name in calls}
        reads = {name: _read_by_call(*starts[name], common[name], inner=i) for name, i in calls.items()}
        reads = {name: (read | kept[name], made) for name, (read, made) in reads.items()}
        own = {name: _read_alone(scene, name, reads) for name in _SIDES}
        alike = called(starts["left"][1]) == called(starts["right"][1]) or _share(scene, reads)
        if alike and 0 < len(own["left"]) == len(own["right"]) <= _MOST_READ:
            here, there = (" and ".join(_told(starts[n][0], v) for v in own[n]) for n in OTHER)
            tried = len(own["left"]) == 1 and _given(scene, own["left"][0], own["right"][0])
            return _of_inputs(scene, called(starts["left"][1]), here, there, tried=tried)
    return None


def _given(scene: Scene, mine: int, theirs: int) -> bool:
    """Return whether the line of the right program gives what that of the left one does, once it reads its
    own counterpart of what that reads."""
    for value in scene.comparison.found.known("left").get(mine, ()):
        if scene.right.shapes[value] != scene.right.shapes[theirs]:
            continue
        array = arrays_of(scene.right, [value])[value]
        if scene.mends("right", {theirs: array}) or _combined(scene, theirs, array):
            return True
    return False


def _combined(scene: Scene, value: int, array: Any) -> bool:
    """Return whether a sum or product of two values is that of the left side with another one of them: what
    else is made of the one that it reads stays as it is."""
    here, there = scene.found.left, scene.found.right
    combine = None if there is None else _COMBINES.get(kind(there.step))
    if here is None or there is None or combine is None or len(there.step.inputs) != 2:
        return False
    arrays = [array if i == value else scene.arrays([i])[i] for i in there.step.inputs]
    mark, end = fingerprint(combine(*arrays)), here.step.outputs[0]
    return value in there.step.inputs and distance(mark, scene.left.prints[end]) <= scene.left.tolerance[end]


def _share(scene: Scene, reads: Mapping[str, tuple[set[int], set[int]]]) -> bool:
    """Return whether both calls read a common value."""
    return any(not reads["left"][0].isdisjoint(scene.shared.get(j, ())) for j in reads["right"][0])


def _of_inputs(scene: Scene, name: str, here: str, there: str, *, tried: bool) -> Cause:
    agrees = scene.patch is not None and scene.patch.agrees
    told = "With what the left program computes there, the results agree." if agrees else ""
    return cause(
        "other_input",
        f"{name} reads {here} in the left program, and {there} in the right one.",
        "With the value that the left program reads, the two lines give the same." if tried else told,
        confirmed=agrees or tried,
    )


def by_entries(scene: Scene) -> Cause | None:
    """Say that both sides look up other entries of the same table."""
    starts = {name: (side, start.step) for name, side, start, _ in _starts(scene)}
    if len(starts) < 2 or any(kind(step) not in LOOKUPS for _, step in starts.values()):
        return None
    (there, theirs), (here, mine) = starts["right"], starts["left"]
    if not any(not set(mine.inputs).isdisjoint(scene.shared.get(j, ())) for j in theirs.inputs):
        return None
    indices = [_indices(side, step) for side, step in ((here, mine), (there, theirs))]
    if any(i is None for i in indices) or indices[0].shape != indices[1].shape:
        return None
    count, agrees = int((indices[0] != indices[1]).sum()), scene.patch is not None and scene.patch.agrees
    return None if not count else cause(
        "other_input",
        f"the two sides look up other entries of the same table, at {count} of {indices[0].size} places.",
        "With the entries of the left program, the results agree." if agrees else "",
        confirmed=agrees,
    )  # fmt: skip


def _indices(side: Side, step: Step) -> Any:
    """Return the whole numbers that a step reads, in one row; None if there is not one array of them."""
    whole = [v for v in step.inputs if not side.prints[v].floating and side.shapes[v]]
    return arrays_of(side, whole)[whole[0]].reshape(-1) if len(whole) == 1 else None


def _met(scene: Scene, name: str, values: set[int]) -> set[int]:
    """Return the values of a side that are equal to some of the other one."""
    known = scene.comparison.found.known(OTHER[name])
    return {v for value in values for v in known.get(value, ())}


def _unmet_parameters(scene: Scene, name: str, values: set[int]) -> set[int]:
    """Return the parameters that only one side has: what is made with them may yet be equal to a value of the
    other side, as with a scale of ones."""
    known, side = scene.comparison.found.known(name), scene.comparison.side(name)
    return {v for v in values if v not in known and side.trace.values[v].role == "parameter"}


def _read_by_call(
    side: Side, step: Step, common: Collection[int] = (), *, inner: bool
) -> tuple[set[int], set[int]]:
    """Return the telling values from which the call to which a step belongs makes its last value, and with
    them what it makes on the way.

    Args:
        side, step: the step.
        common: values that the call reads, rather than what they are made of, even if it makes them.
        inner: whether the call is that of its line, rather than that of the user's function around it.
    """
    steps, found, seen = side.trace.steps, set[int](), set[int]()
    if not inner and len(step.frames) < 2:
        return found, seen  # the whole program
    following = islice(steps, step.index + 1, None)
    *_, last = (step, *takewhile(lambda s: _in_call(s, step, inner=inner), following))
    todo = list(last.inputs)
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = side.trace.values[value].producer
        if value not in common and producer is not None and _in_call(steps[producer], step, inner=inner):
            todo += steps[producer].inputs
        elif not side.neutral(value) or side.trace.values[value].role == "parameter":
            found.add(value)
    return found, seen


def _in_call(one: Step, step: Step, *, inner: bool) -> bool:
    if one.module != step.module:
        return False
    return one.place == step.place if inner else len(step.frames) > 1 and one.frames[:-1] == step.frames[:-1]


def _read_alone(scene: Scene, name: str, read: Mapping[str, tuple[set[int], set[int]]]) -> list[int]:
    """Return what the call of one side reads, and the other side has but neither reads nor makes there;
    parameters also if the other side does not have them."""
    known, side = scene.comparison.found.known(name), scene.comparison.side(name)
    other, further = scene.comparison.side(OTHER[name]), read[OTHER[name]][1]

    def alone(value: int) -> bool:
        if value in known:
            return further.isdisjoint(known[value])
        parameter, mark = side.trace.values[value].role == "parameter", side.prints[value]
        return parameter and not any(distance(mark, other.prints[v]) <= _SAME for v in further)

    return sorted(v for v in read[name][0] if alone(v))


def _told(side: Side, value: int) -> str:
    known = side.trace.values[value]
    if known.producer is None:
        return f"{known.role} {known.name}".strip()
    step = side.trace.steps[known.producer]
    line = "" if step.place is None else f", line {step.place.line}"
    return f"the value of {step.operation}{line}"


def by_exchange(scene: Scene) -> Cause | None:
    """Exchange two values of one shape that a line reads."""
    for name, side, start, region in _starts(scene):
        line = same_line(start, region)
        made = {o for s in line for o in s.outputs}
        read = dict.fromkeys(i for s in line for i in s.inputs if i not in made and not side.neutral(i))
        pairs = [p for p in combinations(read, 2) if side.shapes[p[0]] == side.shapes[p[1]]]
        arrays = arrays_of(side, {v for p in pairs[:_MOST_TRIALS] for v in p})
        for a, b in pairs[:_MOST_TRIALS]:
            if scene.mends(name, {a: arrays[b], b: arrays[a]}) or _mends_all(scene, name, start.step, (a, b)):
                return _exchanged(side, a, b, name)
    return None


def _mends_all(scene: Scene, name: str, step: Step, read: tuple[int, int]) -> bool:
    """Return whether the results agree if two values that a step reads are exchanged, and likewise in all
    calls of its line, such as those of several layers."""
    if not set(read) <= set(step.inputs):
        return False
    at = [step.inputs.index(v) for v in read]
    trace, comparison = scene.comparison.side(name).trace, scene.comparison
    own = step.place, step.primitive, step.phase, len(step.inputs)
    calls = [s for s in trace.steps if (s.place, s.primitive, s.phase, len(s.inputs)) == own][:_MOST_MODULES]
    for call in calls if len(calls) > 1 else ():
        a, b = (call.inputs[k] for k in at)
        arrays = arrays_of(comparison.side(name), {a, b})
        if arrays[a].shape != arrays[b].shape:
            return False
        comparison = comparison.with_values(name, {a: arrays[b], b: arrays[a]}, until=scene.group)
    return len(calls) > 1 and comparison.agrees(scene.group)


def _exchanged(side: Side, a: int, b: int, name: str) -> Cause:
    parts = _whole(side, a) is not None and _whole(side, a) == _whole(side, b)
    return cause(
        "head_split_order" if parts else "other_function",
        "the two programs use the parts of one value the other way round."
        if parts
        else "the two programs use two values the other way round.",
        f"With the two exchanged on the {name}, the results agree.",
        confirmed=True,
    )


def _whole(side: Side, value: int) -> int | None:
    """Return the value that another one is a part of."""
    producer = side.trace.values[value].producer
    step = None if producer is None else side.trace.steps[producer]
    return step.inputs[0] if step is not None and quiet(step) and step.inputs else None


def by_repetition(scene: Scene) -> Cause | None:
    """Repeat each entry in turn where a side repeats them all one after the other, or the reverse."""
    for name, _, start, region in _starts(scene):
        function = _function(start.step)
        steps = {o: s for s in region for o in s.outputs if _function(s) == function}
        merges = [o for o, s in steps.items() if kind(s) == "reshape"]
        comparison, turned = scene.comparison, False
        for module in list(dict.fromkeys(steps[o].module for o in merges))[:_MOST_MODULES]:
            side, values = comparison.side(name), dict[int, Any]()
            for value in (o for o in merges if steps[o].module == module):
                values.update(_turned(side, value, steps))
            if values:
                turned, comparison = True, comparison.with_values(name, values, until=scene.group)
        if turned and comparison.agrees(scene.group):
            return cause(
                "head_split_order",
                "one program repeats each entry in turn, the other one all of them one after the other.",
                f"With the other order on the {name}, the results agree.",
                confirmed=True,
            )
    return None


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
