"""Arrays that span several processes (``jax.distributed``), of which each process holds a part.

What is asked of such an array is computed by all processes together, so all of them must ask for it. They do,
because they run the same program, and find the same values in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import jit
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["asked", "gathered", "spans", "spans_in"]


def spans(x: Any) -> bool:
    """Return whether a process cannot read all of an array by itself."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated


def spans_in(tree: Any) -> bool:
    """Return whether an array of a tree is one of several processes, copies on all of them included."""
    return any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(tree))


def gathered(x: Any) -> Any:
    """Return an array of several processes in the memory of each of them; any other array as it is."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def asked(function: Callable[[Any], Any], x: Any) -> Any:
    """Return what a function gives for an array of several processes, on all of them."""
    mesh = getattr(x.sharding, "mesh", None)
    if mesh is None:
        return function(gathered(x))
    return np.asarray(_everywhere(function, NamedSharding(mesh, PartitionSpec()))(x))


@lru_cache(maxsize=64)
def _everywhere(function: Callable[[Any], Any], sharding: Any) -> Any:
    return jit(function, out_shardings=sharding)
