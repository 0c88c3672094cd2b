"""Names of parameters, made from their paths in the pytree.

A state holds arrays only, so that every checkpointer can write it. The strings are kept here, on the host,
under a number that the state carries. The number is a checksum of the names, so a state that was unpickled
in another process finds its names again as soon as the guard sees the parameters there.

The number is () int32 in states that are already saved, so it stays 31 bits wide, and two trees may share
one: among a thousand trees the odds are 1 in 4,000. Names under a number that is shared are forgotten, with
a warning, because a state cannot say which tree it belongs to. Nothing else is ever forgotten: a process
trains few different trees, and a state that uses a number may be read at any time.

A guard that does not log its skips has the complement of the number, which is negative: a state says itself
whether it is silent, whatever other guards there are for equal names.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from stablenum._support.user_warnings import warn

__all__ = ["Path", "known_names", "logs_skips", "names_id_of", "path_name", "register_names"]

Path: TypeAlias = tuple[Any, ...]

# The value is None for a number that two different trees share.
_NAMES: dict[int, tuple[str, ...] | None] = {}


def path_name(path: Path) -> str:
    """Return the dotted name of a leaf: ``"layers.0.weight"``; ``"param"`` for a tree that is one leaf.

    Example:
        >>> path_name((jax.tree_util.DictKey("layers"), jax.tree_util.SequenceKey(0)))
        'layers.0'
    """
    # flax.nnx wraps each array in a node, whose one child is called "value".
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator=".") or "param"


def register_names(names: Sequence[str], *, log_skips: bool) -> int:
    """Remember ``names``, and return the number under which :func:`known_names` finds them.

    Warns if another tree has the same number: the names of both are then unknown.
    """
    number = zlib.crc32("\n".join(names).encode()) & 0x7FFFFFFF
    known = _NAMES.setdefault(number, tuple(names))
    if known is not None and known != tuple(names):
        _NAMES[number] = None
        first, second = (next(iter(tree), "no name") for tree in (known, names))
        warn(
            f"Two parameter trees share the checksum {number} of their names, so reports show only the "
            f"indices of their parameters. One begins with {first}, the other with {second}; rename a "
            "parameter in one of them.",
        )
    return number if log_skips else ~number


def names_id_of(paths: Iterable[Path], before: jax.Array, *, log_skips: bool) -> jax.Array:
    """Remember the names of the parameters at these paths, and return their number: an array like ``before``.

    The parameters that a step has may be others than those that the state was made for, as where a part of
    a model is frozen. The indices that the step records are those of its own parameters. And the state may
    have been loaded from a run whose skips were logged, or not.
    """
    number = register_names([path_name(path) for path in paths], log_skips=log_skips)
    return jnp.where(before == number, before, jnp.asarray(number, jnp.int32))


def known_names(number: int) -> tuple[str, ...] | None:
    """Return the names registered under ``number``; None if this process has none, or two trees share it."""
    return _NAMES.get(number if logs_skips(number) else ~number)


def logs_skips(number: int) -> bool:
    """Return whether skipped steps of a guard whose state has this number are logged."""
    return number >= 0
