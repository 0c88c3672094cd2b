"""Cross-entropy and focal loss for binary labels, from logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from stablenum._support.settings_checks import check_number
from stablenum.formats import get_format
from stablenum.losses.common import (
    check_fits,
    check_reduction,
    check_same_shape,
    check_smoothing,
    for_slope,
    items_left,
    prepared,
    reduced,
    weighted,
)

__all__ = ["binary_cross_entropy", "binary_focal", "entropy_items", "missed_power"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


def binary_cross_entropy(
    logits: Array,
    targets: Array,
    *,
    weight: Array | None = None,
    pos_weight: Array | None = None,
    label_smoothing: float = 0.0,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    items: Callable[..., Array] | None = None,
    xp: Namespace,
) -> Array:
    """``(1 - y) softplus(z) + y softplus(-z)``: the loss for a label y and the probability sigmoid(z).

    The gradient with respect to z is ``(1 - y) sigmoid(z) - y sigmoid(-z)``, to full precision however small
    it is. The gradient of ``F.binary_cross_entropy`` on probabilities, in contrast, is 0 or NaN once the
    sigmoid rounds to 0 or 1.

    Edge cases: an infinite logit gives 0 if the target is exactly the label that the logit predicts,
    otherwise inf. NaN stays NaN. A batch with no valid items gives a loss of 0 and a gradient of 0.

    Args:
        logits: any shape, any floating-point format.
        targets: the shape of ``logits``; values from 0 to 1, in any format.
        weight: broadcast with ``logits``; multiplies the loss of an item. It does not enter the divisor.
        pos_weight: broadcast with ``logits``; multiplies the term for y = 1.
        label_smoothing: s, at least 0 and below 1; changes the targets to ``(1 - s) y + s / 2``.
        mask: bool, broadcast with ``logits``; False leaves an item out, whatever its values.
        reduction: "mean" over the valid items, "sum" or "none".
        dtype: the format of the result; that of ``logits`` if None. Sums are computed in float32 or wider.
        items: computes the loss of each item; adapters pass a faster version of :func:`entropy_items`.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or ``label_smoothing`` is outside [0, 1).

    Example:
        >>> import array_api_compat.numpy as np
        >>> z, y = np.asarray([200.0, -200.0, 0.0]), np.asarray([1.0, 1.0, 0.0])
        >>> binary_cross_entropy(z, y, reduction="none", xp=np).round(4).tolist()
        [0.0, 200.0, 0.6931]
    """
    reduction, s = check_reduction(reduction), check_smoothing(label_smoothing)
    check_same_shape("targets", targets, "logits", logits)
    (z, y), result = prepared(logits, targets, dtype=dtype, xp=xp)
    z, y = items_left(mask, z, y, shape=z.shape, xp=xp)
    y = y * (1.0 - s) + s / 2 if s else y
    if pos_weight is not None:
        check_fits("pos_weight", pos_weight, z.shape, of="logits")
        pos_weight = xp.astype(pos_weight, z.dtype)
    losses = (items or entropy_items)(z, y, pos_weight, xp=xp)
    if weight is not None:
        check_fits("weight", weight, z.shape, of="logits")
        losses = weighted(losses, xp.astype(weight, z.dtype), xp=xp)
    return reduced(losses, reduction=reduction, dtype=result, mask=mask, xp=xp)


def entropy_items(z: Array, y: Array, pos_weight: Array | None = None, *, xp: Namespace) -> Array:
    """Return the loss of each item, without reduction. The part that is linear in z and the part that decays
    are computed separately, so that neither the value nor the gradient of one is lost in the rounding of the
    other."""
    agreed = ((z == float("inf")) & (y == 1)) | ((z == -float("inf")) & (y == 0))
    z = xp.where(agreed, 0.0, z)
    positive = z > 0
    # The derivative of abs at 0 is 0 in one framework and 1 in the other, so abs is not used.
    decaying = xp.log1p(xp.exp(xp.where(positive, -z, z)))
    no, yes = 1.0 - y, y if pos_weight is None else y * pos_weight
    linear = xp.where(positive, _times(no, z, xp=xp), _times(yes, -z, xp=xp))
    both = decaying if pos_weight is None else (no + yes) * decaying
    return xp.where(agreed, 0.0, linear + both)


def _times(share: Array, z: Array, *, xp: Namespace) -> Array:
    """Return ``share * z``, and 0 where the share is 0 and z is infinite."""
    return share * xp.where((share == 0) & xp.isinf(z), 0.0, z)


def binary_focal(
    logits: Array,
    targets: Array,
    *,
    gamma: float = 2.0,
    alpha: float | None = None,
    weight: Array | None = None,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``(1 - p_t)^gamma`` times the binary cross-entropy; p_t is the label's probability (arXiv 1708.02002).

    ``1 - p_t`` is computed as ``(1 - y) sigmoid(z) + y sigmoid(-z)``, so no two close numbers are subtracted.
    Its power is computed by an exponential of ``-gamma |z|``, so for gamma < 1 the gradient does not become
    inf x 0 once p_t rounds to 1. Unless gamma is a power of two, rounding that exponent costs up to
    ``|gamma z|`` ulp where the loss is small.

    The edge cases are those of :func:`binary_cross_entropy`. The gradient is finite for every finite logit
    and every gamma.

    Args:
        logits: any shape, any floating-point format.
        targets: the shape of ``logits``; values from 0 to 1.
        gamma: at least 0; 0 gives the plain cross-entropy.
        alpha: from 0 to 1; the weight is alpha for y = 1 and 1 - alpha for y = 0. None gives both weight 1.
        weight, mask, reduction, dtype, xp: as in :func:`binary_cross_entropy`.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or gamma or alpha is out of range.

    Example:
        >>> import array_api_compat.numpy as np
        >>> z, y = np.asarray([0.0, 40.0]), np.asarray([1.0, 1.0])
        >>> binary_focal(z, y, gamma=2.0, reduction="none", xp=np).round(4).tolist()
        [0.1733, 0.0]
    """
    reduction, gamma = check_reduction(reduction), check_number("gamma", gamma, at_least=0.0)
    if alpha is not None:
        alpha = check_number("alpha", alpha, at_least=0.0, at_most=1.0)
    check_same_shape("targets", targets, "logits", logits)
    (z, y), result = prepared(logits, targets, dtype=dtype, xp=xp)
    z, y = items_left(mask, z, y, shape=z.shape, xp=xp)
    items = entropy_items(z, y, xp=xp)
    if gamma > 0:
        items = weighted(items, missed_power(z, y, gamma, xp=xp), xp=xp)
    if alpha is not None:
        items = weighted(items, alpha * y + (1.0 - alpha) * (1.0 - y), xp=xp)
    if weight is not None:
        check_fits("weight", weight, z.shape, of="logits")
        items = weighted(items, xp.astype(weight, z.dtype), xp=xp)
    return reduced(items, reduction=reduction, dtype=result, mask=mask, xp=xp)


def missed_power(z: Array, y: Array, gamma: float, *, xp: Namespace) -> Array:
    """Return ``((1 - y) sigmoid(z) + y sigmoid(-z)) ^ gamma``, with derivatives in range for every gamma.

    With e = exp(-|z|), this equals ``((w + (1 - w) e) / (1 + e)) ^ gamma``, where w is the coefficient of the
    larger sigmoid. Where w is at most e, e is factored out; the remaining factor is about 1, and so is its
    power.
    """
    z = for_slope(z, xp=xp)
    positive = z > 0
    size = xp.where(positive, z, -z)
    e = xp.exp(-size)
    large, small = xp.where(positive, 1.0 - y, y), xp.where(positive, y, 1.0 - y)
    taken = large <= e
    reach = 0.9 * math.log(get_format(z.dtype).max)
    rest = small + large * xp.exp(xp.where(taken & (size < reach), size, 0.0))
    decayed = xp.where(e == 0, 0.0, small) * e  # for e = 0 the label's gradient is 0, not inf x 0
    share = xp.pow(xp.where(taken, rest, large + decayed), gamma) * xp.pow(1.0 + e, -gamma)
    return xp.where(taken, xp.exp(-gamma * size), 1.0) * share
