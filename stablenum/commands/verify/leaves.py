"""What is in nested containers: each container once, however often and however deep it lies in others."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from stablenum.commands.verify.contents import Path
from stablenum.commands.verify.limits import Limits

__all__ = ["leaves_of", "name_of"]

# A tuple of Adam's coefficients is shared by all groups of parameters; so small a container, with no other in
# it, is shown everywhere, for that is no more work than the references to it.
_SMALL = 16


def leaves_of(tree: Any, path: Path, limits: Limits) -> Iterator[tuple[Path, Any]]:
    """Yield what in a tree is no container, with its path, in the order of the tree.

    Dicts, lists, tuples and sets are containers. One that is part of itself, or of several others, is entered
    once.

    Args:
        tree: containers of whatever.
        path: where the tree is.
        limits: how deep and how many.

    Raises:
        NotCheckedError: deeper or more than the limits allow.
    """
    seen: set[int] = set()
    count = 0
    levels = [iter([(path, tree)])]
    while levels:
        place, value = next(levels[-1], (None, None))
        if place is None:
            levels.pop()
            continue
        parts = _parts(value)
        if parts is None:
            count += 1
            limits.check("parts", count, "its arrays and plain values are many")
            yield place, value
        elif id(value) not in seen or _is_small(value):
            seen.add(id(value))
            limits.check("depth", len(levels), "it is nested deep")
            levels.append(_placed(place, parts))


def _placed(place: Path, parts: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Path, Any]]:
    return (((*place, name_of(key)), part) for key, part in parts)


def _parts(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return what is in a container, by keys or positions; None for anything else."""
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, Set) or (
        isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    ):
        return iter(enumerate(value))
    return None


def _is_small(value: Any) -> bool:
    if len(value) > _SMALL:
        return False
    inside = value.values() if isinstance(value, Mapping) else value
    return all(_parts(part) is None for part in inside)


def name_of(key: Any) -> str:
    """Return how a key is shown, in bounded time: tuples may share parts, and numbers have many digits."""
    if isinstance(key, str):
        return key
    try:
        return str(key) if isinstance(key, bool | int | float) else reprlib.repr(key)
    except ValueError:
        return "a large number"
