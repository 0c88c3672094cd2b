"""What is in nested containers: each container once, however often and however deep it lies in others."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from stablenum.commands.verify.contents import Entry, Path
from stablenum.commands.verify.limits import Limits

__all__ = ["Holder", "Ordered", "leaves_of", "name_of"]

# A tuple of Adam's coefficients is shared by all groups of parameters; so small a container, with no other in
# it, is shown everywhere, for that is no more work than the references to it.
_SMALL = 16
# So many numbers in a list are a record, and no group's parameters; one by one they would take seconds.
_LONG = 2**16
# The key of the value of an object, which is where the object is.
_HERE = object()


class Holder:
    """What stands for an object that has attributes: its value, and these."""

    __slots__ = ("attributes", "value")

    def __init__(self, value: Any, attributes: Mapping[Any, Any]) -> None:
        self.value, self.attributes = value, attributes


class Ordered(dict[Any, Any]):
    """A dict that may have attributes."""

    __slots__ = ("attributes",)
    attributes: Mapping[Any, Any]


def leaves_of(tree: Any, path: Path, limits: Limits) -> Iterator[tuple[Path, Any]]:
    """Yield what in a tree is no container, with its path, in the order of the tree.

    Dicts, lists, tuples, sets and what stands for objects are containers; a long list of numbers is an array.
    A container that is part of itself, or of several others, is entered once.

    Args:
        tree: containers of whatever.
        path: where the tree is.
        limits: how deep and how many.

    Raises:
        NotCheckedError: deeper or more than the limits allow.
    """
    seen: set[int] = set()
    count = length = 0
    levels = [iter([(path, tree)])]
    lengths = [sum(map(len, path))]  # of the names so far, at each level
    while levels:
        place, value = next(levels[-1], (None, None))
        if place is None:
            levels.pop()
            lengths.pop()
            continue
        parts = None if (numbers := _numbers(place, value)) else _parts(value)
        if parts is None:
            count += 1
            limits.check("parts", count, "its arrays and plain values are many")
            length += lengths[-1] + len(place[-1]) if place else 0
            limits.check("description", length, "the letters of the names of all that is in it")
            yield place, numbers or value
        elif id(value) not in seen or _is_small(value):
            seen.add(id(value))
            limits.check("depth", len(levels), "it is nested deep")
            levels.append(_placed(place, parts))
            lengths.append(lengths[-1] + len(place[-1]) if place else 0)


def _numbers(place: Path, value: Any) -> Entry | None:
    """Return a long list of integers, or of finite numbers, as one array; None for anything else."""
    if not isinstance(value, list) or len(value) <= _LONG:
        return None
    kinds = set(map(type, value))
    if kinds != {int} and not (kinds == {float} and all(map(math.isfinite, value))):
        return None
    dtype = "int64" if kinds == {int} else "float64"
    return Entry(
        path=place or ("list",), dtype=dtype, shape=(len(value),), read=lambda: np.asarray(value, dtype)
    )


def _placed(place: Path, parts: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Path, Any]]:
    return ((place if key is _HERE else (*place, name_of(key)), part) for key, part in parts)


def _parts(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return what is in a container, by keys or positions; None for anything else."""
    if isinstance(value, Holder):
        return itertools.chain([(_HERE, value.value)], value.attributes.items())
    if isinstance(value, Ordered):
        return itertools.chain(value.items(), getattr(value, "attributes", {}).items())
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, Set) or (
        isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    ):
        return iter(enumerate(value))
    return None


def _is_small(value: Any) -> bool:
    parts = list(itertools.islice(_parts(value) or (), _SMALL + 1))
    return len(parts) <= _SMALL and all(_parts(part) is None for _, part in parts)


def name_of(key: Any) -> str:
    """Return how a key is shown, in bounded time: tuples may share parts, and numbers have many digits."""
    if isinstance(key, str):
        return key
    try:
        return str(key) if isinstance(key, bool | int | float) else reprlib.repr(key)
    except ValueError:
        return "a large number"
