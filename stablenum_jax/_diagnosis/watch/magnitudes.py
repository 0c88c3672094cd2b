"""The largest magnitude in arrays, which says how large an array is and whether it is finite.

What a call returns is what the next call reads, and arrays do not change: each is read once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit

from stablenum_jax._diagnosis.replay.flags import is_on_host
from stablenum_jax._diagnosis.replay.processes import asked, spans

__all__ = ["magnitudes_of"]

# So many arrays are kept in mind before those that are gone are forgotten. Chosen: this takes some 0.2 MB.
_MANY = 1024


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
    # All are begun before the first is waited for.
    begun = [_read(leaf) for leaf in new.values()]
    for (i, leaf), read in zip(new.items(), begun, strict=True):
        found[i] = read if isinstance(read, float) else np.asarray(read).item()
        _known.note(leaf, found[i])
    return {i: found[i] for i in sorted(found)} if found and new else found


def _read(array: jax.Array) -> Any:
    """Return the largest magnitude; of an array on a device, as an array that may not be computed yet."""
    if not is_on_host(array):
        return asked(_magnitude, array) if spans(array) else _on_device(array)
    plain = np.asarray(array)
    plain = plain if plain.dtype.itemsize >= 4 else plain.astype(np.float32)  # NumPy would warn of a NaN
    return np.maximum.reduce(np.abs(plain), axis=None).item()


def _magnitude(array: jax.Array) -> jax.Array:
    return jnp.abs(array).max()


_on_device = jit(_magnitude)  # the original jit, not the watched one


@lru_cache(maxsize=64)
def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
