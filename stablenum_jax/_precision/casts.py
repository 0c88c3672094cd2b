"""Cast the floating-point leaves of a pytree, all of them or module by module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from stablenum_jax._trees.leaves import FP8_STATISTICS
from stablenum_jax._trees.names import Path

__all__ = ["cast_floating", "cast_leaves", "in_dtypes_of", "is_castable", "module_path"]

Tree = TypeVar("Tree")
PyTree: TypeAlias = Any


def is_castable(leaf: Any) -> bool:
    """Return whether a leaf is an array (of JAX or NumPy, or a shape) of real floating-point numbers.

    Integers, bools, PRNG keys, float0, complex numbers, strings, Python scalars and None are not, nor are
    8-bit arrays, whose numbers mean nothing without their scale.
    """
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return False
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating)) and leaf.dtype.itemsize > 1


def cast_floating(tree: Tree, dtype: Any) -> Tree:
    """Return the tree with its floating-point arrays in ``dtype``; everything else is unchanged.

    NumPy arrays stay NumPy arrays. Statistics of 8-bit layers (flax's ``_overwrite_with_gradient``) are not
    cast. Values beyond the format's range become inf, as in any cast.

    Args:
        tree: any pytree; modules and variables shared within a flax.nnx module stay shared.
        dtype: what ``jnp.dtype`` takes.

    Example:
        >>> cast_floating({"w": jnp.ones(2), "n": 3, "i": jnp.arange(2)}, "bfloat16")["w"].dtype
        dtype(bfloat16)
    """
    wanted = jnp.dtype(dtype)
    return cast_leaves(tree, lambda path: wanted)


def cast_leaves(tree: Tree, dtype_of: Callable[[str], Any]) -> Tree:
    """Return the tree with each floating-point array in the dtype of its module.

    Args:
        tree: any pytree.
        dtype_of: returns the dtype for the path of a module, its parts joined by dots.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tree, nnx.Module):
        graph, state = nnx.split(tree)
        return nnx.merge(graph, cast_leaves(state, dtype_of))
    collections = _is_variables(tree)

    def change(path: Path, leaf: Any) -> Any:
        if not is_castable(leaf) or any(getattr(key, "key", None) == FP8_STATISTICS for key in path):
            return leaf
        return _cast(leaf, dtype_of(module_path(path[1:] if collections else path)))

    return jax.tree_util.tree_map_with_path(change, tree)


def in_dtype_of(new: Any, old: Any) -> Any:
    """Return ``new`` in the dtype of ``old`` if both are arrays of floating-point numbers."""
    return new.astype(old.dtype) if is_castable(new) and is_castable(old) else new


def in_dtypes_of(new: Any, old: Any) -> Any:
    """Return a tree with each leaf in the dtype that ``old`` has at its path; a leaf of a new path stays."""
    known = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(old)[0]}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: in_dtype_of(leaf, known.get(jax.tree_util.keystr(path))), new
    )


def module_path(path: Path) -> str:
    """Return the module that holds the leaf at ``path``: ``"blocks.0.mlp"`` of ``blocks.0.mlp.kernel``.

    Example:
        >>> module_path((jax.tree_util.DictKey("dense"), jax.tree_util.DictKey("kernel")))
        'dense'
    """
    # flax.nnx wraps each array in a node, whose one child is called "value".
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path[:-1], simple=True, separator=".")


def _is_variables(tree: Any) -> bool:
    """Return whether a tree is a dict of flax.linen's collections, whose names are not part of a module's
    path."""
    return isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping)


def _cast(leaf: Any, dtype: Any) -> Any:
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    if isinstance(leaf, jax.Array):
        return leaf.astype(dtype)
    with np.errstate(over="ignore"):
        return leaf.astype(dtype)
