"""Losses of a difference or a margin: Huber, log-cosh, hinge."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from stablenum._support.settings_checks import check_number
from stablenum.losses.common import (
    check_fits,
    check_reduction,
    check_same_shape,
    items_left,
    prepared,
    reduced,
    weighted,
)

__all__ = ["hinge", "huber", "log_cosh"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


def huber(
    predictions: Array,
    targets: Array,
    *,
    delta: float = 1.0,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``d^2 / 2`` for differences d of up to ``delta``, ``delta (|d| - delta / 2)`` beyond (Huber 1964).

    The gradient is d clamped to [-delta, delta]. A difference beyond the format's range gives inf, with
    gradient ``delta`` or ``-delta``.

    Args:
        predictions: any shape, any floating-point format.
        targets: the shape of ``predictions``.
        delta: the difference above which the loss is linear; above 0.
        mask: bool, broadcast with ``predictions``; False leaves an item out, whatever its value.
        reduction: "mean" over the valid items, "sum" or "none".
        dtype: the format of the result; that of ``predictions`` if None. The loss is computed in float32 or
            wider.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or ``delta`` is not positive.

    Example:
        >>> import array_api_compat.numpy as np
        >>> huber(np.asarray([0.5, 1e200]), np.asarray([0.0, 0.0]), reduction="none", xp=np).tolist()
        [0.125, 1e+200]
    """
    delta = check_number("delta", delta, above=0.0)
    d, reduction, result = _difference(predictions, targets, mask, reduction, dtype, xp=xp)
    size = xp.where(d < 0, -d, d)
    far = size > delta
    near = xp.where(far, 0.0, d)
    items = xp.where(far, delta * (size - 0.5 * delta), 0.5 * near * near)
    return reduced(items, reduction=reduction, dtype=result, mask=mask, xp=xp)


def log_cosh(
    predictions: Array,
    targets: Array,
    *,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``log(cosh(d))`` of the difference d: ``|d| + log1p(exp(-2|d|)) - ln 2``, with gradient tanh d.

    Up to ``|d| = 1`` the loss is computed as ``log1p(cosh d - 1)``, because subtracting ln 2 loses digits
    there; ``cosh d - 1`` is computed by its series (XLA's sinh is off by 4 ulp). The arguments and errors
    are those of :func:`huber`, without ``delta``.

    Example:
        >>> import array_api_compat.numpy as np
        >>> log_cosh(np.asarray([1e-8, 1000.0]), np.asarray([0.0, 0.0]), reduction="none", xp=np).tolist()
        [5...e-17, 999.306...]
    """
    d, reduction, result = _difference(predictions, targets, mask, reduction, dtype, xp=xp)
    size = xp.where(d < 0, -d, d)
    far = size > 1.0
    near = xp.where(far, 0.0, d)
    square, series = near * near, 1.0
    # Horner's scheme for cosh d - 1 = d^2 / 2 (1 + d^2 / (3 4) (1 + d^2 / (5 6) (...))).
    for k in range(9, 1, -1):
        series = 1.0 + square * series / (2 * k * (2 * k - 1))
    beyond = xp.where(far, size, 1.0)
    away = beyond + xp.log1p(xp.exp(-2.0 * beyond)) - math.log(2.0)
    items = xp.where(far, away, xp.log1p(0.5 * square * series))
    return reduced(items, reduction=reduction, dtype=result, mask=mask, xp=xp)


def hinge(
    scores: Array,
    targets: Array,
    *,
    margin: float = 1.0,
    squared: bool = False,
    weight: Array | None = None,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``max(0, margin - y s)`` for a label y of -1 or 1 and its score s; squared with ``squared=True``.

    The gradient with respect to s is -y where ``y s`` is below the margin, and 0 otherwise. Labels of 0 and 1
    are not converted: pass ``2 y - 1``.

    Args:
        scores: any shape, any floating-point format.
        targets: -1 or 1, the shape of ``scores``.
        margin: a finite number.
        squared: whether to square the loss, which makes its gradient continuous.
        weight: broadcast with ``scores``; multiplies the loss of an item.
        mask: bool, broadcast with ``scores``; False leaves an item out, whatever its value.
        reduction: "mean" over the valid items, "sum" or "none".
        dtype: the format of the result; that of ``scores`` if None. The loss is computed in float32 or wider.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or ``margin`` is not a finite number.

    Example:
        >>> import array_api_compat.numpy as np
        >>> hinge(np.asarray([0.5, 3.0]), np.asarray([1.0, -1.0]), reduction="none", xp=np).tolist()
        [0.5, 4.0]
    """
    reduction, margin = check_reduction(reduction), check_number("margin", margin)
    check_same_shape("targets", targets, "scores", scores)
    (s, y), result = prepared(scores, targets, dtype=dtype, xp=xp)
    s, y = items_left(mask, s, y, shape=s.shape, xp=xp)
    short = margin - y * s
    items = xp.where(short <= 0, 0.0, short)
    items = items * items if squared else items
    if weight is not None:
        check_fits("weight", weight, s.shape, of="scores")
        items = weighted(items, xp.astype(weight, items.dtype), xp=xp)
    return reduced(items, reduction=reduction, dtype=result, mask=mask, xp=xp)


def _difference(
    predictions: Array, targets: Array, mask: Array | None, reduction: str, dtype: Any, *, xp: Namespace
) -> tuple[Array, str, Any]:
    reduction = check_reduction(reduction)
    check_same_shape("targets", targets, "predictions", predictions)
    (a, b), result = prepared(predictions, targets, dtype=dtype, xp=xp)
    a, b = items_left(mask, a, b, shape=a.shape, xp=xp)
    return a - b, reduction, result
