"""What every namespace traces: bounds by a Python scalar, the joint norm, and a walk over nested tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from stablenum.formats import FLOAT32_MAX

__all__ = ["at_least", "at_most", "combine_norms", "leaves", "map_leaves"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
Tree = TypeVar("Tree")

# ``xp.clip`` and ``xp.minimum(x, 1.0)`` would say the same as the two bounds, but array-api-compat resolves
# their dtypes on the host, which breaks ``torch.compile(fullgraph=True)``.


def at_most(x: Array, bound: float, *, xp: Namespace) -> Array:
    """``min(x, bound)`` elementwise; NaN stays NaN."""
    return xp.minimum(x, xp.full_like(x, bound))


def at_least(x: Array, bound: float, *, xp: Namespace) -> Array:
    """``max(x, bound)`` elementwise; NaN stays NaN."""
    return xp.maximum(x, xp.full_like(x, bound))


# A float32 sum of squares is infinite from 1.8e19 on and zero below 2.6e-23, although the norm itself is an
# ordinary number. Very large and very small norms are first scaled by a power of two, which keeps their
# squares in range and costs no precision.
# Squares of numbers in [2**-40, 2**40], and sums of 2**47 of them, are normal float32 numbers.
_LARGE, _SMALL = 2.0**40, 2.0**-40
# Takes the rest of float32's range into [2**-69, 2**48].
_SHIFT = 2.0**80


def combine_norms(norms: Array, *, xp: Namespace) -> Array:
    """The L2 norm of the whole from the L2 norms of its parts.

    ``sqrt(sum((s n)^2)) / s`` with s = 2**-80, 1 or 2**80 by the size of the largest part; the
    constants' way of Blue 1978 (doi 10.1145/355769.355771). Multiplying by a constant and not
    dividing by the largest part: XLA divides by an array as by its reciprocal, which is flushed
    to zero from 8.5e37 on.

    Args:
        norms: (n,) float32, none negative.
        xp: the array namespace.

    Returns:
        () float32. NaN if a part is NaN, else inf if a part is inf, else a finite number (a
        result beyond float32's range saturates there); 0 for no parts at all.

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
    # For zeros that are known when it compiles (no parameter has an element), XLA makes the total NaN.
    some = xp.isfinite(largest) & (largest > 0)
    return xp.where(some, at_most(total, FLOAT32_MAX, xp=xp), largest)


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
