"""Blocks of an array, and a region that is put together from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

__all__ = ["Block", "Index", "index_of", "region"]

# For each axis, where a block starts and stops.
Index: TypeAlias = tuple[tuple[int, int], ...]


class Block(NamedTuple):
    """A part of an array.

    Attributes:
        at: where it begins.
        array: its elements.
    """

    at: tuple[int, ...]
    array: np.ndarray

    @property
    def bounds(self) -> Index:
        """Where it is."""
        return tuple((start, start + size) for start, size in zip(self.at, self.array.shape, strict=True))


def index_of(slices: Iterable[slice], shape: Sequence[int]) -> Index:
    """Return the index that slices describe.

    Example:
        >>> index_of((slice(None), slice(2, 4)), (3, 8))
        ((0, 3), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def region(blocks: Iterable[Block], index: Index, dtype: Any) -> np.ndarray:
    """Return the elements at ``index``.

    Args:
        blocks: blocks that do not overlap.
        index: the region.
        dtype: its dtype.

    Raises:
        ValueError: the blocks do not cover the region.

    Example:
        >>> left, right = Block((0,), np.asarray([1.0, 2.0])), Block((2,), np.asarray([3.0, 4.0]))
        >>> region([left, right], ((1, 3),), np.float64)
        array([2., 3.])
    """
    found = np.empty([stop - start for start, stop in index], dtype)
    covered = 0
    for block in blocks:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(index, block.bounds, strict=True)]
        if all(start < stop for start, stop in common):
            found[_within(common, index)] = block.array[_within(common, block.bounds)]
            covered += math.prod(stop - start for start, stop in common)
    if covered != found.size:
        raise ValueError("what this process holds of it is not all there; it was laid out in another way")
    return found


def _within(common: Sequence[tuple[int, int]], index: Index) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, index, strict=True))
