"""The ways in which one array can be laid out as another: transposed, split into heads, merged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["MOST_AXES", "laid_back", "layouts"]

# All orders of an array's axes are tried if it has no more than these: 24 orders. Images, kernels and the
# heads of attention have four axes.
MOST_AXES = 4
# Layouts are looked for among 120 orders at most: kernels of volumes have five axes.
_MOST_PERMUTED = 5


@lru_cache(maxsize=4096)  # pairs of shapes; chosen, not measured
def layouts(given: tuple[int, ...], wanted: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], ...]:
    """Return the permutations of the axes after which an array can be reshaped to another shape, the most
    usual one first.

    Args:
        given, wanted: the shapes; equal in size.
        kind: "conv", "matmul" or another use, of which the first two are usually transposed between
            frameworks.

    Example:
        >>> layouts((6, 4), (4, 2, 3), "matmul"), layouts((8, 3, 5, 5), (5, 5, 3, 8), "conv")[0]
        (((1, 0),), (2, 3, 1, 0))
    """
    if len(given) > _MOST_PERMUTED:
        return (tuple(range(len(given))),) if _regroups(given, wanted) else ()
    found = [p for p in itertools.permutations(range(len(given))) if _regroups([given[i] for i in p], wanted)]
    usual = _usual(len(given), kind)
    return tuple(sorted(found, key=lambda p: (p not in usual, usual.index(p) if p in usual else 0)))


def laid_back(array: Any, shape: Sequence[int], way: Sequence[int]) -> Any:
    """Return the array of a shape from which a permutation of the axes and a reshape make another one.

    Example:
        >>> laid_back(np.arange(6).reshape(3, 2).T, (3, 2), (1, 0)).tolist()
        [[0, 1], [2, 3], [4, 5]]
    """
    return array.reshape([shape[axis] for axis in way]).transpose(np.argsort(way))


def _usual(axes: int, kind: str) -> list[tuple[int, ...]]:
    same = tuple(range(axes))
    if (kind == "conv" and axes > 2) or axes > 3:
        spatial = tuple(range(2, axes))
        outward = (*spatial, 1, 0)
        inward = (axes - 1, axes - 2, *range(axes - 2))
        # A kernel may be rounded or normalized before it is used, so that its use does not show what it is.
        return [outward, inward, same] if kind == "conv" else [same, outward, inward]
    if kind == "matmul":
        return [tuple(reversed(same)), same]
    return [same]


def _regroups(a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether one shape only splits or merges neighbouring axes of the other."""
    first, second = _bounds(a), _bounds(b)
    return first[-1:] == second[-1:] and (set(first) <= set(second) or set(second) <= set(first))


def _bounds(shape: Sequence[int]) -> list[int]:
    found = list(itertools.accumulate((n for n in shape if n != 1), lambda x, y: x * y))
    return found or [1]
