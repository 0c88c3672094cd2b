"""The largest magnitude in arrays, which says how large an array is and whether it is finite.

What a call returns is what the next call reads, and arrays do not change: each is read once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit

from stablenum_jax._diagnosis.replay.processes import asked, is_on_host, spans

__all__ = ["magnitudes_of"]

# So many arrays are kept in mind before those that are gone are forgotten. Chosen: this takes some 0.2 MB.
_MANY = 1024
# Arrays of at most so many elements are copied and read together, in half the time of a call for each (20
# arrays of 38,000 elements: 20 us in place of 40). Chosen: 64 KiB in float32.
_SMALL = 1 << 14


class _Known:
    """The arrays that have been read: by the id, a weak reference to the array and its largest magnitude."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[weakref.ref[jax.Array], float]] = {}
        self._many = _MANY

    def note(self, array: jax.Array, magnitude: float) -> None:
        self.found[id(array)] = weakref.ref(array), magnitude
        if len(self.found) > self._many:
            self.found = {key: known for key, known in self.found.items() if known[0]() is not None}
            self._many = max(_MANY, 2 * len(self.found))


_known = _Known()


def magnitudes_of(leaves: Sequence[Any]) -> dict[int, float]:
    """Return the largest magnitude in each real array that is not empty, by its position among the leaves.

    It is NaN or inf if the array is not finite. The host waits for arrays that have not been read yet.
    """
    found: dict[int, float] = {}
    new: dict[int, Any] = {}
    for i, leaf in enumerate(leaves):
        known = _known.found.get(id(leaf))
        if known is not None and known[0]() is leaf:
            found[i] = known[1]
        elif isinstance(leaf, jax.Array) and _is_real(leaf.dtype) and leaf.size:
            new[i] = leaf
    for (i, leaf), size in zip(new.items(), _read(list(new.values())), strict=True):
        found[i] = size
        _known.note(leaf, size)
    return {i: found[i] for i in sorted(found)} if found and new else found


def _read(arrays: list[jax.Array]) -> list[float]:
    """Return the largest magnitude in each array, of which none is empty."""
    # All that are on a device are begun before the first is waited for.
    begun = {
        i: asked(_magnitude, array) if spans(array) else _on_device(array)
        for i, array in enumerate(arrays)
        if not is_on_host(array)
    }
    plain = iter(_on_host([np.asarray(array) for i, array in enumerate(arrays) if i not in begun]))
    return [np.asarray(begun[i]).item() if i in begun else next(plain) for i in range(len(arrays))]


def _on_host(arrays: list[np.ndarray]) -> list[float]:
    """Return the largest magnitude in each array: those of one format that are small are copied and read
    together."""
    found = [0.0] * len(arrays)
    together: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        if array.size <= _SMALL:
            together.setdefault(array.dtype, []).append(i)
        else:
            found[i] = np.maximum.reduce(np.abs(_wide(array)), axis=None).item()
    for members in together.values():
        values = _wide(np.concatenate([arrays[i].ravel() for i in members]))  # a copy, also of one
        np.abs(values, out=values)
        ends = itertools.accumulate([arrays[i].size for i in members])
        sizes = np.maximum.reduceat(values, [0, *ends][:-1]).tolist()
        for i, size in zip(members, sizes, strict=True):
            found[i] = size
    return found


def _wide(array: np.ndarray) -> np.ndarray:
    """Return an array in a format of at least 32 bits; in a narrower one, NumPy would warn of a NaN."""
    return array if array.dtype.itemsize >= 4 else array.astype(np.float32)


def _magnitude(array: jax.Array) -> jax.Array:
    return jnp.abs(array).max()


_on_device = jit(_magnitude)  # the original jit, not the watched one


@lru_cache(maxsize=64)
def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
