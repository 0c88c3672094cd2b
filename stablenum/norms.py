"""Combining norms without overflow or underflow.

A float32 sum of squares is infinite from 1.8e19 on and zero below 2.6e-23, although the norm
itself is an ordinary number. Scaling very large and very small norms by a power of two first keeps
their squares in range, and costs no precision.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.bounds import at_most
from stablenum.formats import FLOAT32_MAX

__all__ = ["combine_norms"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

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
