"""Quotients, roots, powers and inverse functions that are safe at the edges of their domains."""

from __future__ import annotations

import math
from numbers import Number
from typing import Any, TypeAlias

from stablenum._support.settings_checks import check_number
from stablenum.errors import bad_type
from stablenum.formats import get_format
from stablenum.numerics.common import (
    check_fill,
    power_of_two_below,
    smallest_normal,
    widened,
    without_gradient,
)

__all__ = ["arccos", "arctan2", "arctanh", "divide", "power", "reciprocal", "rsqrt", "soft_cap", "sqrt"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


def divide(x: Array, y: Array, *, fill: float = 0.0, xp: Namespace) -> Array:
    """``x / y``, or ``fill`` with gradient 0 where y is 0 (below the smallest normal number).

    A NaN in either argument gives NaN, also where y is 0.

    Args:
        x, y: arrays of any floating-point format, broadcast with each other; one of them may be a number.
        fill: the value of an undefined quotient.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> divide(np.asarray([1.0, 0.0]), np.asarray([2.0, 0.0]), xp=np).tolist()
        [0.5, 0.0]
    """
    check_fill(fill)
    (x, y), dtype = widened(x, y, xp=xp)
    zero = xp.abs(y) < smallest_normal(y)
    at_zero = xp.where(xp.isnan(x), x, fill)
    return xp.astype(xp.where(zero, at_zero, _quotient(x, xp.where(zero, 1.0, y), xp=xp)), dtype)


def _quotient(x: Array, y: Array, *, xp: Namespace) -> Array:
    """Return ``x / y``, with derivatives that are in range wherever their mathematical values are.

    The first derivative with respect to y is of the size of ``x / y^2``, the second of ``x / y^3``. JAX
    computes the first as ``x * (1 / y^2)``, which is NaN for 0 / 1e-20 in float32. Therefore a y outside the
    middle fifth of the exponents is brought near 1 by a power of two. The same power of two is applied to x
    or, if that would leave the range, to the result.
    """
    fifth = 2.0 ** (math.frexp(get_format(y.dtype).max)[1] // 5)
    size = xp.abs(y)
    small, large = size < 1 / fifth, size > fifth
    factor = 1.0 / xp.where(small | large, power_of_two_below(size, deep=True, xp=xp), 1.0)
    first = xp.where(xp.abs(x) < 1, small, large)
    before, after = xp.where(first, factor, 1.0), xp.where(first, 1.0, factor)
    return (x * before) / (y * factor) * after


def reciprocal(x: Array, *, fill: float = 0.0, xp: Namespace) -> Array:
    """``1 / x``, or ``fill`` with gradient 0 where x is 0 (below the smallest normal number).

    Example:
        >>> import array_api_compat.numpy as np
        >>> reciprocal(np.asarray([4.0, 0.0]), xp=np).tolist()
        [0.25, 0.0]
    """
    return divide(xp.ones_like(x), x, fill=fill, xp=xp)


def sqrt(x: Array, *, xp: Namespace) -> Array:
    """Square root with gradient 0 at 0, where the derivative is infinite.

    Where x is below the smallest normal number, which includes negative x, value and gradient are 0.

    Example:
        >>> import array_api_compat.numpy as np
        >>> sqrt(np.asarray([4.0, 0.0, -1.0]), xp=np).tolist()
        [2.0, 0.0, 0.0]
    """
    (x,), dtype = widened(x, xp=xp)
    below = x < smallest_normal(x)
    return xp.astype(xp.where(below, 0.0, xp.sqrt(xp.where(below, 1.0, x))), dtype)


def rsqrt(x: Array, *, fill: float = 0.0, xp: Namespace) -> Array:
    """``1 / sqrt(x)``, or ``fill`` with gradient 0 where x is below the smallest normal number.

    Example:
        >>> import array_api_compat.numpy as np
        >>> rsqrt(np.asarray([4.0, 0.0]), xp=np).tolist()
        [0.5, 0.0]
    """
    check_fill(fill)
    (x,), dtype = widened(x, xp=xp)
    below = x < smallest_normal(x)
    return xp.astype(xp.where(below, fill, xp.pow(xp.where(below, 1.0, x), -0.5)), dtype)


def power(x: Array, exponent: float | Array, *, fill: float = 0.0, xp: Namespace) -> Array:
    """``x ** exponent``, with a finite value and gradient at 0.

    Where x is 0 (below the smallest normal number in magnitude), the value is 1 for exponent 0, 0 for a
    positive exponent and ``fill`` for a negative one; the gradient is 1 for exponent 1 and 0 for any other.
    A negative x gives ``fill`` and gradient 0 unless the exponent is a whole number.

    The exponent is a number or, where it is learned or not known before a program is compiled, an array that
    can be broadcast with x. Its own gradient is ``x ** exponent * log(abs(x))``, and 0 where x is 0 or the
    value is ``fill``; an exponent in it that is not finite gives NaN.

    Raises:
        ValueError: the exponent is a number that is not finite, or is beyond the range of the format.

    Example:
        >>> import array_api_compat.numpy as np
        >>> power(np.asarray([4.0, 0.0, -2.0]), 0.5, xp=np).tolist()
        [2.0, 0.0, 0.0]
        >>> power(np.asarray([-2.0, 0.0]), 3, xp=np).tolist()
        [-8.0, 0.0]
    """
    check_fill(fill)
    (x,), dtype = widened(x, xp=xp)
    if hasattr(exponent, "dtype") and not isinstance(exponent, Number):
        return xp.astype(_power_of_array(x, exponent, fill, xp=xp), dtype)
    largest = get_format(x.dtype).max
    exponent = check_number("exponent", exponent, at_least=-largest, at_most=largest)
    if exponent == 0:
        return xp.astype(xp.where(xp.isnan(x), x, xp.ones_like(x)), dtype)
    if exponent == 1:
        return xp.astype(x, dtype)
    whole, odd = exponent == int(exponent), exponent % 2 == 1
    zero = xp.abs(x) < smallest_normal(x)
    undefined = zero if whole else zero | (x < 0)
    base = xp.abs(xp.where(undefined, 1.0, x))
    whole_steps, rest = _split(exponent, get_format(x.dtype).eps)
    size = _split_power(base, whole_steps, rest, xp=xp) if rest else xp.pow(base, whole_steps)
    signed = xp.where(x < 0, -size, size) if whole and odd else size
    at_zero = 0.0 if exponent > 0 else fill
    result = xp.where(undefined, xp.where(zero, xp.full_like(x, at_zero), fill), signed)
    return xp.astype(result, dtype)


def _power_of_array(x: Array, exponent: Array, fill: float, *, xp: Namespace) -> Array:
    """Return ``x ** exponent`` for exponents whose values are not known when the function is called."""
    if "complex" in str(exponent.dtype):
        raise bad_type("exponent", "a real number or an array of real numbers", exponent)
    if type(exponent).__module__ == "numpy":
        exponent = xp.asarray(exponent)
    exponent = xp.astype(exponent, x.dtype)
    whole = exponent == xp.floor(exponent)
    odd = exponent - 2.0 * xp.floor(0.5 * exponent) == 1
    zero = xp.abs(x) < smallest_normal(x)
    undefined = zero | ((x < 0) & xp.logical_not(whole))
    base = xp.abs(xp.where(undefined, 1.0, x))
    # The exponent is divided as in _split.
    size = xp.abs(exponent)
    step = xp.where(size > 2, 2.0 * power_of_two_below(size, xp=xp), 1.0) * (4.0 * get_format(x.dtype).eps)
    steps = xp.trunc(exponent / step) * step
    rest = exponent - steps
    whole_steps = rest == 0  # its correction would be 1, with a slope of 0 x inf where the power overflows
    power = xp.where(
        whole_steps,
        xp.pow(xp.where(whole_steps, base, 1.0), xp.where(whole_steps, exponent, 1.0)),
        _split_power(xp.where(whole_steps, 1.0, base), steps, rest, xp=xp),
    )
    signed = xp.where((x < 0) & odd, -power, power)
    at_zero = xp.where(exponent > 0, 0.0, xp.where(exponent == 0, 1.0, fill))
    result = xp.where(undefined, xp.where(zero, at_zero, fill), signed)
    as_it_is = (zero & (exponent == 1)) | (xp.isnan(x) & (exponent == 0))
    return xp.where(as_it_is, x, result)


def _split(exponent: float, eps: float) -> tuple[float, float]:
    """Return the exponent as a number from which 1 or 2 can be subtracted exactly, and the small rest.

    Rounding 0.7 to float32 would cost 23 ulp at either end of the range, and so would 0.7 - 1 in the
    derivative.
    """
    step = 4.0 * eps * 2.0 ** math.frexp(exponent)[1] if abs(exponent) > 2 else 4.0 * eps
    # The exponent is rounded towards 0, so the rest has the sign of the exponent. The rest's contribution to
    # the derivative then has the same sign as the derivative, so beyond the range the sum is inf and not
    # inf - inf.
    steps = math.trunc(exponent / step) * step
    return steps, exponent - steps


def _split_power(x: Array, steps: float | Array, rest: float | Array, *, xp: Namespace) -> Array:
    """Return ``x ** (steps + rest)`` as ``x^steps x^rest``, for positive x and a small rest.

    The second derivative of ``x^rest`` leaves the range long before that of ``x^steps``. Therefore, where x
    is far from 1, a power of two is factored out. For a negative exponent this power of two is above x, so
    that its own power does not overflow. (The approximation ``1 + rest log x`` of ``x^rest`` would have the
    gradient rest * power / x, in which XLA flushes the product to 0 before it divides.)
    """
    third = 2.0 ** (math.frexp(get_format(x.dtype).max)[1] // 3)
    infinite = xp.isinf(x)
    ends = xp.pow(xp.where(infinite, x, 1.0), steps + rest)
    x = xp.where(infinite, 1.0, x)
    near = power_of_two_below(x, deep=True, xp=xp)
    near = (
        near * (1.0 if steps > 0 else 2.0)
        if isinstance(steps, float)
        else xp.where(steps > 0, near, 2.0 * near)
    )
    scale = xp.where((x < 1 / third) | (x > third), near, 1.0)
    ratio = x * (1.0 / scale)
    correction = xp.pow(ratio, rest) * xp.pow(scale, rest)
    return xp.where(infinite, ends, xp.pow(ratio, steps) * (xp.pow(scale, steps) * correction))


def arccos(x: Array, *, xp: Namespace) -> Array:
    """Inverse cosine with gradient 0 at and beyond -1 and 1, where the values are pi and 0.

    The value is computed as ``2 arctan2(sqrt(1 - x), sqrt(1 + x))``, because near 1 the usual derivative
    ``-1 / sqrt(1 - x^2)`` loses precision in the square.

    Example:
        >>> import array_api_compat.numpy as np
        >>> arccos(np.asarray([1.0, 1.0000001, 0.0]), xp=np).tolist()
        [0.0, 0.0, 1.57...]
    """
    (x,), dtype = widened(x, xp=xp)
    outside = xp.abs(x) >= 1
    ends = xp.where(x > 0, xp.zeros_like(x), 3.141592653589793)
    inside = xp.where(outside, 0.0, x)
    angle = 2.0 * xp.atan2(xp.sqrt(1.0 - inside), xp.sqrt(1.0 + inside))
    return xp.astype(xp.where(outside, ends, angle), dtype)


def arctanh(x: Array, *, xp: Namespace) -> Array:
    """Inverse hyperbolic tangent that stays finite: for x of 1 and above, the value is taken at the largest
    number below 1.

    That value depends on the format of x: 8.66 in float32, 4.16 in float16, 3.12 in bfloat16. The gradient
    there is 0. For x of -1 and below, the sign is reversed. The function is computed as
    ``log1p(2 x / (1 - x)) / 2``, because near 1 the usual derivative ``1 / (1 - x^2)`` loses precision in the
    square, and because XLA's arctanh is off by 120 ulp in float64 on a CPU.

    Example:
        >>> import array_api_compat.numpy as np
        >>> arctanh(np.asarray([0.5, 1.0], dtype=np.float32), xp=np).tolist()
        [0.549..., 8.66...]
    """
    (x,), dtype = widened(x, xp=xp)
    edge = 1.0 - get_format(dtype).eps / 2
    outside = xp.abs(x) > edge
    end = math.atanh(edge)
    inside = xp.where(outside, 0.0, x)
    size = xp.where(inside < 0, -inside, inside)  # abs would have no gradient at 0
    inner = 0.5 * xp.log1p(2.0 * size / (1.0 - size))
    inner = xp.where(inside < 0, -inner, inner)
    return xp.astype(xp.where(outside, xp.where(x > 0, xp.full_like(x, end), -end), inner), dtype)


def arctan2(y: Array, x: Array, *, xp: Namespace) -> Array:
    """Return the angle of the point (x, y); at the origin the angle and its gradient are 0.

    A point counts as the origin if both coordinates are below the smallest normal number in magnitude. The
    gradient is also correct for points so near to or far from the origin that ``x^2 + y^2`` leaves the range;
    it is 0 where a coordinate is infinite. Closer to the origin than 8.7e-19 (1.2e-153 in float64) the second
    derivatives would leave the range; they are 0 there.

    Example:
        >>> import array_api_compat.numpy as np
        >>> arctan2(np.asarray([0.0, 1.0]), np.asarray([0.0, 0.0]), xp=np).tolist()
        [0.0, 1.57...]
    """
    (y, x), dtype = widened(y, x, xp=xp)
    origin = (xp.abs(x) < smallest_normal(x)) & (xp.abs(y) < smallest_normal(y))
    endless = xp.isinf(x) | xp.isinf(y)
    scale = power_of_two_below(xp.where(xp.abs(x) > xp.abs(y), xp.abs(x), xp.abs(y)), xp=xp)

    def near(v: Array, instead: float) -> Array:
        """Return v scaled to about 1. For a point at infinity, return 1 or -1 if v is infinite and 0 if it
        is finite."""
        direction = xp.where(xp.isinf(v), xp.where(v > 0, xp.ones_like(v), -1.0), xp.zeros_like(v))
        direction = xp.where(xp.isnan(v), v, direction)
        return xp.where(endless, direction, xp.where(origin, instead, xp.where(endless, 0.0, v) / scale))

    y, x = near(y, 0.0), near(x, 1.0)
    close = xp.logical_not(origin | endless) & (
        scale < 2.0 ** (4 - math.frexp(get_format(x.dtype).max)[1] // 2)
    )
    # For close points the angle is made linear: it is the angle of constants, plus a term whose value is 0
    # and which only contributes the slope.
    sine, cosine = _constant(y, xp=xp), _constant(x, xp=xp)
    slope = xp.where(close, y, 0.0) * cosine - xp.where(close, x, 0.0) * sine
    angle = xp.atan2(xp.where(close, sine, y), xp.where(close, cosine, x))
    angle = angle + xp.where(close, slope / xp.where(close, sine * sine + cosine * cosine, 1.0), 0.0)
    return xp.astype(xp.where(origin, 0.0, angle), dtype)


def _constant(x: Array, *, xp: Namespace) -> Array:
    """Return x without its gradient; the sign of 0 is kept."""
    return xp.where(x == 0, xp.floor(x), without_gradient(x, xp=xp))


def soft_cap(x: Array, cap: float, *, xp: Namespace) -> Array:
    """``cap * tanh(x / cap)``, which is close to x for small x and never beyond ``cap``.

    Gemma 2 caps attention logits at 50 and output logits at 30. Far beyond the cap the gradient is 0, so
    check how many elements are that large before you rely on this function. inf gives ``cap``. On a CPU, XLA
    flushes ``x / cap`` below the smallest normal number to 0.

    Raises:
        ValueError: ``cap`` is not a positive normal number of the format.

    Example:
        >>> import array_api_compat.numpy as np
        >>> soft_cap(np.asarray([1.0, 1e9]), 30.0, xp=np).round(3).tolist()
        [1.0, 30.0]
    """
    (x,), dtype = widened(x, xp=xp)
    form = get_format(x.dtype)
    cap = check_number("cap", cap, at_least=form.smallest_normal, at_most=form.max)
    ratio = x / cap
    size = xp.where(x < 0, -x, x)
    small = xp.abs(ratio) < 0.5
    # The frameworks compute tanh's derivative as 1 - tanh^2, which loses all digits where tanh is near 1.
    away = _decay(xp.where(small, cap, size), cap, xp=xp)
    far = (1.0 - away) / (1.0 + away)
    far = xp.where(ratio < 0, -far, far)
    return xp.astype(cap * xp.where(small, xp.tanh(xp.where(small, ratio, 0.0)), far), dtype)


def _decay(x: Array, cap: float, *, xp: Namespace) -> Array:
    """Return ``exp(-2 x / cap)`` for x of 0 or more, to the last digits.

    The exponential multiplies the rounding error of its argument by the argument: rounding 710 / 30, once in
    PyTorch and twice under XLA, which multiplies by the reciprocal of a constant, left 1.2e-6 and 2.5e-6 of
    error. Therefore x is divided into a multiple of the cap, without rounding, and a rest below it.
    """
    form = get_format(x.dtype)
    most = 2.0**9  # exp(-2 * most) is 0 in float64; a multiple has 10 bits
    digits = 1 - round(math.log2(form.eps)) - 10
    fraction, exponent = math.frexp(cap)
    high = math.ldexp(math.trunc(math.ldexp(fraction, digits)), exponent - digits)
    ratio = x / cap
    count = xp.floor(xp.where(ratio < most, ratio, most))
    rest = (x - count * high) - count * (cap - high)
    return xp.exp(-2.0 * count) * xp.exp(-2.0 * (rest / cap))
