"""Parts of an array: whether they make it up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

__all__ = ["cover"]

# Where a part begins, and its sizes.
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def cover(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether each element of a shape is in one of the boxes, and in one only.

    Example:
        >>> cover([((0,), (2,)), ((2,), (2,))], (4,)), cover([((0,), (2,)), ((1,), (2,))], (4,))
        (True, False)
    """
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return False
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    filled = [(offsets, sizes) for offsets, sizes in boxes if 0 not in sizes]
    if not filled or not shape:
        return len(filled) <= 1
    starts = np.array([offsets for offsets, _ in filled])
    ends = starts + np.array([sizes for _, sizes in filled])
    return bool((ends <= np.array(shape)).all()) and _apart(starts, ends)


def _apart(starts: np.ndarray, ends: np.ndarray) -> bool:
    """Return whether no two boxes overlap: sorted along the dimension with the most beginnings, a box meets
    only those that begin before its end."""
    along = int(np.argmax([len(np.unique(column)) for column in starts.T]))
    order = np.argsort(starts[:, along], kind="stable")
    starts, ends = starts[order], ends[order]
    last = np.searchsorted(starts[:, along], ends[:, along])
    for i, end in enumerate(last):
        others = slice(i + 1, int(end))
        if ((starts[others] < ends[i]) & (starts[i] < ends[others])).all(axis=1).any():
            return False
    return True
