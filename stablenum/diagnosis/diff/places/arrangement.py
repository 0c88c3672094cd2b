"""Find where two programs begin to arrange the same numbers in another order.

A fingerprint does not see the order of a value's entries, so that layouts need not agree. An operation that
mixes entries, such as a product of matrices, does: if it reads the same numbers on both sides and gives
others, the numbers may lie differently. Then the difference is made by the reshape or transposition before
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.replay.trace import Trace

__all__ = ["chain_of", "first_rearranged", "laid_apart", "same_arrangement"]

# Entries, and norms of slices, are the same on both sides if they differ by less than this part of the
# largest. Chosen, not measured.
_CLOSE = 1e-6
Shape: TypeAlias = tuple[int, ...]


def chain_of(trace: Trace, value: int) -> list[int]:
    """Return a value and those that it was moved from, the first one last."""
    chain = [value]
    while True:
        producer = trace.values[chain[-1]].producer
        step = None if producer is None else trace.steps[producer]
        if step is None or not quiet(step) or len(step.inputs) != 1:
            return chain
        chain.append(step.inputs[0])


def first_rearranged(chain: Iterable[int], arrays: Mapping[int, Any], others: Iterable[Any]) -> int | None:
    """Return the first value of a chain that lies in an order that no value of the other chain has.

    Args:
        chain: values, the first one last.
        arrays: their arrays.
        others: the arrays of the other chain.
    """
    known = list(others)
    for value in reversed(list(chain)):
        alike = [x for x in known if _axes(x) == _axes(arrays[value])]
        if alike and all(not same_arrangement(arrays[value], x) for x in alike):
            return value
    return None


def same_arrangement(a: Any, b: Any) -> bool:
    """Return whether one array may be the other with its axes permuted.

    Every axis must have its counterpart: an axis of the same length whose slices have the same norms in the
    same order. Arrays with other axes (merged, split) are not compared and may be the same.
    """
    first, second = np.squeeze(np.asarray(a, float)), np.squeeze(np.asarray(b, float))
    if sorted(first.shape) != sorted(second.shape):
        return True
    profiles = [_profile(second, axis) for axis in range(second.ndim)]
    for axis in range(first.ndim):
        mine = _profile(first, axis)
        same = next((p for p in profiles if _close(mine, p)), None)
        if same is None:
            return False
        profiles = [p for p in profiles if p is not same]
    return True


def _axes(x: Any) -> list[int]:
    return sorted(n for n in np.shape(x) if n != 1)


def _profile(x: np.ndarray, axis: int) -> np.ndarray:
    """Return the sizes of the slices along an axis."""
    others = tuple(i for i in range(x.ndim) if i != axis)
    return np.asarray((x * np.abs(x)).sum(axis=others))


def laid_apart(operands: Sequence[tuple[Any, Any]], shapes: tuple[Shape, Shape]) -> int | None:
    """Return which operand of an elementwise operation lies otherwise than the others on one of two sides, so
    that no permutation of the result's axes makes all operands equal; None if one does, or if the flags are
    others and all else lies alike.

    Args:
        operands: each as both sides have it; flags may be inverted.
        shapes: of the results.
    """
    spread = all(_spreads(x.shape, shapes[k]) for pair in operands for k, x in enumerate(pair))
    if math.prod(shapes[0]) != math.prod(shapes[1]) or not spread:
        return None
    ways = layouts(*shapes, "other")
    fitting = [{w for w in ways if _fits(a, b, w, shapes)} for a, b in operands]
    if not ways or set.intersection(*fitting):
        return None
    same = tuple(range(len(shapes[0])))
    kept = (k for k, (a, _) in enumerate(operands) if a.dtype != bool and same not in fitting[k])
    return next(kept, None)


def _spreads(shape: Shape, wanted: Shape) -> bool:
    """Return whether an array can be broadcast to another shape."""
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(n in (1, m) for n, m in pairs)


def _fits(a: Any, b: Any, way: Sequence[int], shapes: tuple[Shape, Shape]) -> bool:
    mine = np.broadcast_to(a, shapes[0]).transpose(way).reshape(shapes[1])
    theirs = np.broadcast_to(b, shapes[1])
    if mine.dtype == bool:
        return np.array_equal(mine, theirs) or np.array_equal(mine, ~theirs)
    scale = float(np.abs(theirs).max(initial=0.0))
    return bool((np.abs(mine - theirs) <= _CLOSE * scale).all())


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    # Differences below 1e-300 are those of zeros.
    scale = float(np.abs(a).max()) if a.size else 0.0
    return a.shape == b.shape and bool((np.abs(a - b) <= _CLOSE * scale + 1e-300).all())
