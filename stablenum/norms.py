"""Combining norms without overflow or underflow.

A float32 sum of squares is infinite from 1.8e19 on and zero below 2.6e-23, although the norm
itself is an ordinary number. Dividing by the largest norm first keeps every square in [0, 1].
"""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.bounds import at_most
from stablenum.formats import FLOAT32_MAX

__all__ = ["combine_norms"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


def combine_norms(norms: Array, *, xp: Namespace) -> Array:
    """The L2 norm of the whole from the L2 norms of its parts.

    ``a sqrt(sum((n / a)^2))`` with ``a = max(n)``; the scaling of LAPACK's ``slassq``.

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
    # Double-where: the division must not see 0 or inf even in the branch that is thrown away.
    usable = xp.isfinite(largest) & (largest > 0)
    divisor = xp.where(usable, largest, xp.ones_like(largest))
    ratio = norms / divisor
    total = divisor * xp.sqrt(xp.sum(ratio * ratio))
    return xp.where(usable, at_most(total, FLOAT32_MAX, xp=xp), largest)
