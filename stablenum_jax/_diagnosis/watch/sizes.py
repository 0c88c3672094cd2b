"""How large the arguments of a call are, and which of them it carries on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from stablenum_jax._diagnosis.replay.processes import asked, spans

__all__ = ["carried", "sizes_of"]


def _magnitude(leaf: jax.Array) -> jax.Array:
    return jnp.abs(leaf).max()


_largest_on_device = jax.jit(_magnitude)  # the original jit, not the watched one


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Return the largest magnitude in each array among the arguments, by its path."""
    leaves = [
        (f"args{keystr(path)}" if top == "args" else keystr(path), leaf)
        for top, tree in (("args", args), ("kwargs", kwargs))
        for path, leaf in tree_flatten_with_path(tree)[0]
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
    ]
    return {path: _largest(leaf) for path, leaf in leaves}


def carried(args: tuple[Any, ...], result: Any) -> tuple[str, ...]:
    """Return the arguments, as paths, that a call returns anew or differentiates: parameters and states. Data
    has other shapes than the result; a model that is changed in place is no plain tree."""
    returned = Counter(_shapes(result))
    found = []
    for i, arg in enumerate(args):
        own = Counter(_shapes(arg))
        plain = isinstance(arg, (tuple, list, dict, jax.Array, np.ndarray))
        if own and (not plain or own <= returned):
            found.append(f"args[{i}]")
    return tuple(found)


def _shapes(tree: Any) -> list[tuple[Any, ...]]:
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    return [(x.shape, x.dtype.name) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]


def _largest(leaf: jax.Array) -> float:
    if spans(leaf):
        return float(asked(_magnitude, leaf))
    on_host = leaf.is_fully_addressable and all(d.platform == "cpu" for d in leaf.devices())
    return float(np.abs(np.asarray(leaf)).max() if on_host else _largest_on_device(leaf))
