"""Name the cause by evaluating convolutions, pooling and resizing with other settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.formulas.variants import Variant
from stablenum.diagnosis.diff.causes.formulas.window_variants import (
    convolutions_of,
    pools_of,
    resizes_of,
    transposed_convolutions_of,
)
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.arrangement import chain_of
from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.places.patches import laid_out_like
from stablenum.diagnosis.diff.places.regions import STEPS_AHEAD
from stablenum.diagnosis.diff.sides.equality import SAME_FORMULA
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.sides.recorded import is_recorded
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_window"]

# A larger array, of 2 MiB in float64, is not convolved and resized in all ways. Chosen, not measured.
_MOST_ELEMENTS = 2**18
_CONVOLUTIONS = ("conv", "convolution")
_POOLS = ("avg_pool", "max_pool", "pool", "reduce_window")
_RESIZES = ("upsample", "resize", "interpolate", "image")


def by_window(scene: Scene) -> Iterator[Proposal]:
    """Propose the settings of the other side for the side whose array the formulas were evaluated on."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None or scene.group.kind not in ("loss", "output"):
        return
    names = " ".join(n for s in (here.step, there.step) for n in (s.operation, s.library, s.primitive))
    if not any(word in names for word in (*_CONVOLUTIONS, *_POOLS, *_RESIZES)):
        return
    mine = _outputs(scene.left, here, scene.found.region_left)
    theirs = _outputs(scene.right, there, scene.found.region_right)
    # PyTorch has the spatial axes last, as the formulas have them.
    sides = [n for n in ("left", "right") if scene.comparison.side(n).program.framework == "torch"]
    sides = [n for n in sides if not is_recorded(scene.comparison.side(n).program)] or sides or ["right"]
    name = sides[0]
    side, start = (scene.left, here) if name == "left" else (scene.right, there)
    prints = [{v: s.prints[v] for v in values} for s, values in ((scene.left, mine), (scene.right, theirs))]
    sizes = dict.fromkeys((*_sizes(scene.left, mine), *_sizes(scene.right, theirs)))
    found_of = dict[str, tuple[list[_Fit], list[_Fit]]]()
    for code, variants in _families(side, start, sizes, names):
        found = found_of.setdefault(code, ([], []))
        for variant in variants:
            mark = fingerprint(variant.values)
            for fits, own in zip(found, prints, strict=True):
                at = [v for v, p in own.items() if p.entries and distance(mark, p) < SAME_FORMULA]
                fits += [_Fit(variant, v) for v in at[:1]]
        left, right = found
        if left and right and not {f.variant[:2] for f in left} & {f.variant[:2] for f in right}:
            likely = min(left, key=_uneven), min(right, key=_uneven)
            yield _proposal(scene, _code_of(code, *(f.variant for f in likely)), *likely, name)
            return


class _Fit(NamedTuple):
    """A formula and the value that it gives."""

    variant: Variant
    value: int


def _proposal(scene: Scene, code: str, left: _Fit, right: _Fit, name: str) -> Proposal:
    own, other = (left, right) if name == "left" else (right, left)
    array = arrays_of(scene.comparison.side(name), [own.value])[own.value]
    new = laid_out_like(other.variant.values, own.variant.values, array)
    return Proposal(
        code,
        f"the left program computes {left.variant}, the right one {right.variant}.",
        None if new is None else [(Edit(name, {own.value: new}),)],
        f"With the other side's settings on the {name}",
        "Both were evaluated on what the operation reads; each gives its side's value.",
    )


def _uneven(fit: _Fit) -> bool:
    """Return whether a variant pads one side of an axis more than the other: with strides, the last entries
    may have no part in the result, so that a program that pads both equally gives the same result."""
    low, high = dict(fit.variant.setting).get("padding", (0, 0))
    return bool(low != high)


def _code_of(code: str, left: Variant, right: Variant) -> str:
    """Return the code for two functions of a family by the settings in which they differ."""
    unlike = {key for key, _ in {*left.setting} ^ {*right.setting}}
    if code == "resize_mode":
        return code
    if unlike == {"kernel flipped"}:
        return "flipped_kernel"
    if code == "pooling_count" and left.family != right.family:
        return "other_function"
    if unlike & {"padding", "filled with"}:
        return "padding"
    return "pooling_count" if "padding counted" in unlike else "other_function"


def _sizes(side: Side, values: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Return the spatial sizes of arrays, whose channels PyTorch has first and JAX mostly last."""
    for x in arrays_of(side, values).values():
        if x.ndim > 2:
            yield x.shape[2:]
            if side.program.framework != "torch":
                yield x.shape[1:-1]


def _outputs(side: Side, start: Start, region: Iterable[Step]) -> list[int]:
    near = [s for s in region if s.index >= start.step.index][:STEPS_AHEAD]
    return [o for s in near for o in s.outputs if side.prints[o].entries and side.prints[o].floating]


def _families(
    side: Side, start: Start, sizes: Iterable[tuple[int, ...]], names: str
) -> Iterator[tuple[str, Iterator[Variant]]]:
    """Return the functions that may be meant, evaluated on what a step reads, with the code of each."""
    inputs = start.step.outputs if start.missing else start.step.inputs
    # One side may add entries before, and the other one within its convolution.
    arrays = arrays_of(side, {v for i in inputs for v in chain_of(side.trace, i)})
    read = [x for x in arrays.values() if x.dtype.kind == "f" and x.ndim > 2 and x.size <= _MOST_ELEMENTS]
    for size in sizes:
        for x in (o for y in read for o in _orientations(y)):
            if any(n in names for n in _CONVOLUTIONS):
                for kernel in (k for y in read for k in _kernels(y)):
                    yield "padding", convolutions_of(x, kernel, size)
                    yield "padding", transposed_convolutions_of(x, kernel, size)
            elif len(size) == x.ndim - 2:
                if any(n in names for n in _POOLS):
                    yield "pooling_count", pools_of(x, size)
                if any(n in names for n in _RESIZES):
                    yield "resize_mode", resizes_of(x, size)


def _orientations(x: Any) -> list[Any]:
    """Return an array with its channels first, whether they are first or last now."""
    return [x, np.moveaxis(x, -1, 1)]


def _kernels(k: Any) -> list[Any]:
    """Return a kernel with the output channels first, which a transposed convolution has second or last but
    one."""
    first = [k, np.moveaxis(k, (-1, -2), (0, 1))]
    return [*first, *(x.swapaxes(0, 1) for x in first)]
