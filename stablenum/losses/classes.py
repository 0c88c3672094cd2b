"""Cross-entropy and focal loss for one label out of many classes, from logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from stablenum._support.settings_checks import check_number
from stablenum.errors import bad_field
from stablenum.losses.binary import missed_power
from stablenum.losses.common import (
    check_axis,
    check_classes,
    check_fits,
    check_reduction,
    check_smoothing,
    classes_last,
    is_floating,
    reduced,
    weighted,
    wide_format,
)
from stablenum.numerics import logsumexp, softplus
from stablenum.numerics.common import widened

__all__ = ["ClassSums", "class_sums", "cross_entropy", "focal"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_INF = math.inf


class ClassSums(NamedTuple):
    """The sums that cross-entropy needs, over the classes of a row of logits x."""

    nll: Array
    """``logsumexp(x) - x[target]``; inf with gradient 0 where ``x[target]`` is -inf."""
    lse: Array
    """``logsumexp(x)``; -inf with gradient 0 where all classes are -inf, NaN where one is inf."""
    smooth: Array | None
    """The mean of ``weight * (logsumexp(x) - x)`` over the classes that are not -inf, or None."""


def class_sums(
    x: Array,
    index: Array,
    keep: Array,
    *,
    weight: Array | None = None,
    smoothing: bool = False,
    xp: Namespace,
) -> ClassSums:
    """Return the sums over the last axis, in the array namespace (adapters may use a faster version).

    Args:
        x: (..., C) logits of any floating-point format; the sums are in float32 or wider.
        index: (...) whole numbers from 0 to C - 1.
        keep: (...) bool; a row where it is False has no effect, whatever its values.
        weight: (C,) class weights for ``smooth``.
        smoothing: whether to compute ``smooth``.
        xp: the array namespace.
    """
    (x,), _ = widened(x, xp=xp)
    x = xp.where(keep[..., None], x, 0.0)
    here, away, log_total, shift, some = _shifted(x, xp=xp)
    picked = xp.squeeze(xp.take_along_axis(away, index[..., None], axis=-1), axis=-1)
    there = xp.squeeze(xp.take_along_axis(here, index[..., None], axis=-1), axis=-1)
    nll = xp.where(there, log_total - picked, _INF)
    lse = xp.where(some, log_total + shift, -_INF)
    if not smoothing:
        return ClassSums(nll, lse, None)
    below = log_total[..., None] - away
    below = below if weight is None else weighted(below, xp.astype(weight, below.dtype), xp=xp)
    below = xp.where(here, below, 0.0)
    classes = xp.sum(xp.astype(here, x.dtype), axis=-1)
    return ClassSums(nll, lse, xp.sum(below, axis=-1) / xp.where(classes == 0, 1.0, classes))


def _shifted(x: Array, *, xp: Namespace) -> tuple[Array, Array, Array, Array, Array]:
    """Return which classes are not -inf, ``x - shift``, ``logsumexp(x) - shift``, the shift, and whether any
    class is not -inf."""
    here = x != -_INF
    top = xp.max(x, axis=-1)
    some = top != -_INF
    # floor has no gradient, so the shift, which cancels mathematically, leaves no rounding errors in the
    # gradient.
    shift = xp.floor(xp.where(xp.isfinite(top), top, 0.0))
    away = xp.where(here, x, 0.0) - xp.where(here, shift[..., None], 0.0)
    total = xp.sum(xp.where(here, xp.exp(away), 0.0), axis=-1)
    endless = xp.where(top == _INF, math.nan, 0.0)  # for inf - inf, even where the target's logit is finite
    return here, away, xp.log(xp.where(some, total, 1.0)) + endless, shift, some


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    axis: int = -1,
    weight: Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_mask: Array | None = None,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    sums: Callable[..., ClassSums] = class_sums,
    xp: Namespace,
) -> Array:
    """``logsumexp(x) - x[target]``, or ``sum(t (logsumexp(x) - x))`` if the target is probabilities t.

    The gradient with respect to x is ``softmax(x) - t``. With label smoothing s the target is
    ``(1 - s) t + s / K`` over the K classes that are neither masked nor -inf. The z-loss (PaLM, arXiv
    2204.02311, which uses 1e-4) adds ``z_loss * logsumexp(x)^2`` to each item, with gradient
    ``2 z_loss logsumexp(x) softmax(x)``.

    Edge cases:

    - A batch with no valid items gives a loss of 0 and a gradient of 0. Items are left out, with gradient 0,
      if their target is ``ignore_index`` or their mask is False, whatever their logits, or if all their
      classes are masked or -inf.
    - A class that is masked or -inf has probability 0 and gradient 0, with label smoothing too. If it is the
      target (or, in a soft target, has a probability above 0), the item is inf, with gradient 0.
    - A logit of inf or NaN gives NaN; an index outside the classes gives NaN with gradient 0.

    Args:
        logits: any shape that has ``axis``, any floating-point format.
        targets: whole numbers in the shape of ``logits`` without ``axis``, or floating-point numbers in the
            shape of ``logits``.
        axis: the axis of the classes.
        weight: (C,), one weight per class; multiplies an item's loss by the weight of its class, or for soft
            targets each class's term by the weight of that class.
        ignore_index: the target of items that are left out.
        label_smoothing: s, at least 0 and below 1.
        z_loss: the coefficient, at least 0; ``weight`` does not apply to it.
        class_mask: bool, (C,) or broadcast with ``logits``; False removes a class, whatever its logit.
        mask: bool, broadcast with the items; False leaves an item out.
        reduction: "none", "sum", or "mean" over the valid items. For integer targets with ``weight``, the
            mean divides the loss by the sum of the items' weights (as torch does), and the z-loss by the
            number of items.
        dtype: the format of the result; that of ``logits`` if None. Sums are computed in float32 or wider.
        sums: computes the sums over classes; adapters pass a faster version of :func:`class_sums`.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or a number is out of its range.

    Example:
        >>> import array_api_compat.numpy as np
        >>> x = np.asarray([[0.0, 0.0, -np.inf], [1000.0, 0.0, 0.0], [np.nan, 0.0, 0.0]])
        >>> float(cross_entropy(x, np.asarray([1, 0, -100]), label_smoothing=0.0, xp=np))
        0.346...
    """
    reduction, s = check_reduction(reduction), check_smoothing(label_smoothing)
    z_loss = check_number("z_loss", z_loss, at_least=0.0)
    wide, result = wide_format(logits, xp=xp)
    axis = check_axis(axis, logits.ndim, xp=xp)
    x = _without(logits, class_mask, axis, xp=xp)
    items_shape = x.shape[:axis] + x.shape[axis + 1 :]
    check_classes(x, axis)
    x = classes_last(x, axis, xp=xp)
    if weight is not None:
        if tuple(weight.shape) != (x.shape[-1],):
            raise bad_field("weight", f"of shape ({x.shape[-1]},), one for each class", tuple(weight.shape))
        weight = xp.astype(weight, wide)
    keep = xp.ones_like(x[..., 0], dtype=xp.bool) if mask is None else mask
    check_fits("mask", keep, items_shape, of="the items")
    keep = xp.broadcast_to(keep, items_shape)
    if is_floating(targets):
        t = _soft(targets, axis, tuple(logits.shape), wide, xp=xp)
        items, lse = _soft_items(xp.astype(x, wide), t, keep, weight, s, xp=xp)
        counts = None
    else:
        _check_index(targets, items_shape, axis)
        keep = keep & (targets != ignore_index)
        inside = (targets >= 0) & (targets < x.shape[-1])
        index = xp.where(inside, targets, 0)
        nll, lse, smooth = sums(x, index, keep, weight=weight, smoothing=s > 0, xp=xp)
        counts = None if weight is None else xp.take(weight, index.reshape(-1)).reshape(items_shape)
        items = nll if counts is None else weighted(nll, counts, xp=xp)
        if smooth is not None:
            items = xp.where(items == _INF, items, (1.0 - s) * items + s * smooth)
        items = xp.where(inside, items, math.nan)
    keep = keep & (lse != -_INF)
    options = {"reduction": reduction, "mask": keep, "xp": xp}
    loss = reduced(items, dtype=items.dtype, weights=counts, **options)
    if z_loss > 0:
        known = xp.where(keep & xp.isfinite(items), lse, 0.0)  # an infinite item has gradient 0
        loss = loss + reduced(z_loss * known * known, dtype=items.dtype, **options)
    return xp.astype(loss, result if dtype is None else dtype)


def _without(x: Array, class_mask: Array | None, axis: int, *, xp: Namespace) -> Array:
    if class_mask is None:
        return x
    if class_mask.ndim == 1:
        class_mask = xp.reshape(class_mask, (-1,) + (1,) * (x.ndim - 1 - axis))
    check_fits("class_mask", class_mask, x.shape, of="logits")
    return xp.where(class_mask, x, -_INF)


def _check_index(targets: Array, shape: tuple[int, ...], axis: int) -> None:
    if "int" not in str(targets.dtype):
        raise bad_field("targets", "integers or floating-point numbers", str(targets.dtype))
    if tuple(targets.shape) != tuple(shape):
        full = "floating-point targets: the full shape of the logits"
        allowed = f"of shape {tuple(shape)}, that of the logits without axis {axis} ({full})"
        raise bad_field("targets", allowed, tuple(targets.shape))


def _soft(targets: Array, axis: int, shape: tuple[int, ...], dtype: Any, *, xp: Namespace) -> Array:
    if tuple(targets.shape) != shape:
        indices = f"integer targets: without axis {axis}"
        allowed = f"of shape {shape}, that of the logits, if they are floating-point numbers ({indices})"
        raise bad_field("targets", allowed, tuple(targets.shape))
    return xp.astype(classes_last(targets, axis, xp=xp), dtype)


def _soft_items(
    x: Array, t: Array, keep: Array, weight: Array | None, s: float, *, xp: Namespace
) -> tuple[Array, Array]:
    """Return the loss of each row if the target is probabilities, and the row's logsumexp."""
    x, t = xp.where(keep[..., None], x, 0.0), xp.where(keep[..., None], t, 0.0)
    here, away, log_total, shift, some = _shifted(x, xp=xp)
    if s:
        classes = xp.sum(xp.astype(here, x.dtype), axis=-1, keepdims=True)
        t = xp.where(here, (1.0 - s) * t + s / xp.where(classes == 0, 1.0, classes), (1.0 - s) * t)
    impossible = xp.any(xp.logical_not(here) & (t != 0), axis=-1)
    share = t if weight is None else t * weight
    below = log_total[..., None] - away
    none = xp.logical_not(here) | (share == 0)
    # A term with a share of 0 still has a gradient with respect to the share, so only non-finite terms are
    # removed.
    out = none & xp.logical_not(xp.isfinite(below)) | xp.logical_not(here)
    terms = xp.where(out, 0.0, share * xp.where(out, 0.0, below))
    items = xp.where(impossible, _INF, xp.sum(terms, axis=-1))
    return items, xp.where(some, log_total + shift, -_INF)


def focal(
    logits: Array,
    targets: Array,
    *,
    gamma: float = 2.0,
    axis: int = -1,
    weight: Array | None = None,
    ignore_index: int = -100,
    class_mask: Array | None = None,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``(1 - p)^gamma (-log p)``; p is the softmax at the target (arXiv 1708.02002, for many classes).

    With z the target's logit minus the logsumexp of the others, p is sigmoid(z) and the loss is
    ``sigmoid(-z)^gamma softplus(-z)``. This form is accurate for p near 1 too and has a finite gradient for
    gamma < 1, where the gradient of ``(1 - p)^gamma`` is inf x 0 once p rounds to 1.

    The edge cases are those of :func:`cross_entropy`. If only one class is left, p is 1 and the loss is 0,
    with gradient 0.

    Args:
        logits, axis, weight, ignore_index, class_mask, mask, dtype, xp: as in :func:`cross_entropy`.
        targets: whole numbers in the shape of ``logits`` without ``axis``.
        gamma: at least 0; 0 gives the plain cross-entropy.
        reduction: "none", "sum", or "mean" over the valid items. With ``weight``, the mean divides by the sum
            of the items' weights.

    Raises:
        ValueError: shapes do not match, the targets are floating-point numbers, the reduction is unknown, or
            gamma is negative.

    Example:
        >>> import array_api_compat.numpy as np
        >>> x = np.asarray([[0.0, 0.0], [80.0, 0.0]])
        >>> focal(x, np.asarray([0, 0]), gamma=0.5, reduction="none", xp=np).round(4).tolist()
        [0.4901, 0.0]
    """
    reduction, gamma = check_reduction(reduction), check_number("gamma", gamma, at_least=0.0)
    (x,), result = widened(logits, xp=xp)
    axis = check_axis(axis, x.ndim, xp=xp)
    check_classes(x, axis)
    x = classes_last(_without(x, class_mask, axis, xp=xp), axis, xp=xp)
    shape, classes = x.shape[:-1], x.shape[-1]
    _check_index(targets, shape, axis)
    if mask is not None:
        check_fits("mask", mask, shape, of="the items")
    keep = (targets != ignore_index) if mask is None else mask & (targets != ignore_index)
    inside = (targets >= 0) & (targets < classes)
    index = xp.where(inside, targets, 0)
    x = xp.where(keep[..., None], x, 0.0)
    one_hot = index[..., None] == xp.arange(classes, device=getattr(x, "device", None))
    picked = xp.sum(xp.where(one_hot, x, 0.0), axis=-1)
    others = logsumexp(x, mask=xp.logical_not(one_hot), xp=xp)
    some = (picked != -_INF) | (others != -_INF)
    alone = others == -_INF
    z = xp.where(alone | (picked == -_INF), 0.0, picked) - xp.where(alone, 0.0, others)
    items = softplus(-z, xp=xp) * missed_power(z, xp.ones_like(z), gamma, xp=xp)
    items = xp.where(alone, 0.0, xp.where(picked == -_INF, _INF, items))
    items = xp.where(xp.max(x, axis=-1) == _INF, math.nan, items)
    items = xp.where(inside, items, math.nan)
    counts = None
    if weight is not None:
        if tuple(weight.shape) != (classes,):
            raise bad_field("weight", f"of shape ({classes},), one for each class", tuple(weight.shape))
        counts = xp.take(xp.astype(weight, x.dtype), index.reshape(-1)).reshape(shape)
        items = weighted(items, counts, xp=xp)
    return reduced(
        items,
        reduction=reduction,
        dtype=result if dtype is None else dtype,
        mask=keep & some,
        weights=counts,
        xp=xp,
    )
