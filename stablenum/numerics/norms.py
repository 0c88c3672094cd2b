"""Norms, moments and the layers made of them."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from stablenum.errors import check_int, check_number
from stablenum.numerics.common import power_of_two_below, smallest_normal, widened
from stablenum.numerics.elementary import divide

__all__ = ["layer_norm", "norm", "normalize", "rms_norm", "std", "variance"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
Axis: TypeAlias = int | tuple[int, ...] | None

# Squares of numbers up to here, and sums of many of them, stay in range.
_LARGE = 2.0**40


def norm(x: Array, *, axis: Axis = None, keepdims: bool = False, xp: Namespace) -> Array:
    """L2 norm with gradient 0 for a zero vector; nothing overflows or underflows on the way.

    ``s sqrt(sum((x / s)^2))`` with s near the largest magnitude. An element of inf gives inf with
    gradient 0; NaN gives NaN; no elements give 0.

    Args:
        x: any shape, any floating format.
        axis: over which; None for all.
        keepdims: keep the axes with length 1.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> norm(np.asarray([[3e30, 4e30], [0.0, 0.0]], dtype=np.float32), axis=1, xp=np).tolist()
        [5.0...e+30, 0.0]
    """
    (x,), dtype = widened(x, xp=xp)
    result = _norm(x, axis, xp=xp)
    return xp.astype(result if keepdims else _squeezed(result, axis, xp=xp), dtype)


def _norm(x: Array, axis: Axis, *, xp: Namespace) -> Array:
    if 0 in x.shape:
        return xp.sum(x, axis=axis, keepdims=True)
    largest = xp.max(xp.abs(x), axis=axis, keepdims=True)
    scale = power_of_two_below(largest, xp=xp)
    ordinary = (largest >= smallest_normal(x)) & xp.isfinite(largest)
    ratio = xp.where(ordinary, x, 0.0) / scale
    squares = xp.sum(ratio * ratio, axis=axis, keepdims=True)
    result = scale * xp.sqrt(xp.where(ordinary, squares, 1.0))
    ends = xp.where(xp.isfinite(largest), 0.0, _constant(largest, xp=xp))
    return xp.where(ordinary, result, ends)


def _constant(x: Array, *, xp: Namespace) -> Array:
    """inf or NaN, as x has it, without gradient."""
    return xp.where(xp.isnan(x), math.nan, xp.full_like(x, math.inf))


def _squeezed(x: Array, axis: Axis, *, xp: Namespace) -> Array:
    return xp.reshape(x, ()) if axis is None else xp.squeeze(x, axis=axis)


def normalize(x: Array, *, axis: Axis = -1, xp: Namespace) -> Array:
    """``x / norm(x)``; a zero vector stays 0, with gradient 0.

    A vector with an inf in it gives 0 but for NaN there: x / inf.

    Example:
        >>> import array_api_compat.numpy as np
        >>> normalize(np.asarray([[3.0, 4.0], [0.0, 0.0]]), xp=np).tolist()
        [[0.6, 0.8], [0.0, 0.0]]
    """
    (x,), dtype = widened(x, xp=xp)
    return xp.astype(divide(x, _norm(x, axis, xp=xp), xp=xp), dtype)


def variance(
    x: Array, *, axis: Axis = -1, correction: int = 0, keepdims: bool = False, xp: Namespace
) -> Array:
    """The mean squared distance from the mean, in two passes, in float32 at least.

    Args:
        x: any shape, any floating format.
        axis: over which; None for all.
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
    away, degrees = _from_mean(x, axis, correction, xp=xp)
    result = xp.sum(away * away / degrees, axis=axis, keepdims=True)
    return xp.astype(result if keepdims else _squeezed(result, axis, xp=xp), dtype)


def std(x: Array, *, axis: Axis = -1, correction: int = 0, keepdims: bool = False, xp: Namespace) -> Array:
    """Standard deviation with gradient 0 for constant values, where it is 0; never overflows.

    Arguments and errors as :func:`variance`.

    Example:
        >>> import array_api_compat.numpy as np
        >>> std(np.asarray([[1.0, 3.0], [2.0, 2.0]]), xp=np).tolist()
        [1.0, 0.0]
    """
    (x,), dtype = widened(x, xp=xp)
    away, degrees = _from_mean(x, axis, correction, xp=xp)
    result = _norm(away, axis, xp=xp) / math.sqrt(degrees)
    return xp.astype(result if keepdims else _squeezed(result, axis, xp=xp), dtype)


def _from_mean(x: Array, axis: Axis, correction: int, *, xp: Namespace) -> tuple[Array, int]:
    """The distances from the mean, and the number to divide their squares by."""
    check_int("correction", correction, at_least=0)
    n = _count(x, axis)
    check_int("the number of values less correction", n - correction, at_least=1)
    return x - xp.sum(x / n, axis=axis, keepdims=True), n - correction


def _count(x: Array, axis: Axis) -> int:
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    return math.prod(x.shape[a] for a in axes)


def rms_norm(
    x: Array, weight: Array | None = None, *, axis: Axis = -1, eps: float = 1e-6, xp: Namespace
) -> Array:
    """``x / sqrt(mean(x^2) + eps) * weight`` with the statistics in float32 (arXiv 1910.07467).

    Rows with magnitudes beyond 2^40 are scaled down first, so their squares do not overflow.

    Args:
        x: any shape, any floating format; the result has its format.
        weight: broadcast with x, or None.
        axis: over which the mean is taken.
        eps: at least 0; with 0 a zero row gives 0.
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
    result = _over_rms(wide, axis, eps, xp=xp)
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
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, statistics in two passes in float32.

    Ba et al. 2016 (arXiv 1607.06450). Arguments and errors as :func:`rms_norm`, with a ``bias``. A
    constant row gives the bias.

    Example:
        >>> import array_api_compat.numpy as np
        >>> layer_norm(np.asarray([[1.0, 3.0]]), eps=0.0, xp=np).tolist()
        [[-1.0, 1.0]]
    """
    eps = check_number("eps", eps, at_least=0.0)
    (wide,), dtype = widened(x, xp=xp)
    away, _ = _from_mean(wide, axis, 0, xp=xp)
    result = _over_rms(away, axis, eps, xp=xp)
    if weight is not None:
        result = result * xp.astype(weight, wide.dtype)
    if bias is not None:
        result = result + xp.astype(bias, wide.dtype)
    return xp.astype(result, dtype)


def _over_rms(x: Array, axis: Axis, eps: float, *, xp: Namespace) -> Array:
    largest = xp.max(xp.abs(x), axis=axis, keepdims=True)
    scale = xp.where(largest > _LARGE, power_of_two_below(largest, xp=xp), 1.0)
    ratio = x / scale
    mean_square = xp.mean(ratio * ratio, axis=axis, keepdims=True) + eps / scale / scale
    zero = mean_square < smallest_normal(x)
    return xp.where(zero, 0.0, ratio / xp.sqrt(xp.where(zero, 1.0, mean_square)))
