"""Losses on directions: cosine similarity, cosine embedding and InfoNCE."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from stablenum._support.settings_checks import check_number
from stablenum.errors import bad_field
from stablenum.losses.common import (
    check_axis,
    check_fits,
    check_reduction,
    check_same_shape,
    prepared,
    reduced,
)
from stablenum.numerics import log_softmax, normalize
from stablenum.numerics.common import widened

__all__ = ["cosine_embedding", "cosine_similarity", "info_nce"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_INF = math.inf


def cosine_similarity(x: Array, y: Array, *, axis: int = -1, dtype: Any = None, xp: Namespace) -> Array:
    """Return the cosine of the angle between x and y; 0 with gradient 0 where either is a zero vector.

    Both vectors are divided by their norms first, so no intermediate result overflows or underflows. (The
    usual ``x y / max(|x| |y|, eps)`` has a gradient of 1e8 at 0 in torch.)

    Args:
        x, y: of the same shape, any floating-point format.
        axis: the axis of the vectors.
        dtype: the format of the result; that of ``x`` if None.
        xp: the array namespace.

    Raises:
        ValueError: the shapes do not match.

    Example:
        >>> import array_api_compat.numpy as np
        >>> x, y = np.asarray([[3e200, 4e200], [0.0, 0.0]]), np.asarray([[4e200, 3e200], [1.0, 0.0]])
        >>> cosine_similarity(x, y, xp=np).round(6).tolist()
        [0.96, 0.0]
    """
    check_same_shape("y", y, "x", x)
    check_axis(axis, x.ndim, xp=xp)
    (x, y), result = prepared(x, y, dtype=dtype, xp=xp)
    cosine = xp.sum(normalize(x, axis=axis, xp=xp) * normalize(y, axis=axis, xp=xp), axis=axis)
    return xp.astype(cosine, result)


def cosine_embedding(
    x: Array,
    y: Array,
    targets: Array | None = None,
    *,
    margin: float = 0.0,
    axis: int = -1,
    mask: Array | None = None,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """``1 - cos(x, y)`` for matching pairs, ``max(0, cos(x, y) - margin)`` for the others.

    A pair with a zero vector gives 1, or ``max(0, -margin)``, with gradient 0.

    Args:
        x, y: of the same shape, any floating-point format.
        targets: the shape of ``x`` without ``axis``; above 0 for matching pairs. With None, all pairs match,
            and the loss is the cosine distance.
        margin: from -1 to 1.
        axis: the axis of the vectors.
        mask: bool, broadcast with the pairs; False leaves a pair out, whatever its values.
        reduction: "mean" over the valid pairs, "sum" or "none".
        dtype: the format of the result; that of ``x`` if None. The loss is computed in float32 or wider.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or the margin is out of range.

    Example:
        >>> import array_api_compat.numpy as np
        >>> x = np.asarray([[1.0, 0.0], [0.0, 0.0]])
        >>> cosine_embedding(x, x, reduction="none", xp=np).tolist()
        [0.0, 1.0]
    """
    reduction, margin = check_reduction(reduction), check_number("margin", margin, at_least=-1.0, at_most=1.0)
    check_same_shape("y", y, "x", x)
    axis = check_axis(axis, x.ndim, xp=xp)
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    (x, y), result = prepared(x, y, dtype=dtype, xp=xp)
    if mask is not None:
        check_fits("mask", mask, shape, of="the pairs")
        kept = xp.expand_dims(xp.broadcast_to(mask, shape), axis=axis)
        x, y = xp.where(kept, x, 0.0), xp.where(kept, y, 0.0)
    cosine = cosine_similarity(x, y, axis=axis, xp=xp)
    items = 1.0 - cosine
    if targets is not None:
        if tuple(targets.shape) != tuple(shape):
            allowed = f"of shape {tuple(shape)}, that of x without axis {axis}"
            raise bad_field("targets", allowed, tuple(targets.shape))
        excess = cosine - margin
        items = xp.where(targets > 0, items, xp.where(excess <= 0, 0.0, excess))
    return reduced(items, reduction=reduction, dtype=result, mask=mask, xp=xp)


def info_nce(
    queries: Array,
    keys: Array,
    *,
    temperature: float = 0.07,
    positives: Array | None = None,
    mask: Array | None = None,
    normalized: bool = False,
    symmetric: bool = False,
    reduction: str = "mean",
    dtype: Any = None,
    xp: Namespace,
) -> Array:
    """InfoNCE, the cross-entropy of picking each query's key by ``cos(q, k) / temperature``.

    Van den Oord et al. 2018 (arXiv 1807.03748).

    For a query with several positives, the loss is the mean over them (L_out of supervised contrastive
    learning, arXiv 2004.11362).

    Edge cases: a query that has no positive, or whose positives are all masked, is left out with gradient 0;
    if no query is left, the loss is 0. A query whose only key is its positive gives 0. A zero vector has
    similarity 0 to all others and gradient 0.

    Args:
        queries: (N, D), any floating-point format.
        keys: (M, D); M = N unless ``positives`` is given.
        temperature: a number above 0. To learn it, divide the normalised queries by it and pass
            ``normalized=True`` and a temperature of 1.
        positives: (N, M) bool, which keys are positives of each query. None means key i for query i.
        mask: bool, broadcast with (N, M); False removes a pair, even a positive one: a query's own copy,
            padding, or a false negative. The values of padded rows have no effect if all their pairs are
            removed.
        normalized: use the vectors as they are instead of dividing them by their norms; where their
            products leave the range of the format, the loss is NaN.
        symmetric: average this loss and the one with queries and keys swapped (CLIP); needs N = M.
        reduction: "mean" over the queries that are not left out, "sum" or "none".
        dtype: the format of the result; that of ``queries`` if None. The loss is computed in float32 or
            wider.
        xp: the array namespace.

    Raises:
        ValueError: shapes do not match, the reduction is unknown, or ``temperature`` is not positive.

    Example:
        >>> import array_api_compat.numpy as np
        >>> x = np.asarray([[1.0, 0.0], [0.0, 1.0]])
        >>> float(info_nce(x, x, temperature=1.0, xp=np))
        0.313...
    """
    reduction = check_reduction(reduction)
    temperature = check_number("temperature", temperature, above=0.0)
    (q, k), _ = widened(queries, keys, xp=xp)
    result = queries.dtype if dtype is None else dtype
    n, m = _pairs(q, k, positives, symmetric)
    device = getattr(q, "device", None)
    if positives is None:
        positives = xp.arange(n, device=device)[:, None] == xp.arange(m, device=device)[None, :]
    positives, allowed = positives != 0, xp.ones((n, m), dtype=xp.bool, device=device)
    if mask is not None:
        check_fits("mask", mask, (n, m), of="the pairs (queries, keys)")
        allowed = xp.broadcast_to(mask, (n, m))
        # Rows that are in no pair must not reach the product: 0 x NaN is NaN.
        q = xp.where(xp.any(allowed, axis=1)[:, None], q, 0.0)
        k = xp.where(xp.any(allowed, axis=0)[:, None], k, 0.0)
    if not normalized:
        q, k = normalize(q, axis=1, xp=xp), normalize(k, axis=1, xp=xp)
    similarity = xp.matmul(q, xp.matrix_transpose(k)) / temperature
    loss = _contrast(similarity, positives & allowed, allowed, reduction, xp=xp)
    if symmetric:
        similarity, positives, allowed = (
            xp.matrix_transpose(a) for a in (similarity, positives & allowed, allowed)
        )
        loss = 0.5 * (loss + _contrast(similarity, positives, allowed, reduction, xp=xp))
    return xp.astype(loss, result)


def _pairs(q: Array, k: Array, positives: Array | None, symmetric: bool) -> tuple[int, int]:
    if q.ndim != 2 or k.ndim != 2 or q.shape[1] != k.shape[1]:
        shapes = (tuple(q.shape), tuple(k.shape))
        raise bad_field("queries and keys", "of shapes (N, D) and (M, D)", shapes)
    n, m = q.shape[0], k.shape[0]
    if n != m and (positives is None or symmetric):
        allowed = f"as many as the queries ({n}) unless positives are given and symmetric is False"
        raise bad_field("keys", allowed, m)
    if positives is not None and tuple(positives.shape) != (n, m):
        raise bad_field("positives", f"of shape {(n, m)}", tuple(positives.shape))
    return n, m


def _contrast(similarity: Array, positives: Array, allowed: Array, reduction: str, *, xp: Namespace) -> Array:
    log_p = log_softmax(similarity, mask=allowed, xp=xp)
    count = xp.sum(xp.astype(positives, log_p.dtype), axis=1)
    total = xp.sum(xp.where(positives, -log_p, 0.0), axis=1)
    return reduced(
        total / xp.where(count == 0, 1.0, count),
        reduction=reduction,
        dtype=log_p.dtype,
        mask=count > 0,
        xp=xp,
    )
