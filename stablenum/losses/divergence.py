"""Divergences between distributions given as logits or log-probabilities."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from stablenum.losses.common import (
    at_least_0,
    check_axis,
    check_classes,
    check_fits,
    check_reduction,
    check_same_shape,
    reduced,
)
from stablenum.numerics import log, log_softmax, logaddexp
from stablenum.numerics.common import smallest_normal, widened

__all__ = ["js_divergence", "kl_divergence"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_INF = math.inf


def kl_divergence(
    logits: Array,
    targets: Array,
    *,
    log_targets: bool = False,
    axis: int = -1,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``sum(t (log t - log q))`` over an axis, with q = softmax(x): the divergence KL(t || q).

    Both arguments may be logits. They are normalised here; log-probabilities are already normalised and do
    not change. Targets given as probabilities are not normalised: if their sum is not exactly 1 (even by
    rounding), a row may be slightly below 0. With ``log_targets`` no row is below 0.

    Edge cases: a class with t = 0 adds 0, even if q = 0. If t is not 0 but q is (a logit of -inf), the row is
    inf, with gradient 0. A masked row, or one that is -inf throughout, is left out. A target below the
    smallest normal number of the format of the computation counts as 0. NaN or a logit of inf gives NaN. A
    batch without valid rows gives 0.

    Args:
        logits: any shape that has ``axis``, any floating-point format; the logits or log-probabilities of q.
        targets: the shape of ``logits``: probabilities, or with ``log_targets`` logits or log-probabilities.
        log_targets: whether the targets are logits or log-probabilities instead of probabilities.
        axis: the axis of the classes; each row along it gives one item.
        mask: bool, broadcast with the rows; False leaves a row out, whatever its values.
        reduction: "mean" over the valid rows (torch's "batchmean"), "sum" or "none".
        dtype: the format of the result; that of ``logits`` if None.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, or the reduction is unknown.

    Example:
        >>> import array_api_compat.numpy as np
        >>> q, t = np.log(np.asarray([[0.5, 0.25, 0.25]])), np.asarray([[1.0, 0.0, 0.0]])
        >>> float(kl_divergence(q, t, xp=np))
        0.693...
    """
    reduction = check_reduction(reduction)
    check_same_shape("targets", targets, "logits", logits)
    (x, t), result, keep, axis = _rows(logits, targets, mask, axis, dtype, xp=xp)
    log_q = _log_softmax(x, axis, xp=xp)
    if log_targets:
        log_t = _log_softmax(t, axis, xp=xp)
        some = log_t != -_INF
        t = xp.exp(xp.where(some, log_t, 0.0))
    else:
        log_t, some = log(t, xp=xp), xp.logical_not(xp.abs(t) < smallest_normal(t))
    items = _relative_entropy(t, log_t, log_q, some, axis, xp=xp)
    items = at_least_0(items, xp=xp) if log_targets else items
    left = xp.max(x, axis=axis) != -_INF
    left = left & xp.any(some, axis=axis) if log_targets else left
    return reduced(
        items, reduction=reduction, dtype=result, mask=left if keep is None else left & keep, xp=xp
    )


def js_divergence(
    logits: Array,
    other: Array,
    *,
    axis: int = -1,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``KL(p || m) / 2 + KL(q || m) / 2`` with ``m = (p + q) / 2``: symmetric, from 0 to ln 2.

    The logarithm of m is computed by :func:`~stablenum.numerics.logaddexp`, so classes with probability 0 in
    one distribution or in both are handled exactly. Both arguments are logits or log-probabilities.

    Edge cases: a class that is -inf in both adds 0 with gradient 0. A masked row, or one that is -inf
    throughout in either argument, is left out. NaN or a logit of inf gives NaN. A batch without valid rows
    gives 0.

    The arguments and errors are those of :func:`kl_divergence`; ``other`` is like ``logits``.

    Example:
        >>> import array_api_compat.numpy as np
        >>> p, q = np.asarray([[0.0, -np.inf]]), np.asarray([[-np.inf, 0.0]])
        >>> float(js_divergence(p, q, xp=np))
        0.693...
    """
    reduction = check_reduction(reduction)
    check_same_shape("other", other, "logits", logits)
    (a, b), result, keep, axis = _rows(logits, other, mask, axis, dtype, xp=xp)
    log_p, log_q = _log_softmax(a, axis, xp=xp), _log_softmax(b, axis, xp=xp)
    log_m = logaddexp(log_p, log_q, xp=xp) - math.log(2.0)
    items = 0.0
    for log_t in (log_p, log_q):
        some = log_t != -_INF
        t = xp.exp(xp.where(some, log_t, 0.0))
        items = items + 0.5 * _relative_entropy(t, log_t, log_m, some, axis, xp=xp)
    items = at_least_0(items, xp=xp)
    left = (xp.max(a, axis=axis) != -_INF) & (xp.max(b, axis=axis) != -_INF)
    return reduced(
        items, reduction=reduction, dtype=result, mask=left if keep is None else left & keep, xp=xp
    )


def _rows(
    x: Array, y: Array, mask: Array | None, axis: int, dtype: Any, *, xp: Namespace
) -> tuple[tuple[Array, Array], Any, Array | None, int]:
    """Return both arrays in the format of the computation, with zeros in masked rows, then the format of the
    result, the mask and the axis."""
    result = x.dtype if dtype is None else dtype
    (x, y), _ = widened(x, y, xp=xp)
    axis = check_axis(axis, x.ndim, xp=xp)
    check_classes(x, axis)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    if mask is not None:
        check_fits("mask", mask, shape, of="the rows")
        mask = xp.broadcast_to(mask, shape)
        kept = xp.expand_dims(mask, axis=axis)
        x, y = xp.where(kept, x, 0.0), xp.where(kept, y, 0.0)
    return (x, y), result, mask, axis


def _log_softmax(x: Array, axis: int, *, xp: Namespace) -> Array:
    """Compute log_softmax as in numerics, but give NaN in a row with an inf."""
    endless = xp.where(xp.max(x, axis=axis, keepdims=True) == _INF, math.nan, 0.0)
    return log_softmax(xp.where(x == _INF, 0.0, x), axis=axis, xp=xp) + endless


def _relative_entropy(
    t: Array, log_t: Array, log_q: Array, some: Array, axis: int, *, xp: Namespace
) -> Array:
    """Return ``sum(t (log t - log q))`` over the classes where ``some`` holds."""
    # Terms with q = 0 are left out of the sum, so that their gradient is 0 and not NaN; they make the sum inf
    # afterwards.
    nowhere = log_q == -_INF
    used = some & xp.logical_not(nowhere)
    gap = xp.where(used, log_t, 0.0) - xp.where(used, log_q, 0.0)
    total = xp.sum(xp.where(used, t, 0.0) * gap, axis=axis)
    return xp.where(xp.any(some & nowhere, axis=axis), _INF, total)
