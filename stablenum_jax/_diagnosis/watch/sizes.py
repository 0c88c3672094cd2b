"""How large the arguments of a call are, and which of them it carries on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from stablenum_jax._diagnosis.watch.trees import Tree

__all__ = ["carried", "sizes_of"]


def sizes_of(given: Tree) -> dict[str, float]:
    """Return the largest magnitude in each array among the arguments of a call, by its path."""
    paths = given.kept(_paths)
    return {paths[i]: size for i, size in given.magnitudes.items()}


def _paths(given: Any) -> list[str]:
    """Return how each leaf of arguments, positional and named, is called in reports."""
    args, kwargs = (tree_flatten_with_path(tree)[0] for tree in given)
    return [f"args{keystr(path)}" for path, _ in args] + [keystr(path) for path, _ in kwargs]


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
