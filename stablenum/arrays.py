"""Helpers that trace in every array namespace: scalar bounds, joint norms, and maps over nested tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from stablenum.formats import FLOAT32_MAX

__all__ = ["at_least", "at_most", "combine_norms", "leaves", "map_leaves"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
Tree = TypeVar("Tree")

# ``xp.clip(x, ...)`` and ``xp.minimum(x, 1.0)`` compute the same results as the two functions below, but
# array-api-compat resolves the dtypes on the host, which breaks ``torch.compile(fullgraph=True)``.


def at_most(x: Array, bound: float, *, xp: Namespace) -> Array:
    """Return ``min(x, bound)`` elementwise; NaN stays NaN."""
    return xp.minimum(x, xp.full_like(x, bound))


def at_least(x: Array, bound: float, *, xp: Namespace) -> Array:
    """Return ``max(x, bound)`` elementwise; NaN stays NaN."""
    return xp.maximum(x, xp.full_like(x, bound))


# A float32 sum of squares overflows for norms from 1.8e19 up and vanishes for norms below 2.6e-23, although
# the norm itself is an ordinary number. Very large and very small norms are therefore scaled by a power of
# two first, which keeps their squares in range and costs no precision.
# The squares of numbers in [2**-40, 2**40], and sums of 2**47 such squares, are normal float32 numbers.
_LARGE, _SMALL = 2.0**40, 2.0**-40
# Maps the rest of float32's range into [2**-69, 2**48].
_SHIFT = 2.0**80


def combine_norms(norms: Array, *, xp: Namespace) -> Array:
    """Return the L2 norm of a vector from the L2 norms of its parts.

    The norm is computed as ``sqrt(sum((s n)^2)) / s`` with s = 2**-80, 1 or 2**80, depending on the
    size of the largest part; this is the method of Blue 1978 (doi 10.1145/355769.355771). The norms
    are multiplied by a constant rather than divided by the largest part, because XLA turns a division
    by an array into a multiplication by its reciprocal, which is flushed to zero for divisors of
    8.5e37 and more.

    Args:
        norms: (n,) float32, non-negative.
        xp: the array namespace.

    Returns:
        () float32. NaN if a part is NaN, otherwise inf if a part is inf, otherwise a finite number
        (a result beyond float32's range saturates at the largest float32); 0 if there are no parts.

    Example:
        >>> import numpy as np
        >>> round(float(combine_norms(np.asarray([3e30, 4e30], np.float32), xp=np)) / 5e30, 6)
        1.0
    """
    if norms.shape[0] == 0:
        return xp.sum(norms)
    largest = xp.max(norms)
    one = xp.ones_like(largest)
    shrink, enlarge = one / _SHIFT, one * _SHIFT
    large, small = largest > _LARGE, largest < _SMALL
    scaled = norms * xp.where(large, shrink, xp.where(small, enlarge, one))
    total = xp.sqrt(xp.sum(scaled * scaled)) * xp.where(large, enlarge, xp.where(small, shrink, one))
    # If XLA knows at compile time that all norms are 0 (no parameter has an element), ``total`` becomes NaN.
    some = xp.isfinite(largest) & (largest > 0)
    return xp.where(some, at_most(total, FLOAT32_MAX, xp=xp), largest)


def map_leaves(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply ``function`` to the corresponding leaves of nested tuples and keep the types of the tuples.

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
    """Return all leaves of nested tuples, in order.

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
