"""Names of parameters, from the paths of the pytree.

A state holds arrays only, so that every checkpointer can write it; strings live here, on the host,
under a number that the state carries. The number is a checksum of the names: a state that was
unpickled in another process finds its names again as soon as the guard sees the parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

__all__ = ["Path", "known_names", "path_name", "register_names"]

Path: TypeAlias = tuple[Any, ...]

_NAMES: dict[int, tuple[str, ...]] = {}


def path_name(path: Path) -> str:
    """The dotted name of a leaf: ``"layers.0.weight"``; ``"param"`` for a tree that is one leaf.

    Example:
        >>> path_name((jax.tree_util.DictKey("layers"), jax.tree_util.SequenceKey(0)))
        'layers.0'
    """
    # flax.nnx gives each array a node of its own, whose one child is called "value".
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".") or "param"


def register_names(names: Sequence[str]) -> int:
    """Remember ``names``; returns the number under which :func:`known_names` gives them back."""
    number = zlib.crc32("\n".join(names).encode()) & 0x7FFFFFFF
    _NAMES[number] = tuple(names)
    return number


def known_names(number: int) -> tuple[str, ...] | None:
    """The names registered under ``number``, None if this process has not seen them."""
    return _NAMES.get(number)
