"""Name the cause where two layers normalise by different statistics, whatever scale and shift follow.

A layer's output is affine in the normalised values, channel by channel. So the statistics that a layer took
are known without its weights: of all formulas evaluated on what it reads, its output is affine in one alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.formulas.variants import Variant, code_of, numbers_of, variants_of
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.arrangement import chain_of
from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.places.patches import laid_out_like
from stablenum.diagnosis.diff.places.regions import STEPS_AHEAD
from stablenum.diagnosis.diff.sides.equality import SAME_FORMULA
from stablenum.diagnosis.diff.sides.kinds import functions_of
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_normalisation", "is_of_batch"]

# Of values that both calls read, so many pairs are looked at. Chosen, not measured.
_MOST_PAIRS = 4
# Of arrays that may be statistics, so many are paired: 12 pairs. Chosen, not measured.
_MOST_READ = 4
# A larger array, of 512 KiB in float64, is not normalised in all ways. Chosen, not measured.
_MOST_ELEMENTS = 2**16
_FAMILIES = {"group_norm", "layer_norm", "rms_norm"}
_BATCH = "batch_norm"


class _Layer(NamedTuple):
    """What a layer reads and computes on one side.

    Attributes:
        read: what it reads.
        values: what it computes with as many entries, by value.
    """

    read: Any
    values: dict[int, Any]

    def laid_out(self, like: Any) -> dict[int, Any]:
        """Return the values in the layout of another array of what is read; none if no layout leads there."""
        if self.read.shape == like.shape and _equal(self.read, like):
            return self.values
        for way in layouts(self.read.shape, like.shape, "other"):
            if _equal(self.read.transpose(way).reshape(like.shape), like):
                return {i: v.transpose(way).reshape(like.shape) for i, v in self.values.items()}
        return {}


def by_normalisation(scene: Scene) -> Iterator[Proposal]:
    """Propose the statistics by which the left side normalises what both read, with the right side's own
    scale and shift, if they are not the same."""
    if scene.group.kind not in ("loss", "output"):
        return
    for here, there in _layers(scene):
        like = here.read if here.read.ndim <= there.read.ndim else there.read
        mine, theirs = here.laid_out(like), there.laid_out(like)
        for axis in dict.fromkeys((1, like.ndim - 1)) if like.ndim > 1 else ():
            found = _compared(scene, like, mine, theirs, axis)
            if found is not None:
                yield found
                return


def _compared(
    scene: Scene, x: Any, mine: dict[int, Any], theirs: dict[int, Any], axis: int
) -> Proposal | None:
    if is_of_batch(scene):
        return _by_batch(scene, x, (mine, theirs), axis, _shifts(scene, x.shape[axis]))
    told = [v for v in variants_of(x) if v.family in _FAMILIES and v.values.shape == x.shape]
    tried = [v for v in told if _line(x, v.values, axis) is None]
    return _by_formula(scene, tried, mine, theirs, axis)


def _layers(scene: Scene) -> Iterator[tuple[_Layer, _Layer]]:
    """Yield what both calls read, with what each gives."""
    here, there, known = scene.found.left, scene.found.right, scene.shared
    if here is None or there is None:
        return
    mine, theirs = _call(here, scene.found.region_left), _call(there, scene.found.region_right)
    read = {i for s in mine for i in s.inputs}
    shared = [(i, j) for j in dict.fromkeys(j for s in theirs for j in s.inputs) for i in known.get(j, ())]
    for i, j in [(i, j) for i, j in shared if i in read and len(scene.right.shapes[j]) > 1][:_MOST_PAIRS]:
        layers = _layer(scene.left, i, mine), _layer(scene.right, j, theirs)
        if all(layer.read.size <= _MOST_ELEMENTS and np.isrealobj(layer.read) for layer in layers):
            yield layers


def _call(start: Start, region: Iterable[Step]) -> list[Step]:
    """Return the steps of a line, and those that follow in the same call of its function."""
    step = start.step
    return [
        s
        for s in region
        if s.index >= step.index
        and s.module == step.module
        and (s.place == step.place or s.frames[:-1] == step.frames[:-1])
    ][:STEPS_AHEAD]


def _layer(side: Side, value: int, line: Sequence[Step]) -> _Layer:
    size = math.prod(side.shapes[value])
    made = [o for s in line for o in s.outputs if math.prod(side.shapes[o]) == size and not side.neutral(o)]
    arrays = arrays_of(side, {value, *made})
    return _Layer(arrays[value], {o: arrays[o].reshape(side.shapes[value]) for o in made})


def is_of_batch(scene: Scene) -> bool:
    """Return whether a side begins to differ in a batch norm."""
    starts = [s.step for s in (scene.found.left, scene.found.right) if s is not None]
    return any(_BATCH in functions_of(step) for step in starts)


def _by_formula(
    scene: Scene, tried: Sequence[Variant], mine: dict[int, Any], theirs: dict[int, Any], axis: int
) -> Proposal | None:
    """Return the proposal where two formulas of one family give each side's value up to scale and shift."""
    here = list(_fitting(tried, mine, axis))
    there = list(_fitting(tried, theirs, axis)) if here else []
    if {str(v) for v, _ in here} & {str(v) for v, _ in there}:
        return None
    for (a, _), (b, value) in ((a, b) for a in here for b in there if a[0].family == b[0].family):
        slope, shift = _line(b.values, theirs[value], axis) or (1.0, 0.0)
        own = arrays_of(scene.right, [value])[value]
        new = laid_out_like(slope * a.values + shift, theirs[value], own)
        return Proposal(
            code_of(a, b),
            f"the left program computes {a}, the right one {b}.",
            None if new is None else [(Edit("right", {value: new}),)],
            "With the left one's statistics on the right",
            "Both formulas were evaluated on what the layer reads; each gives its side's value, up to one "
            "scale and shift for each channel.",
            numbers=numbers_of(a, b),
        )
    return None


def _fitting(tried: Sequence[Variant], values: dict[int, Any], axis: int) -> Iterator[tuple[Variant, int]]:
    """Yield the formulas in which a value is affine, channel by channel, with the last such value."""
    for v in tried:
        shaped = [i for i, y in values.items() if y.shape == v.values.shape]
        fitting = [i for i in shaped if _line(v.values, values[i], axis) is not None]
        if fitting:
            yield v, fitting[-1]


def _by_batch(
    scene: Scene, x: Any, values: tuple[dict[int, Any], dict[int, Any]], axis: int, shifts: Sequence[Any]
) -> Proposal | None:
    """Return the proposal where one side normalises by the statistics of the batch and the other by others:
    only by those of the batch is the mean of a channel its shift."""
    others = tuple(k for k in range(x.ndim) if k != axis)
    ends = [[y for y in ys.values() if _line(x, y, axis) is not None][-1:] for ys in values]
    if not all(ends):
        return None
    by_batch = [any(_near(y.mean(axis=others), s, np.abs(y).max()) for s in shifts) for (y,) in ends]
    if by_batch[0] == by_batch[1]:
        return None
    of_batch, other = ("left", "right") if by_batch[0] else ("right", "left")
    statistics = x.mean(axis=others), x.var(axis=others)
    measured = (
        f"On the {of_batch}, the mean of each channel is its shift, as normalising by the batch makes it; on "
        f"the {other}, each channel is affine in what the layer reads, with a different mean."
    )
    return Proposal(
        "running_statistics",
        f"the {of_batch} program normalises by the batch, the {other} one by running statistics.",
        _with_statistics(scene, other, statistics),
        f"With those of the batch in place of the statistics that the {other} program reads",
        measured,
        likely=True,
    )


def _with_statistics(scene: Scene, name: str, statistics: tuple[Any, Any]) -> Iterator[Trial]:
    """Yield a side with a mean and a variance in place of each two arrays of their size that its layer reads
    from outside and that are not trained."""
    start, side = getattr(scene.found, name), scene.comparison.side(name)
    line = [] if start is None else _call(start, scene.region(name))
    found, todo, seen = list[int](), [i for s in line for i in s.inputs], set[int]()
    while todo:  # also what is made of them before, and what the layer did that changed nothing
        value = chain_of(side.trace, todo.pop(0))[-1]
        if value in seen:
            continue
        seen.add(value)
        producer = side.trace.values[value].producer
        step = None if producer is None else side.trace.steps[producer]
        single = math.prod(side.shapes[value]) == statistics[0].size and not side.trained[value]
        if single and step is None:
            found.append(value)
        if step is not None and (single or step.module == line[0].module):
            todo += step.inputs
    known = found[:_MOST_READ]
    for pair in itertools.permutations(known, 2):
        values = {i: s.reshape(side.shapes[i]) for i, s in zip(pair, statistics, strict=True)}
        yield (Edit(name, values),)


def _shifts(scene: Scene, channels: int) -> list[Any]:
    """Return the parameters near the layer that may be its shift, and zero, which it has without one."""
    start, side = scene.found.right, scene.right
    line = [] if start is None else _call(start, scene.found.region_right)
    read = {i for s in line for i in s.inputs if i in scene.shared and side.trained[i]}
    return [np.zeros(channels), *(a.reshape(-1) for a in scene.arrays(read).values() if a.size == channels)]


def _line(x: Any, y: Any, axis: int) -> tuple[Any, Any] | None:
    """Return slope and shift, channel by channel, if one array is affine in another one."""
    others = tuple(k for k in range(x.ndim) if k != axis)
    if x.size <= 2 * x.shape[axis]:  # two points lie on every line
        return None
    with np.errstate(all="ignore"):
        means = [v.mean(axis=others, keepdims=True) for v in (x, y)]
        dx, dy = x - means[0], y - means[1]
        slope = (dx * dy).sum(axis=others, keepdims=True) / (dx * dx).sum(axis=others, keepdims=True)
        gap, largest = float(np.abs(dy - slope * dx).max()), float(np.abs(dy).max())
    return (slope, means[1] - slope * means[0]) if largest > 0 and gap <= SAME_FORMULA * largest else None


def _equal(a: Any, b: Any) -> bool:
    return _near(a, b, float(np.abs(b).max(initial=0.0)))


def _near(a: Any, b: Any, size: float) -> bool:
    return bool(np.abs(a - b).max() <= SAME_FORMULA * size)
