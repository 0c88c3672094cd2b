"""The one walk over the nested tuples that a guard's state is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["leaves", "map_leaves"]

Tree = TypeVar("Tree")


def map_leaves(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree of ``function(leaf, *leaves of the others)``, of the same tuple types.

    Example:
        >>> map_leaves(lambda a, b: a + b, (1, (2,)), (10, (20,)))
        (11, (22,))
    """
    if not isinstance(tree, tuple):
        return function(tree, *others)  # type: ignore[no-any-return]
    mapped = [
        map_leaves(function, *parts) if isinstance(parts[0], tuple) else function(*parts)
        for parts in zip(tree, *others, strict=True)
    ]
    return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)  # type: ignore[return-value]


def leaves(tree: Any) -> list[Any]:
    """All leaves in order.

    Example:
        >>> leaves((1, (2, 3)))
        [1, 2, 3]
    """
    if not isinstance(tree, tuple):
        return [tree]
    found: list[Any] = []
    for part in tree:
        if isinstance(part, tuple):
            found += leaves(part)
        else:
            found.append(part)
    return found
