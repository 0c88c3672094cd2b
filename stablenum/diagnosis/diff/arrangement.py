"""Find where two programs begin to arrange the same numbers in another order.

A fingerprint does not see the order of a value's entries, so that layouts need not agree. An operation that
mixes entries, such as a product of matrices, does: if it reads the same numbers on both sides and gives
others, the numbers may lie differently. Then the difference is made by the reshape or transposition before
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.kinds import quiet
from stablenum.diagnosis.replay.trace import Trace

__all__ = ["chain_of", "first_rearranged", "same_arrangement"]

_CLOSE = 1e-6


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

    Every axis must have its counterpart: an axis of the same length whose slices have the same norms. Arrays
    with other axes (merged, split) are not compared and may be the same.
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
    """Return the sizes of the slices along an axis, in order of size."""
    others = tuple(i for i in range(x.ndim) if i != axis)
    return np.sort(np.asarray((x * np.abs(x)).sum(axis=others)))


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    scale = float(np.abs(a).max()) if a.size else 0.0
    return a.shape == b.shape and bool((np.abs(a - b) <= _CLOSE * scale + 1e-300).all())
