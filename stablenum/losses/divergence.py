"""Divergences between distributions given as logits or log-probabilities."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from stablenum.losses.common import (
    at_least_0,
    check_axis,
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
    """``sum(t (log t - log softmax(x)))`` over an axis: how far x is from the target t, KL(t || softmax(x)).

    Both may be logits: they are normalised here, and log-probabilities, which are normalised already,
    come out of that unchanged. Probabilities as targets are taken as they are: if their sum is not 1, a sum
    that is off by some eps among them, a row may come out a little below 0. With ``log_targets`` none does.

    Edges: a class with t = 0 adds 0, with q = 0 too; with q = 0 alone (-inf) the row is inf, with gradient 0.
    A row that is -inf throughout, or a masked one, is left out. A target below the smallest normal number of
    the format computed in counts as 0. NaN, and a logit of inf, give NaN. No valid row gives 0.

    Args:
        logits: any shape with ``axis``, any floating format: logits or log-probabilities of q.
        targets: the shape of ``logits``: probabilities, or with ``log_targets`` logits or log-probabilities.
        log_targets: what the targets are.
        axis: of the classes; the result has one item for each row.
        mask: bool, broadcast with the rows; False leaves a row out, whatever it holds.
        reduction: "mean" over the valid rows (torch's "batchmean"), "sum" or "none".
        dtype: the format of the result; that of ``logits`` if None.
        xp: the array namespace.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction.

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
        t = xp.where(some, xp.exp(xp.where(some, log_t, 0.0)), 0.0)
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

    The logarithm of m is a :func:`~stablenum.numerics.logaddexp`, so classes without probability on either
    side, or on both, cost nothing. Both arguments are logits or log-probabilities.

    Edges: a class that is -inf on both sides adds 0 with gradient 0. A row that is -inf throughout on one
    side, or a masked one, is left out. NaN, and a logit of inf, give NaN. No valid row gives 0.

    Args and errors: as :func:`kl_divergence`, ``other`` as ``logits``.

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
        t = xp.where(some, xp.exp(xp.where(some, log_t, 0.0)), 0.0)
        items = items + 0.5 * _relative_entropy(t, log_t, log_m, some, axis, xp=xp)
    items = at_least_0(items, xp=xp)
    left = (xp.max(a, axis=axis) != -_INF) & (xp.max(b, axis=axis) != -_INF)
    return reduced(
        items, reduction=reduction, dtype=result, mask=left if keep is None else left & keep, xp=xp
    )


def _rows(
    x: Array, y: Array, mask: Array | None, axis: int, dtype: Any, *, xp: Namespace
) -> tuple[tuple[Array, Array], Any, Array | None, int]:
    """Both in the format computed in, with rows of zeros for what is masked."""
    result = x.dtype if dtype is None else dtype
    (x, y), _ = widened(x, y, xp=xp)
    axis = check_axis(axis, x.ndim)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    if mask is not None:
        check_fits("mask", mask, shape, of="the rows")
        mask = xp.broadcast_to(mask, shape)
        kept = xp.expand_dims(mask, axis=axis)
        x, y = xp.where(kept, x, 0.0), xp.where(kept, y, 0.0)
    return (x, y), result, mask, axis


def _log_softmax(x: Array, axis: int, *, xp: Namespace) -> Array:
    """As in numerics; NaN where a logit is inf, which there shares the row."""
    endless = xp.where(xp.max(x, axis=axis, keepdims=True) == _INF, math.nan, 0.0)
    return log_softmax(xp.where(x == _INF, 0.0, x), axis=axis, xp=xp) + endless


def _relative_entropy(
    t: Array, log_t: Array, log_q: Array, some: Array, axis: int, *, xp: Namespace
) -> Array:
    """``sum(t (log t - log q))``; where ``some`` is False t is 0 and adds nothing."""
    nowhere = log_q == -_INF
    used = some & xp.logical_not(nowhere)
    gap = xp.where(used, log_t, 0.0) - xp.where(used, log_q, 0.0)
    total = xp.sum(xp.where(used, t, 0.0) * gap, axis=axis)
    return xp.where(xp.any(some & nowhere, axis=axis), _INF, total)
