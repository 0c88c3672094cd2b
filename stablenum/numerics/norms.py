"""Norms, moments and the normalization layers built from them."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from stablenum._support.settings_checks import check_int, check_number
from stablenum.formats import get_format
from stablenum.numerics.common import (
    Axis,
    check_axes,
    check_broadcasts,
    check_keepdims,
    power_of_two_below,
    smallest_normal,
    widened,
    without_gradient,
)

__all__ = ["layer_norm", "norm", "normalize", "rms_norm", "std", "variance"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


def norm(x: Array, *, axis: Axis = None, keepdims: bool = False, xp: Namespace) -> Array:
    """L2 norm with gradient 0 for a zero vector; no intermediate result overflows or underflows.

    The norm is computed as ``s sqrt(sum((x / s)^2))`` with s a power of two near the largest magnitude. A
    vector whose elements are all below the smallest normal number in magnitude counts as zero. An infinite
    element gives inf with gradient 0; NaN gives NaN; a vector without elements gives 0.

    Args:
        x: any shape, any floating-point format.
        axis: the axis or axes to take the norm over; None for all.
        keepdims: keep the axes with length 1.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> norm(np.asarray([[0.0, 2e200], [0.0, 0.0]]), axis=1, xp=np).tolist()
        [2e+200, 0.0]
    """
    (x,), dtype = widened(x, xp=xp)
    axis = check_axes(axis, x.ndim, xp=xp)
    check_keepdims(keepdims, xp=xp)
    result = _norm(x, axis, xp=xp)
    return xp.astype(result if keepdims else _squeezed(result, axis, xp=xp), dtype)


def _norm(x: Array, axis: Axis, *, xp: Namespace) -> Array:
    if 0 in x.shape:
        return xp.sum(x, axis=axis, keepdims=True)
    _, size, scale, ends = _scaled(x, axis, xp=xp)
    return xp.where(ends == 0, scale * size, xp.where(ends == 1, 0.0, ends))


def _scaled(x: Array, axis: Axis, *, xp: Namespace) -> tuple[Array, Array, Array, Array]:
    """Return x divided by a power of two, the norm of the quotient, the power of two, and a code.

    The code is 0 for an ordinary row. Where the norm is zero, inf or NaN, it is 1, inf or NaN and the
    quotient is 0.
    """
    largest = xp.max(xp.abs(x), axis=axis, keepdims=True)
    scale = power_of_two_below(largest, xp=xp)
    finite = xp.isfinite(largest)
    ordinary = (largest >= smallest_normal(x)) & finite
    ratio = xp.where(ordinary, x, 0.0) / scale
    squares = xp.sum(ratio * ratio, axis=axis, keepdims=True)
    size = xp.sqrt(xp.where(ordinary, squares, 1.0))
    without_gradient = xp.where(xp.isnan(largest), math.nan, xp.full_like(largest, math.inf))
    return ratio, size, scale, xp.where(ordinary, 0.0, xp.where(finite, 1.0, without_gradient))


def _squeezed(x: Array, axis: Axis, *, xp: Namespace) -> Array:
    return xp.reshape(x, ()) if axis is None else xp.squeeze(x, axis=axis)


def normalize(x: Array, *, axis: Axis = -1, xp: Namespace) -> Array:
    """``x / norm(x)``; a zero vector stays 0, with gradient 0.

    The result is also correct for vectors whose norm is beyond the largest number. A vector with an infinite
    element gives NaN for that element and 0 for the others (x / inf), with gradient 0. For vectors shorter
    than about 1e-19 (1e-154 in float64), the second derivatives, of the order of 1 / norm^2, are out of range
    and become inf or NaN.

    Example:
        >>> import array_api_compat.numpy as np
        >>> normalize(np.asarray([[3.0, 4.0], [0.0, 0.0]]), xp=np).tolist()
        [[0.6, 0.8], [0.0, 0.0]]
    """
    (x,), dtype = widened(x, xp=xp)
    axis = check_axes(axis, x.ndim, xp=xp)
    if 0 in x.shape:
        return xp.astype(x, dtype)
    ratio, size, _, ends = _scaled(x, axis, xp=xp)
    infinite = xp.where(xp.isinf(x), math.nan, xp.where(xp.isnan(ends), ends, 0.0))
    otherwise = xp.where(ends == 1, 0.0, infinite)
    return xp.astype(xp.where(ends == 0, ratio / size, otherwise), dtype)


def variance(
    x: Array, *, axis: Axis = -1, correction: int = 0, keepdims: bool = False, xp: Namespace
) -> Array:
    """Return the mean squared distance from the mean, in two passes, in float32 or wider.

    An array without rows gives an empty result; rows without elements raise a ValueError.

    The smallest value is subtracted first, so that the mean of numbers far from 0 loses no precision and
    equal numbers give exactly 0. An inf gives NaN. Values further apart than an eighth of the largest number
    give inf with gradient 0.

    Args:
        x: any shape, any floating-point format.
        axis: the axis or axes to average over; None for all.
        correction: 0 divides by n, 1 by n - 1.
        keepdims: keep the axes with length 1.
        xp: the array namespace.

    Raises:
        ValueError: n - ``correction`` is not positive.

    Example:
        >>> import array_api_compat.numpy as np
        >>> float(variance(np.asarray([10000.0, 10002.0], dtype=np.float32), xp=np))
        1.0
    """
    (x,), dtype = widened(x, xp=xp)
    axis = check_axes(axis, x.ndim, xp=xp)
    check_keepdims(keepdims, xp=xp)
    degrees = _degrees(x, axis, correction)
    if 0 in x.shape:
        return xp.astype(xp.sum(x, axis=axis, keepdims=keepdims), dtype)
    least, most = xp.min(x, axis=axis, keepdims=True), xp.max(x, axis=axis, keepdims=True)
    beyond = xp.isfinite(least) & xp.isfinite(most) & (most / 8 - least / 8 > get_format(x.dtype).max / 64)
    away = _centered(xp.where(beyond, 0.0, x), axis, xp=xp)
    result = xp.where(beyond, math.inf, xp.sum(away * (away / degrees), axis=axis, keepdims=True))
    return xp.astype(result if keepdims else _squeezed(result, axis, xp=xp), dtype)


def std(x: Array, *, axis: Axis = -1, correction: int = 0, keepdims: bool = False, xp: Namespace) -> Array:
    """Standard deviation that never overflows; for constant values it is 0 with gradient 0.

    An inf gives NaN. The arguments and errors are those of :func:`variance`.

    Example:
        >>> import array_api_compat.numpy as np
        >>> std(np.asarray([[1.0, 3.0], [2.0, 2.0]]), xp=np).tolist()
        [1.0, 0.0]
    """
    (x,), dtype = widened(x, xp=xp)
    axis = check_axes(axis, x.ndim, xp=xp)
    check_keepdims(keepdims, xp=xp)
    away, scale, degrees = _from_mean(x, axis, correction, xp=xp)
    squares = xp.sum(away * away, axis=axis, keepdims=True)
    zero = squares < smallest_normal(x)
    result = scale * (xp.sqrt(xp.where(zero, 1.0, squares)) / math.sqrt(degrees))
    result = xp.where(zero, 0.0, result)
    return xp.astype(result if keepdims else _squeezed(result, axis, xp=xp), dtype)


def _from_mean(
    x: Array, axis: Axis, correction: int, *, least: float = 0.0, xp: Namespace
) -> tuple[Array, Array, int]:
    """Return the distances from the mean divided by a power of two, that power, and the divisor of the
    variance."""
    degrees = _degrees(x, axis, correction)
    if 0 in x.shape:
        return x, xp.sum(x, axis=axis, keepdims=True), degrees
    scale = _scale(x, axis, least, xp=xp)
    return _centered(x / scale, axis, xp=xp), scale, degrees


def _degrees(x: Array, axis: Axis, correction: int) -> int:
    check_int("correction", correction, at_least=0)
    degrees = _count(x, axis) - correction
    return check_int("the number of values less correction", degrees, at_least=1)


def _centered(x: Array, axis: Axis, *, xp: Namespace) -> Array:
    """Return the distances from the mean; the differences between the numbers must be in range."""
    x = x - without_gradient(xp.min(x, axis=axis, keepdims=True), xp=xp)
    return x - xp.sum(x / _count(x, axis), axis=axis, keepdims=True)


def _scale(x: Array, axis: Axis, least: float, *, xp: Namespace) -> Array:
    """Return the power of two near the largest magnitude, but at least ``least`` (a power of two, or 0)."""
    scale = power_of_two_below(xp.max(xp.abs(x), axis=axis, keepdims=True), xp=xp)
    return xp.where(scale < least, xp.full_like(scale, least), scale)


def _count(x: Array, axis: Axis) -> int:
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    return math.prod([x.shape[a] for a in axes])  # torch.compile does not trace a generator here


def rms_norm(
    x: Array, weight: Array | None = None, *, axis: Axis = -1, eps: float = 1e-6, xp: Namespace
) -> Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` with the statistics in float32 (arXiv 1910.07467).

    Each row is first divided by a power of two near its largest magnitude (at least about sqrt(eps)), so that
    no square overflows or underflows. A row with an inf gives NaN for the inf and 0 elsewhere; an empty row
    stays empty.

    Args:
        x: any shape, any floating-point format; the result has its format.
        weight: broadcast with x, or None.
        axis: the axis or axes to average over.
        eps: at least 0; with 0, a zero row gives 0.
        xp: the array namespace.

    Raises:
        ValueError: ``eps`` is negative or not finite.

    Example:
        >>> import array_api_compat.numpy as np
        >>> rms_norm(np.asarray([[3.0, 4.0]], dtype=np.float16), xp=np).tolist()
        [[0.848..., 1.131...]]
    """
    eps = check_number("eps", eps, at_least=0.0)
    (wide,), dtype = widened(x, xp=xp)
    axis = check_axes(axis, wide.ndim, xp=xp)
    check_broadcasts("weight", weight, x)
    if 0 in wide.shape:
        return x
    scale = _scale(wide, axis, _power_above(eps), xp=xp)
    result = _over_rms(wide / scale, scale, axis, eps, xp=xp)
    return xp.astype(result if weight is None else result * xp.astype(weight, wide.dtype), dtype)


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    axis: Axis = -1,
    eps: float = 1e-5,
    xp: Namespace,
) -> Array:
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, with two-pass statistics in float32.

    Layer normalization is due to Ba et al. 2016 (arXiv 1607.06450). The arguments and errors are those of
    :func:`rms_norm`, plus ``bias``. A constant row gives the bias, a row with an inf gives NaN, and rows
    without elements raise a ValueError.

    Example:
        >>> import array_api_compat.numpy as np
        >>> layer_norm(np.asarray([[1.0, 3.0]]), eps=0.0, xp=np).tolist()
        [[-1.0, 1.0]]
    """
    eps = check_number("eps", eps, at_least=0.0)
    (wide,), dtype = widened(x, xp=xp)
    axis = check_axes(axis, wide.ndim, xp=xp)
    check_broadcasts("weight", weight, x)
    check_broadcasts("bias", bias, x)
    away, scale, _ = _from_mean(wide, axis, 0, least=_power_above(eps), xp=xp)
    result = away if 0 in wide.shape else _over_rms(away, scale, axis, eps, xp=xp)
    if weight is not None:
        result = result * xp.astype(weight, wide.dtype)
    if bias is not None:
        result = result + xp.astype(bias, wide.dtype)
    return xp.astype(result, dtype)


def _power_above(eps: float) -> float:
    """Return the power of two at or above sqrt(eps), so that dividing by it rounds nothing; 0 for eps = 0."""
    return 2.0 ** math.ceil(math.log2(math.sqrt(eps))) if eps else 0.0


def _over_rms(ratio: Array, scale: Array, axis: Axis, eps: float, *, xp: Namespace) -> Array:
    """Return ``x / sqrt(mean(x^2) + eps)`` for x = ratio * scale."""
    root = math.sqrt(eps) / scale
    mean_square = xp.mean(ratio * ratio, axis=axis, keepdims=True) + root * root
    zero = mean_square < smallest_normal(ratio)
    return xp.where(zero, 0.0, ratio / xp.sqrt(xp.where(zero, 1.0, mean_square)))
