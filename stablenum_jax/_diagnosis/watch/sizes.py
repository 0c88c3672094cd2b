"""How large the arguments of a call are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

__all__ = ["sizes_of"]

_largest_on_device = jax.jit(lambda leaf: jnp.abs(leaf).max())  # the original jit, not the watched one


def sizes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Return the largest magnitude in each array among the arguments, by its path."""
    leaves = [
        (f"args{keystr(path)}" if top == "args" else keystr(path), leaf)
        for top, tree in (("args", args), ("kwargs", kwargs))
        for path, leaf in tree_flatten_with_path(tree)[0]
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
    ]
    return {path: _largest(leaf) for path, leaf in leaves}


def _largest(leaf: jax.Array) -> float:
    on_host = leaf.is_fully_addressable and all(d.platform == "cpu" for d in leaf.devices())
    return float(np.abs(np.asarray(leaf)).max() if on_host else _largest_on_device(leaf))
