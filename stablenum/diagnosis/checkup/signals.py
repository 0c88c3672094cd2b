"""What a checkup measures of one tensor: sizes and fractions, in one pass, never the data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["BOUNDED", "Signal", "measure_signal"]

Array = Any

# Operations with bounded outputs, which saturate.
BOUNDED = ("sigmoid", "softmax", "tanh")
# An output of sigmoid or softmax this close to 0 or 1, or of tanh to -1 or 1, is saturated: its derivative is
# at most 0.0099, or 0.02.
_EDGE = 0.01


class Signal(NamedTuple):
    """Statistics of a tensor of finite numbers; NaN where one does not apply.

    Attributes:
        shape, dtype: those of the tensor.
        rms, mean, least, greatest: the root mean square, the mean and the extremes.
        zero: the fraction of elements that are exactly 0.
        dead: the fraction of units (channels) that are 0 for the whole batch.
        spread: the RMS of the deviations from the mean over the first axis, divided by ``rms``: 0 if every
            item of the batch has the same numbers.
        saturated: of a bounded operation, the fraction of elements (of softmax: of rows) at the edge of the
            range.
        used: of softmax, how many entries of the last axis the batch uses: the inverse of the sum of the
            squares of their mean probabilities.
        entropy: of softmax, the mean entropy of a row, divided by the logarithm of its length.
    """

    shape: tuple[int, ...]
    dtype: str
    rms: float
    mean: float
    least: float
    greatest: float
    zero: float
    dead: float
    spread: float
    saturated: float
    used: float
    entropy: float

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return self.rms * math.sqrt(self.size)

    @classmethod
    def of(cls, shape: Sequence[int], dtype: str, numbers: Sequence[float]) -> Signal:
        """Return the signal of a tensor, for which :func:`measure_signal` returned ``numbers``."""
        return cls(tuple(shape), dtype, *map(float, numbers))


def measure_signal(x: Array, operation: str = "", *, unit_axis: int = -1, xp: Any) -> Array:
    """Return the ten numbers of a :class:`Signal`, as one array in the precision of ``x``.

    Args:
        x: floating-point numbers of any shape, at least one; float32 or wider.
        operation: the operation that made them, for those with bounded outputs.
        unit_axis: the axis of the units, or channels.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> measured = measure_signal(np.asarray([[0.0, 3.0], [0.0, 5.0]]), xp=np)
        >>> Signal.of((2, 2), "float64", measured).dead
        0.5
    """
    size = xp.abs(x)
    top = xp.max(size)
    scale = xp.where(top > 0, top, xp.ones_like(top))
    rms = scale * xp.sqrt(xp.mean((x / scale) ** 2))
    unknown = rms * 0 + float("nan")
    zero = xp.astype(x == 0, x.dtype)
    dead = spread = saturated = used = entropy = unknown
    if x.ndim > 1:
        others = tuple(i for i in range(x.ndim) if i != unit_axis % x.ndim)
        dead = xp.mean(xp.astype(xp.max(size, axis=others) == 0, x.dtype))
        spread = _spread(x / scale, xp) * scale / xp.where(rms > 0, rms, xp.ones_like(rms))
    if operation == "sigmoid":
        saturated = xp.mean(xp.astype(xp.logical_or(x < _EDGE, x > 1 - _EDGE), x.dtype))
    elif operation == "tanh":
        saturated = xp.mean(xp.astype(size > 1 - _EDGE, x.dtype))
    elif operation == "softmax" and x.ndim and x.shape[-1] > 1:
        rows = xp.reshape(x, (-1, x.shape[-1]))
        saturated = xp.mean(xp.astype(xp.max(rows, axis=-1) > 1 - _EDGE, x.dtype))
        used = 1 / xp.sum(xp.mean(rows, axis=0) ** 2)
        safe = xp.where(rows > 0, rows, xp.ones_like(rows))
        entropy = xp.mean(xp.sum(-rows * xp.log(safe), axis=-1)) / math.log(x.shape[-1])
    numbers = [rms, xp.mean(x), xp.min(x), xp.max(x), xp.mean(zero), dead, spread, saturated, used, entropy]
    return xp.stack(numbers)


def _spread(x: Array, xp: Any) -> Array:
    around = x - xp.mean(x, axis=0, keepdims=True)
    return xp.sqrt(xp.mean(around**2))
