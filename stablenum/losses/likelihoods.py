"""Negative log-likelihoods of the normal distribution and of distributions of counts."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from stablenum._support.settings_checks import check_number
from stablenum.formats import get_format
from stablenum.losses.common import (
    check_fits,
    check_reduction,
    check_same_shape,
    floored,
    items_left,
    prepared,
    reduced,
)
from stablenum.losses.gamma_function import log_factorial, log_rising

__all__ = ["gaussian_nll", "negative_binomial_nll", "poisson_nll"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


def gaussian_nll(
    mean: Array,
    targets: Array,
    var: Array,
    *,
    eps: float = 1e-6,
    full: bool = False,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``(log v + (target - mean)^2 / v) / 2`` with ``v = max(var, eps)``.

    Where the variance is below ``eps`` (including 0 and negative values), the value and the gradients are
    those at ``eps``. The gradient of the variance does not vanish there, so the variance can rise above
    ``eps`` again.

    Edge cases: the quotient is computed as ``(d / sqrt(v))^2`` with d = target - mean. Where it is beyond the
    format's range, the value and the gradients are inf, never NaN.

    Args:
        mean: any shape, any floating-point format.
        targets: the shape of ``mean``.
        var: broadcast with ``mean``.
        eps: the smallest variance, at least the smallest normal number.
        full: add the constant ``log(2 pi) / 2``.
        mask: bool, broadcast with ``mean``; False leaves an item out, whatever its value.
        reduction: "mean" over the valid items, "sum" or "none".
        dtype: the format of the result; that of ``mean`` if None. The loss is computed in float32 or wider.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or ``eps`` is below the smallest normal
            number.

    Example:
        >>> import array_api_compat.numpy as np
        >>> m, y, v = np.asarray([0.0, 1.0]), np.asarray([1.0, 1.0]), np.asarray([1.0, 0.0])
        >>> gaussian_nll(m, y, v, reduction="none", xp=np).round(4).tolist()
        [0.5, -6.9078]
    """
    reduction, eps = check_reduction(reduction), check_number("eps", eps, above=0.0)
    check_same_shape("targets", targets, "mean", mean)
    check_fits("var", var, mean.shape, of="mean")
    (mean, targets, var), result = prepared(mean, targets, var, dtype=dtype, xp=xp)
    mean, targets, var = items_left(mask, mean, targets, var, shape=mean.shape, xp=xp)
    var = floored(var, eps, xp=xp)
    ratio = (targets - mean) / xp.sqrt(var)
    items = 0.5 * (xp.log(var) + ratio * ratio)
    if full:
        items = items + 0.5 * math.log(2 * math.pi)
    return reduced(items, reduction=reduction, dtype=result, mask=mask, xp=xp)


def poisson_nll(
    log_rate: Array,
    targets: Array,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    max_log_rate: float | None = None,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``exp(z) - y z`` for the count y and the logarithm z of its rate.

    Beyond m = ``max_log_rate``, the exponential is replaced by its tangent ``exp(m) (1 + z - m)``, whose
    value and gradient stay finite where the exponential would be inf.

    Args:
        log_rate: any shape, any floating-point format; the rate itself with ``log_input=False``.
        targets: counts, the shape of ``log_rate``.
        log_input: whether the first argument is the logarithm of the rate. If not, the loss is
            ``rate - y log(max(rate, eps))``, whose gradient below ``eps`` is that at ``eps``.
        full: add ``log(y!)`` (exactly; torch adds Stirling's approximation for y > 1). In this term, targets
            below 0 count as 0.
        eps: the smallest rate for ``log_input=False``, above 0.
        max_log_rate: where the tangent begins. None means 0.9 times the logarithm of the largest number in
            the format of ``log_rate`` (float16 9.98, bfloat16 and float32 79.8, float64 638). A value above
            0.99 times that logarithm for the format of the computation is reduced to this limit.
        mask: bool, broadcast with ``log_rate``; False leaves an item out, whatever its value.
        reduction: "mean" over the valid items, "sum" or "none".
        dtype: the format of the result; that of ``log_rate`` if None. The loss is computed in float32 or
            wider.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or a number is out of its range.

    Example:
        >>> import array_api_compat.numpy as np
        >>> z, y = np.asarray([0.0, 1000.0], dtype=np.float32), np.asarray([1.0, 0.0])
        >>> bool(np.isfinite(poisson_nll(z, y, xp=np)))
        True
    """
    reduction, eps = check_reduction(reduction), check_number("eps", eps, above=0.0)
    check_same_shape("targets", targets, "log_rate", log_rate)
    (z, y), result = prepared(log_rate, targets, dtype=dtype, xp=xp)
    if max_log_rate is None:
        max_log_rate = 0.9 * math.log(get_format(log_rate.dtype).max)
    cap = check_number("max_log_rate", max_log_rate, at_most=700.0)
    # If exp(cap) were inf, it would be multiplied by 0 in the gradient of every item below the cap.
    cap = min(cap, 0.99 * math.log(get_format(z.dtype).max))
    z, y = items_left(mask, z, y, shape=z.shape, xp=xp)
    if log_input:
        above = z > cap
        most, low = math.exp(cap), xp.where(above, 0.0, z)
        # The tangent is written as a single product, because the rate and y z may each be out of range.
        tangent = (most - y) * xp.where(above, z - cap, 0.0) + (most - y * cap)
        items = xp.where(above, tangent, xp.exp(low) - y * low)
    else:
        items = z - y * xp.log(floored(z, eps, xp=xp))
    if full:
        items = items + log_factorial(xp.where(y < 0, 0.0, y), xp=xp)
    return reduced(items, reduction=reduction, dtype=result, mask=mask, xp=xp)


def negative_binomial_nll(
    log_mean: Array,
    targets: Array,
    total_count: Array,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """Return the loss of a count y for the mean m and the variance ``m + m^2 / r``, where r is the
    ``total_count`` (inverse dispersion).

    The loss is ``r softplus(z - log r) + y softplus(log r - z) - log(Gamma(r + y) / Gamma(r))`` with
    z = log m. No mean is exponentiated, and the quotient of the two Gamma functions, whose logarithms cancel
    for large r (where the distribution becomes Poisson's), is computed as one function. In float32, value and
    gradient are finite for means up to 1e30 and counts up to 1e20, whatever the ``total_count``.

    Args:
        log_mean: any shape, any floating-point format; the mean itself with ``log_input=False``.
        targets: counts in the shape of ``log_mean``; values below 0 count as 0.
        total_count: above 0, broadcast with ``log_mean``. Below ``eps``, value and gradient are those at
            ``eps``.
        log_input: whether the first argument is the logarithm of the mean.
        full: add ``log(y!)``, which does not depend on the parameters.
        eps: the smallest ``total_count``, and the smallest mean for ``log_input=False``; above 0.
        mask: bool, broadcast with ``log_mean``; False leaves an item out, whatever its value.
        reduction: "mean" over the valid items, "sum" or "none".
        dtype: the format of the result; that of ``log_mean`` if None. The loss is computed in float32 or
            wider.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or ``eps`` is below the smallest normal
            number.

    Example:
        >>> import array_api_compat.numpy as np
        >>> z, y, r = np.asarray([0.0]), np.asarray([0.0]), np.asarray([1.0])
        >>> float(negative_binomial_nll(z, y, r, xp=np))  # P(0) = 1 / 2
        0.693...
    """
    reduction, eps = check_reduction(reduction), check_number("eps", eps, above=0.0)
    check_same_shape("targets", targets, "log_mean", log_mean)
    check_fits("total_count", total_count, log_mean.shape, of="log_mean")
    (z, y, r), result = prepared(log_mean, targets, total_count, dtype=dtype, xp=xp)
    z, y, r = items_left(mask, z, y, r, shape=z.shape, xp=xp)
    z = z if log_input else xp.log(floored(z, eps, xp=xp))
    r, y = floored(r, eps, xp=xp), xp.where(y < 0, 0.0, y)
    none, some = _log_odds(z, r, xp=xp)
    items = r * none + y * some - log_rising(r, y, xp=xp)
    if full:
        items = items + log_factorial(y, xp=xp)
    return reduced(items, reduction=reduction, dtype=result, mask=mask, xp=xp)


def _log_odds(z: Array, r: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """Return ``log(1 + e^z / r)`` and ``log(1 + r e^-z)``, without taking an exponential of the rounded
    z - log r."""
    odds = z - xp.log(r)
    above = odds > 0
    size = xp.exp(xp.where(above, -z, z))
    rest = xp.log1p(xp.where(above, r, 1.0) * size / xp.where(above, 1.0, r))
    return xp.where(above, odds + rest, rest), xp.where(above, rest, rest - odds)
