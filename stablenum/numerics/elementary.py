"""Quotients, roots, powers and inverse functions at the edge of their domains."""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.errors import check_number
from stablenum.formats import get_format
from stablenum.numerics.common import smallest_normal, widened

__all__ = ["arccos", "arctan2", "arctanh", "divide", "power", "reciprocal", "rsqrt", "soft_cap", "sqrt"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


def divide(x: Array, y: Array, *, fill: float = 0.0, xp: Namespace) -> Array:
    """``x / y``, and ``fill`` with gradient 0 where y is 0 (below the smallest normal number).

    Args:
        x, y: broadcast with each other, any floating format; one of them may be a number.
        fill: what stands in for a quotient that is not defined.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> divide(np.asarray([1.0, 0.0]), np.asarray([2.0, 0.0]), xp=np).tolist()
        [0.5, 0.0]
    """
    (x, y), dtype = widened(x, y, xp=xp)
    zero = xp.abs(y) < smallest_normal(y)
    return xp.astype(xp.where(zero, fill, x / xp.where(zero, 1.0, y)), dtype)


def reciprocal(x: Array, *, fill: float = 0.0, xp: Namespace) -> Array:
    """``1 / x``, and ``fill`` with gradient 0 where x is 0 (below the smallest normal number).

    Example:
        >>> import array_api_compat.numpy as np
        >>> reciprocal(np.asarray([4.0, 0.0]), xp=np).tolist()
        [0.25, 0.0]
    """
    return divide(xp.ones_like(x), x, fill=fill, xp=xp)


def sqrt(x: Array, *, xp: Namespace) -> Array:
    """Square root with gradient 0 at 0, where the derivative is infinite.

    Below the smallest normal number (negative x too) the value is 0 and the gradient 0.

    Example:
        >>> import array_api_compat.numpy as np
        >>> sqrt(np.asarray([4.0, 0.0, -1.0]), xp=np).tolist()
        [2.0, 0.0, 0.0]
    """
    (x,), dtype = widened(x, xp=xp)
    below = x < smallest_normal(x)
    return xp.astype(xp.where(below, 0.0, xp.sqrt(xp.where(below, 1.0, x))), dtype)


def rsqrt(x: Array, *, fill: float = 0.0, xp: Namespace) -> Array:
    """``1 / sqrt(x)``, and ``fill`` with gradient 0 below the smallest normal number.

    Example:
        >>> import array_api_compat.numpy as np
        >>> rsqrt(np.asarray([4.0, 0.0]), xp=np).tolist()
        [0.5, 0.0]
    """
    (x,), dtype = widened(x, xp=xp)
    below = x < smallest_normal(x)
    return xp.astype(xp.where(below, fill, 1.0 / xp.sqrt(xp.where(below, 1.0, x))), dtype)


def power(x: Array, exponent: float, *, fill: float = 0.0, xp: Namespace) -> Array:
    """``x ** exponent`` for a fixed exponent, finite with finite gradient at 0.

    At 0 (below the smallest normal number in magnitude): 1 for exponent 0, 0 for a positive one, ``fill``
    for a negative one; the gradient there is 1 for exponent 1 and 0 for any other. A negative x gives
    ``fill`` and gradient 0 unless the exponent is a whole number.

    Raises:
        ValueError: the exponent is not a finite number.

    Example:
        >>> import array_api_compat.numpy as np
        >>> power(np.asarray([4.0, 0.0, -2.0]), 0.5, xp=np).tolist()
        [2.0, 0.0, 0.0]
        >>> power(np.asarray([-2.0, 0.0]), 3, xp=np).tolist()
        [-8.0, 0.0]
    """
    exponent = check_number("exponent", exponent)
    (x,), dtype = widened(x, xp=xp)
    if exponent == 0:
        return xp.astype(xp.where(xp.isnan(x), x, xp.ones_like(x)), dtype)
    if exponent == 1:
        return xp.astype(x, dtype)
    whole, odd = exponent == int(exponent), exponent % 2 == 1
    zero = xp.abs(x) < smallest_normal(x)
    refused = zero if whole else zero | (x < 0)
    size = xp.pow(xp.abs(xp.where(refused, 1.0, x)), exponent)
    signed = xp.where(x < 0, -size, size) if whole and odd else size
    at_zero = 0.0 if exponent > 0 else fill
    result = xp.where(refused, xp.where(zero, xp.full_like(x, at_zero), fill), signed)
    return xp.astype(result, dtype)


def arccos(x: Array, *, xp: Namespace) -> Array:
    """Inverse cosine with gradient 0 at and beyond -1 and 1, where the value is pi and 0.

    Example:
        >>> import array_api_compat.numpy as np
        >>> arccos(np.asarray([1.0, 1.0000001, 0.0]), xp=np).tolist()
        [0.0, 0.0, 1.57...]
    """
    (x,), dtype = widened(x, xp=xp)
    outside = xp.abs(x) >= 1
    ends = xp.where(x > 0, xp.zeros_like(x), 3.141592653589793)
    return xp.astype(xp.where(outside, ends, xp.acos(xp.where(outside, 0.0, x))), dtype)


def arctanh(x: Array, *, xp: Namespace) -> Array:
    """Inverse hyperbolic tangent that stays finite: at and beyond 1 the value at the last number below 1.

    By the format of x: 8.66 in float32, 4.16 in float16, 3.12 in bfloat16. The gradient there is 0.

    Example:
        >>> import array_api_compat.numpy as np
        >>> arctanh(np.asarray([0.5, 1.0], dtype=np.float32), xp=np).tolist()
        [0.549..., 8.66...]
    """
    edge = 1.0 - get_format(x.dtype).eps / 2
    (x,), dtype = widened(x, xp=xp)
    outside = xp.abs(x) > edge
    end = 0.5 * xp.log((1.0 + xp.full_like(x, edge)) / (1.0 - xp.full_like(x, edge)))
    inner = xp.atanh(xp.where(outside, 0.0, x))
    return xp.astype(xp.where(outside, xp.where(x > 0, end, -end), inner), dtype)


def arctan2(y: Array, x: Array, *, xp: Namespace) -> Array:
    """The angle of the point (x, y), with gradient 0 at the origin, where it is 0.

    Example:
        >>> import array_api_compat.numpy as np
        >>> arctan2(np.asarray([0.0, 1.0]), np.asarray([0.0, 0.0]), xp=np).tolist()
        [0.0, 1.57...]
    """
    (y, x), dtype = widened(y, x, xp=xp)
    origin = (xp.abs(x) < smallest_normal(x)) & (xp.abs(y) < smallest_normal(y))
    angle = xp.atan2(xp.where(origin, 0.0, y), xp.where(origin, 1.0, x))
    return xp.astype(xp.where(origin, 0.0, angle), dtype)


def soft_cap(x: Array, cap: float, *, xp: Namespace) -> Array:
    """``cap * tanh(x / cap)``: about x where it is small, never beyond ``cap``.

    Gemma 2 caps attention logits at 50 and output logits at 30. Far beyond the cap the gradient is 0: see
    how many elements are there before relying on it. inf gives cap.

    Raises:
        ValueError: ``cap`` is not a positive finite number.

    Example:
        >>> import array_api_compat.numpy as np
        >>> soft_cap(np.asarray([1.0, 1e9]), 30.0, xp=np).round(3).tolist()
        [1.0, 30.0]
    """
    cap = check_number("cap", cap, above=0.0)
    (x,), dtype = widened(x, xp=xp)
    return xp.astype(cap * xp.tanh(x / cap), dtype)
