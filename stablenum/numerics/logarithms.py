"""Logarithms of sums and differences of exponentials, softmax, and related functions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from stablenum.numerics.common import (
    Axis,
    check_axes,
    check_axis,
    check_keepdims,
    check_mask,
    smallest_normal,
    widened,
)

__all__ = [
    "cumulative_logsumexp",
    "log",
    "log1mexp",
    "log1pexp",
    "log_sigmoid",
    "log_softmax",
    "logaddexp",
    "logsubexp",
    "logsumexp",
    "softmax",
    "softplus",
    "xlogy",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_INF = math.inf

# log((1 - e^-a) / a) = -a/2 + the sum of B_2k a^2k / (2k (2k)!). These terms are exact in float64 for a up to
# ln 2.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_SERIES = tuple(b / (2 * k * math.factorial(2 * k)) for k, b in enumerate(_BERNOULLI, start=1))


def log(x: Array, *, xp: Namespace) -> Array:
    """Natural logarithm that stays finite: ``log(max(x, smallest normal number))``.

    "Smallest normal number" refers to the compute format: for x below 1.18e-38, including zero and negative
    x, the value is -87.34 (-708.4 in float64) with gradient 0. log(inf) is inf; NaN stays NaN.

    Args:
        x: any shape, any floating-point format.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> log(np.asarray([1.0, 0.0], dtype=np.float32), xp=np).round(2).tolist()
        [0.0, -87.3...]
    """
    (x,), dtype = widened(x, xp=xp)
    floor = smallest_normal(x)
    below = x < floor
    result = xp.where(below, math.log(floor), xp.log(xp.where(below, 1.0, x)))
    return xp.astype(result, dtype)


def log1mexp(a: Array, *, xp: Namespace) -> Array:
    """``log(1 - exp(-a))`` for a > 0, to full precision at both ends.

    The function is computed by two forms that meet at a = ln 2 (Maechler 2012, the log1mexp note of R's
    package Rmpfr). Above ln 2 the form is ``log1p(-e)`` with e = exp(-a), written as ``-log1p(e / (1 - e))``
    because XLA's log1p is off by 120 ulp at -0.4 in float64 on a CPU. Below ln 2 the form is
    ``log(-expm1(-a))``, written as ``log(a) - a/2`` plus a series in a^2 because XLA's expm1 is off by 4 ulp.
    The gradient is ``1 / expm1(a)``. For a below the smallest normal number, including zero and negative a,
    the value is -inf with gradient 0.

    Example:
        >>> import array_api_compat.numpy as np
        >>> log1mexp(np.asarray([1e-9, 50.0]), xp=np).tolist()
        [-20.72..., -1.92...e-22]
    """
    (a,), dtype = widened(a, xp=xp)
    below = a < smallest_normal(a)
    small = xp.logical_not(below) & (a <= math.log(2.0))
    p = xp.where(small, a, 0.5)
    series = xp.zeros_like(p)
    for coefficient in reversed(_SERIES):
        series = (series + coefficient) * (p * p)
    near = xp.log(p) + (series - 0.5 * p)
    away = xp.exp(-xp.where(small | below, 1.0, a))
    far = -xp.log1p(away / (1.0 - away))
    return xp.astype(xp.where(below, -_INF, xp.where(small, near, far)), dtype)


def softplus(x: Array, *, xp: Namespace) -> Array:
    """``log(1 + exp(x))``, without overflow or loss of digits; its gradient is the sigmoid of x.

    The value is computed as ``x + log1p(exp(-x))`` for x > 0 and as ``log1p(exp(x))`` otherwise. There is no
    tie at 0, so the second derivative is correct there too. inf gives inf, -inf gives 0.

    Example:
        >>> import array_api_compat.numpy as np
        >>> softplus(np.asarray([-100.0, 0.0, 100.0]), xp=np).tolist()
        [3.72...e-44, 0.693..., 100.0]
    """
    (x,), dtype = widened(x, xp=xp)
    return xp.astype(_softplus(x, xp=xp), dtype)


log1pexp = softplus


def log_sigmoid(x: Array, *, xp: Namespace) -> Array:
    """``log(1 / (1 + exp(-x)))`` = ``-softplus(-x)``; its gradient is the sigmoid of -x.

    Example:
        >>> import array_api_compat.numpy as np
        >>> log_sigmoid(np.asarray([-100.0, 0.0]), xp=np).tolist()
        [-100.0, -0.693...]
    """
    (x,), dtype = widened(x, xp=xp)
    return xp.astype(-_softplus(-x, xp=xp), dtype)


def _softplus(x: Array, *, xp: Namespace) -> Array:
    positive = x > 0
    ordinary = xp.isfinite(x)
    away = xp.log1p(xp.exp(xp.where(ordinary, xp.where(positive, -x, x), -_INF)))
    return xp.where(positive, x + away, xp.where(xp.isnan(x), x, away))


def logaddexp(a: Array, b: Array, *, xp: Namespace) -> Array:
    """``log(exp(a) + exp(b))``; the gradients are the softmax of a and b.

    If both are -inf, the value is -inf with gradient 0. If both are inf, the value is inf with gradients of
    1/2.

    Example:
        >>> import array_api_compat.numpy as np
        >>> logaddexp(np.asarray([1000.0, -np.inf]), np.asarray([1000.0, -np.inf]), xp=np).tolist()
        [1000.69..., -inf]
    """
    (a, b), dtype = widened(a, b, xp=xp)
    same = (a == b) & xp.isinf(a)
    p, q = xp.where(same, 0.0, a), xp.where(same, 0.0, b)
    first = p > q
    high, low = xp.where(first, p, q), xp.where(first, q, p)
    result = high + xp.log1p(xp.exp(low - high))
    # The mean of two infinities gives gradients of one half; two that are -inf (masked) get no gradient.
    ends = xp.where(
        a > 0, 0.5 * xp.where(same & (a > 0), a, 0.0) + 0.5 * xp.where(same & (a > 0), b, 0.0), -_INF
    )
    return xp.astype(xp.where(same, ends, result), dtype)


def logsubexp(a: Array, b: Array, *, xp: Namespace) -> Array:
    """``log(exp(a) - exp(b))`` for a > b: ``a + log1mexp(a - b)``.

    Where a <= b (including both -inf or both inf), or where a exceeds b by less than the smallest normal
    number, the value is -inf with gradient 0.

    Example:
        >>> import array_api_compat.numpy as np
        >>> logsubexp(np.asarray([1000.0, 2.0]), np.asarray([999.0, 2.0]), xp=np).tolist()
        [999.54..., -inf]
    """
    (a, b), dtype = widened(a, b, xp=xp)
    empty = a <= b
    p, q = xp.where(empty, 1.0, a), xp.where(empty, 0.0, b)
    empty = empty | (p - q < smallest_normal(p))
    p, q = xp.where(empty, 1.0, p), xp.where(empty, 0.0, q)
    return xp.astype(xp.where(empty, -_INF, p + log1mexp(p - q, xp=xp)), dtype)


def logsumexp(
    x: Array, *, axis: Axis = -1, mask: Array | None = None, keepdims: bool = False, xp: Namespace
) -> Array:
    """``log(sum(exp(x)))`` over an axis; its gradient is the softmax.

    If there is no element, or all are masked or -inf, the value is -inf with gradient 0. If an element is
    inf, the value is inf with gradient 0.

    Args:
        x: any shape that has ``axis``, any floating-point format.
        axis: the axis to sum over.
        mask: bool, broadcast with x; False leaves an element out, whatever its value.
        keepdims: keep the axis with length 1.
        xp: the array namespace.

    Raises:
        TypeError: ``mask`` is not a bool array.

    Example:
        >>> import array_api_compat.numpy as np
        >>> logsumexp(np.asarray([[1000.0, 1000.0], [-np.inf, -np.inf]]), xp=np).tolist()
        [1000.69..., -inf]
    """
    (x,), dtype = widened(x, xp=xp)
    axis = check_axes(axis, x.ndim, xp=xp)
    check_keepdims(keepdims, xp=xp)
    x = _left_out(x, mask, xp=xp)
    if 0 in x.shape:
        nothing = xp.sum(x, axis=axis, keepdims=keepdims)
        return xp.astype(nothing - _INF, dtype)  # a constant could not be differentiated with respect to x
    row = _row(x, axis, xp=xp)
    start = xp.where(row.alone, xp.sum(xp.where(row.ahead, x, 0.0), axis=axis, keepdims=True), row.shift)
    some = xp.isfinite(row.top)
    result = xp.where(some, start + row.tail, xp.where(xp.isnan(row.top), row.top, _constant(row.top, xp=xp)))
    result = result if keepdims else xp.squeeze(result, axis=axis)
    return xp.astype(result, dtype)


def softmax(x: Array, *, axis: Axis = -1, mask: Array | None = None, xp: Namespace) -> Array:
    """``exp(x) / sum(exp(x))`` over an axis; a row of masked or -inf elements gives 0 with gradient 0.

    Elements that are inf share the probability equally, with gradient 0. The arguments are those of
    :func:`logsumexp`.

    Example:
        >>> import array_api_compat.numpy as np
        >>> softmax(np.asarray([[0.0, 0.0], [-np.inf, -np.inf]]), xp=np).tolist()
        [[0.5, 0.5], [0.0, 0.0]]
    """
    (x,), dtype = widened(x, xp=xp)
    axis = check_axes(axis, x.ndim, xp=xp)
    x = _left_out(x, mask, xp=xp)
    if 0 in x.shape:
        return xp.astype(x, dtype)
    row = _row(x, axis, xp=xp)
    return xp.astype(row.exponentials / xp.where(row.total == 0, 1.0, row.total), dtype)


def log_softmax(x: Array, *, axis: Axis = -1, mask: Array | None = None, xp: Namespace) -> Array:
    """``x - logsumexp(x)`` over an axis; masked or -inf elements give -inf, with gradient 0.

    If n elements of a row are inf, each of them gives -log(n) and all others give -inf, all with gradient 0.
    The arguments are those of :func:`logsumexp`.

    Example:
        >>> import array_api_compat.numpy as np
        >>> log_softmax(np.asarray([[0.0, 0.0], [-np.inf, 5.0]]), xp=np).tolist()
        [[-0.693..., -0.693...], [-inf, 0.0]]
    """
    (x,), dtype = widened(x, xp=xp)
    axis = check_axes(axis, x.ndim, xp=xp)
    x = _left_out(x, mask, xp=xp)
    if 0 in x.shape:
        return xp.astype(x, dtype)
    row = _row(x, axis, xp=xp)
    result = (row.away - row.lead) - row.tail
    infinite = xp.astype(x == _INF, x.dtype)
    count = xp.sum(infinite, axis=axis, keepdims=True)
    shared = xp.where(infinite > 0, -xp.log(xp.where(count > 0, count, 1.0)), -_INF)
    rest = xp.where(xp.isnan(row.top), row.top, shared)
    return xp.astype(xp.where(row.kept, result, rest), dtype)


class _Row(NamedTuple):
    """The parts of a softmax. Parts with one number per row keep the axis with length 1."""

    top: Array  # the largest element
    shift: Array  # a whole number near it
    kept: Array  # whether an element is finite, in a row without inf or NaN
    away: Array  # x - shift, 0 where not kept
    exponentials: Array
    total: Array
    alone: Array  # whether the largest exponential is larger than the sum of all others
    ahead: Array  # whether an element is the largest one, in a row where ``alone`` holds
    lead: Array  # the distance of the largest element from the shift, in rows where ``alone`` holds
    tail: Array  # log(total), or where ``alone`` holds, log(total) minus the largest element


def _row(x: Array, axis: Axis, *, xp: Namespace) -> _Row:
    top = xp.max(x, axis=axis, keepdims=True)
    # The shift does not contribute to the gradient, because floor has none. (A max would split its gradient
    # among ties, and terms that cancel on paper would leave rounding errors.)
    shift = xp.floor(xp.where(xp.isfinite(top), top, 0.0))
    kept = xp.isfinite(x) & xp.isfinite(top)
    away = xp.where(kept, x, 0.0) - xp.where(kept, shift, 0.0)
    endless = xp.astype((top == _INF) & (x == _INF), x.dtype)
    exponentials = xp.where(kept, xp.exp(away), endless)
    exponentials = xp.where(xp.isnan(top), top, exponentials)

    def over(values: Array) -> Array:
        return xp.sum(values, axis=axis, keepdims=True)

    total = over(exponentials)
    # log(e^away + small) - away loses all digits of a small term, and rounding may make the result positive.
    # So where one element outweighs all others, the others are summed without it and passed to log1p.
    first = kept & (x == top)
    others = over(xp.where(first, 0.0, exponentials))
    alone = (over(xp.astype(first, x.dtype)) == 1) & (others < 0.5 * total)
    ahead = first & alone
    lead = over(xp.where(ahead, away, 0.0))
    biggest = over(xp.where(ahead, exponentials, 0.0))
    added = xp.log1p(xp.where(alone, others, 0.0) / xp.where(alone, biggest, 1.0))
    some = xp.isfinite(top) & xp.logical_not(alone)
    tail = xp.where(alone, added, xp.log(xp.where(some, total, 1.0)))
    return _Row(top, shift, kept, away, exponentials, total, alone, ahead, lead, tail)


def _left_out(x: Array, mask: Array | None, *, xp: Namespace) -> Array:
    """Return x with -inf where the mask is False."""
    check_mask(mask, xp=xp)
    return x if mask is None else xp.where(mask, x, -_INF)


def _constant(top: Array, *, xp: Namespace) -> Array:
    """Return inf or -inf, whichever ``top`` is, without its gradient."""
    return xp.where(top > 0, xp.full_like(top, _INF), -_INF)


def cumulative_logsumexp(x: Array, *, axis: int = -1, xp: Namespace) -> Array:
    """Cumulative logsumexp along an axis: element i is ``log(sum(exp(x[: i + 1])))``.

    The sums are computed by doubling: log2(n) times, :func:`logaddexp` is applied to the array and a copy of
    it shifted by 1, 2, 4 and so on, so a small element is not lost next to a much larger later one. The
    gradient is computed from these rounded sums, so its error is about eps times the size of x, and for x
    beyond 1 / eps equal elements get unequal shares. The gradient is a product of one weight per doubling,
    each of which adds an error of about 1 ulp; errors of up to 6 ulp were measured for 33 elements.

    -inf adds nothing and has gradient 0. From an inf on, all sums are inf, and only that inf gets a gradient.

    Example:
        >>> import array_api_compat.numpy as np
        >>> cumulative_logsumexp(np.asarray([-1000.0, 0.0, 0.0]), xp=np).tolist()
        [-1000.0, 0.0, 0.693...]
    """
    (x,), dtype = widened(x, xp=xp)
    x = xp.where(x == -_INF, -_INF, x)
    axis = check_axis(axis, x.ndim, xp=xp)
    # This is written without moveaxis, for which torch.func.vmap has no rule.
    others = [a for a in range(x.ndim) if a != axis]
    result, n, step = xp.permute_dims(x, (axis, *others)), x.shape[axis], 1
    # After each pass, element i holds the sum over the last 2 * step elements up to i.
    while step < n:
        moved = xp.concat([xp.full_like(result[:step], -_INF), result[: n - step]])
        result = logaddexp(moved, result, xp=xp)
        step *= 2
    back = (*range(1, axis + 1), 0, *range(axis + 1, x.ndim))
    return xp.astype(xp.permute_dims(result, back), dtype)


def xlogy(x: Array, y: Array, *, xp: Namespace) -> Array:
    """``x * log(y)``, and 0 where x is 0; the logarithm is the finite :func:`log`.

    The gradient is log(y) with respect to x and x / y with respect to y. Where y is below the smallest normal
    number, the gradient with respect to y is 0; if x is also 0, the gradient with respect to x is 0 too.

    Example:
        >>> import array_api_compat.numpy as np
        >>> xlogy(np.asarray([0.0, 2.0]), np.asarray([0.0, 1.0]), xp=np).tolist()
        [0.0, 0.0]
    """
    (x, y), dtype = widened(x, y, xp=xp)
    nothing = (x == 0) & (y < smallest_normal(y))
    endless = (x == 0) & (y == _INF)
    base = xp.where(nothing | endless, 1.0, y)
    return xp.astype(xp.where(nothing | endless, 0.0, x) * log(base, xp=xp), dtype)
