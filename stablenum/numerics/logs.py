"""Logarithms, exponentials and what lies between them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from stablenum.numerics.common import check_mask, smallest_normal, widened

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

# log((1 - e^-a) / a) = -a/2 + sum of B_2k a^2k / (2k (2k)!), for a up to ln 2 to the last digit of float64.
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
_SERIES = tuple(b / (2 * k * math.factorial(2 * k)) for k, b in enumerate(_BERNOULLI, start=1))


def log(x: Array, *, xp: Namespace) -> Array:
    """Natural logarithm that stays finite: ``log(max(x, smallest normal number))``.

    The floor is that of the format computed in: -87.34 below 1.18e-38 (-708.4 in float64), with gradient
    0 there, for zero and negative x too. log(inf) is inf; NaN stays NaN.

    Args:
        x: any shape, any floating format.
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

    Two forms that meet at a = ln 2 (Maechler 2012, the log1mexp note of R's package Rmpfr). Beyond it
    ``log1p(-e)`` with e = exp(-a), written ``-log1p(e / (1 - e))``: XLA's log1p is off by 120 ulp at -0.4 in
    float64 on a CPU. Below it ``log(-expm1(-a))``, written ``log(a) - a/2`` and a series in a^2: XLA's
    expm1 is off by 4 ulp. The gradient is ``1 / expm1(a)``. For a below the smallest normal number, zero
    and negative included, -inf with gradient 0.

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
    """``log(1 + exp(x))`` that neither overflows nor loses digits; its gradient is the sigmoid of x.

    ``x + log1p(exp(-x))`` for x > 0, else ``log1p(exp(x))``: no tie at 0, so the second derivative is right
    there too. inf gives inf, -inf gives 0.

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
    """``log(exp(a) + exp(b))``; the gradients are the two weights of a softmax.

    Both -inf: -inf with gradient 0. Both inf: inf, and 1/2 each.

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
    # The mean of two infinities keeps the gradients at one half; of two that are masked nothing flows.
    ends = xp.where(
        a > 0, 0.5 * xp.where(same & (a > 0), a, 0.0) + 0.5 * xp.where(same & (a > 0), b, 0.0), -_INF
    )
    return xp.astype(xp.where(same, ends, result), dtype)


def logsubexp(a: Array, b: Array, *, xp: Namespace) -> Array:
    """``log(exp(a) - exp(b))`` for a > b: ``a + log1mexp(a - b)``.

    Where a <= b (both -inf or both inf among them), or above it by less than the smallest normal number,
    -inf with gradient 0.

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
    x: Array, *, axis: int = -1, mask: Array | None = None, keepdims: bool = False, xp: Namespace
) -> Array:
    """``log(sum(exp(x)))`` over an axis; its gradient is the softmax.

    No element left (none at all, all -inf, or masked): -inf with gradient 0. An element of inf: inf,
    gradient 0.

    Args:
        x: any shape with ``axis``, any floating format.
        axis: over which is summed.
        mask: bool, broadcast with x; False leaves an element out, whatever it holds.
        keepdims: keep the axis with length 1.
        xp: the array namespace.

    Raises:
        TypeError: ``mask`` is not of booleans.

    Example:
        >>> import array_api_compat.numpy as np
        >>> logsumexp(np.asarray([[1000.0, 1000.0], [-np.inf, -np.inf]]), xp=np).tolist()
        [1000.69..., -inf]
    """
    (x,), dtype = widened(x, xp=xp)
    x = _left_out(x, mask, xp=xp)
    if 0 in x.shape:
        nothing = xp.sum(x, axis=axis, keepdims=keepdims)
        return xp.astype(nothing - _INF, dtype)  # not a constant: it is differentiated, by no element
    row = _row(x, axis, xp=xp)
    start = xp.where(row.alone, xp.sum(xp.where(row.ahead, x, 0.0), axis=axis, keepdims=True), row.shift)
    some = xp.isfinite(row.top)
    result = xp.where(some, start + row.tail, xp.where(xp.isnan(row.top), row.top, _constant(row.top, xp=xp)))
    result = result if keepdims else xp.squeeze(result, axis=axis)
    return xp.astype(result, dtype)


def softmax(x: Array, *, axis: int = -1, mask: Array | None = None, xp: Namespace) -> Array:
    """``exp(x) / sum(exp(x))`` over an axis; a row without any element left is 0, with gradient 0.

    Elements of inf share the row equally, with gradient 0. Arguments as in :func:`logsumexp`.

    Example:
        >>> import array_api_compat.numpy as np
        >>> softmax(np.asarray([[0.0, 0.0], [-np.inf, -np.inf]]), xp=np).tolist()
        [[0.5, 0.5], [0.0, 0.0]]
    """
    (x,), dtype = widened(x, xp=xp)
    x = _left_out(x, mask, xp=xp)
    if 0 in x.shape:
        return xp.astype(x, dtype)
    row = _row(x, axis, xp=xp)
    return xp.astype(row.exponentials / xp.where(row.total == 0, 1.0, row.total), dtype)


def log_softmax(x: Array, *, axis: int = -1, mask: Array | None = None, xp: Namespace) -> Array:
    """``x - logsumexp(x)`` over an axis: -inf, with gradient 0, for what is masked or -inf.

    Elements of inf share the row: minus the log of their number, the others -inf, all with gradient 0.
    Arguments as in :func:`logsumexp`.

    Example:
        >>> import array_api_compat.numpy as np
        >>> log_softmax(np.asarray([[0.0, 0.0], [-np.inf, 5.0]]), xp=np).tolist()
        [[-0.693..., -0.693...], [-inf, 0.0]]
    """
    (x,), dtype = widened(x, xp=xp)
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
    """The parts of a softmax; those of one number a row keep their axis."""

    top: Array  # the largest element
    shift: Array  # a whole number near it
    kept: Array  # elements that are finite, in a row without inf or NaN
    away: Array  # x - shift, 0 where not kept
    exponentials: Array
    total: Array
    alone: Array  # the largest element outweighs all others together
    ahead: Array  # it, in those rows
    lead: Array  # its distance from the shift, in those rows
    tail: Array  # log(total), or what the others add to the largest


def _row(x: Array, axis: int, *, xp: Namespace) -> _Row:
    top = xp.max(x, axis=axis, keepdims=True)
    # The shift takes no part in the gradient: floor has none. (A max would share it among ties, and
    # what cancels on paper leaves rounding errors behind.)
    shift = xp.floor(xp.where(xp.isfinite(top), top, 0.0))
    kept = xp.isfinite(x) & xp.isfinite(top)
    away = xp.where(kept, x, 0.0) - xp.where(kept, shift, 0.0)
    endless = xp.astype((top == _INF) & (x == _INF), x.dtype)
    exponentials = xp.where(kept, xp.exp(away), endless)
    exponentials = xp.where(xp.isnan(top), top, exponentials)

    def over(values: Array) -> Array:
        return xp.sum(values, axis=axis, keepdims=True)

    total = over(exponentials)
    # log(e^away + little) - away has no digit of "little" left, and may come out above 0. So where one
    # element outweighs the others, they are added up without it, and log1p takes them.
    first = kept & (x == top)
    others = over(xp.where(first, 0.0, exponentials))
    alone = (over(xp.astype(first, x.dtype)) == 1) & (others < 0.5 * total)
    ahead = first & alone
    lead = over(xp.where(ahead, away, 0.0))
    biggest = over(xp.where(ahead, exponentials, 0.0))
    beside = xp.log1p(xp.where(alone, others, 0.0) / xp.where(alone, biggest, 1.0))
    some = xp.isfinite(top) & xp.logical_not(alone)
    tail = xp.where(alone, beside, xp.log(xp.where(some, total, 1.0)))
    return _Row(top, shift, kept, away, exponentials, total, alone, ahead, lead, tail)


def _left_out(x: Array, mask: Array | None, *, xp: Namespace) -> Array:
    """x with -inf where the mask is False."""
    check_mask(mask, xp=xp)
    return x if mask is None else xp.where(mask, x, -_INF)


def _constant(top: Array, *, xp: Namespace) -> Array:
    """inf or -inf as ``top``, without its gradient."""
    return xp.where(top > 0, xp.full_like(top, _INF), -_INF)


def cumulative_logsumexp(x: Array, *, axis: int = -1, xp: Namespace) -> Array:
    """Element i: ``log(sum(exp(x[: i + 1])))`` along an axis.

    By doubling: log2(n) times :func:`logaddexp` of the array and itself moved by 1, 2, 4... places, so no
    element is lost beside a much larger one that comes later. The gradient weighs with these rounded sums:
    it is right to eps times the size of x, beyond 1 / eps equal elements share it unevenly. It is a product
    of one weight for each doubling, which adds about 1 ulp each: up to 6 measured for 33 elements.

    -inf takes no part, with gradient 0. From an inf on all sums are inf, and their gradient is that inf's.

    Example:
        >>> import array_api_compat.numpy as np
        >>> cumulative_logsumexp(np.asarray([-1000.0, 0.0, 0.0]), xp=np).tolist()
        [-1000.0, 0.0, 0.693...]
    """
    (x,), dtype = widened(x, xp=xp)
    x = xp.where(x == -_INF, -_INF, x)
    axis = axis % x.ndim
    # Not moveaxis: torch.func.vmap has no rule for it.
    others = [a for a in range(x.ndim) if a != axis]
    result, n, step = xp.permute_dims(x, (axis, *others)), x.shape[axis], 1
    while step < n:
        moved = xp.concat([xp.full_like(result[:step], -_INF), result[: n - step]])
        result = logaddexp(moved, result, xp=xp)
        step *= 2
    back = (*range(1, axis + 1), 0, *range(axis + 1, x.ndim))
    return xp.astype(xp.permute_dims(result, back), dtype)


def xlogy(x: Array, y: Array, *, xp: Namespace) -> Array:
    """``x * log(y)``, 0 where x is 0; the logarithm is the finite :func:`log`.

    The gradient by x is log(y), by y it is x / y; both are 0 where y is below the smallest normal number and
    x is 0, and the one by y wherever y is below it.

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
