"""The array namespace in which the host decides: NumPy, with scalars in place of () arrays.

The core's ``decide`` takes about a hundred operations on single numbers. On () arrays, each operation costs a
microsecond of dispatch. On NumPy's scalars, whose arithmetic is bit for bit the same, it costs a tenth of
that, and ``where`` on a scalar condition is a branch. The difference shows in models so small that a whole
step takes a few hundred microseconds.

Only the hot functions are overridden; the rest falls through to array_api_compat's NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["as_scalar", "scalars"]

_BOOLS = frozenset((bool, np.bool_))
_Array = np.ndarray


def as_scalar(array: Any) -> Any:
    """Return a () array as a scalar, and any other array unchanged."""
    return array[()]


class _Scalars:
    """Functions of the array API standard, which return scalars for scalars."""

    float32, int32 = np.float32, np.int32

    def __getattr__(self, name: str) -> Any:
        # Imported by the first step, because it imports all of NumPy, with parts that take a while.
        import array_api_compat.numpy as np_namespace

        found = getattr(np_namespace, name)
        setattr(self, name, found)
        return found

    # --- choosing ------------------------------------------------------------------------------

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        if type(condition) in _BOOLS:
            kind = type(a)
            if (kind is type(b) and kind is not _Array) or np.ndim(a) == np.ndim(b):
                return a if condition else b
        return np.where(condition, a, b)

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        if type(a) is not _Array and type(b) is not _Array:
            return a if a <= b or a != a else b  # NaN propagates
        return np.minimum(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        if type(a) is not _Array and type(b) is not _Array:
            return a if a >= b or a != a else b
        return np.maximum(a, b)

    # --- asking --------------------------------------------------------------------------------

    @staticmethod
    def isfinite(x: Any) -> Any:
        return math.isfinite(x) if type(x) is not _Array else np.isfinite(x)

    @staticmethod
    def isnan(x: Any) -> Any:
        return math.isnan(x) if type(x) is not _Array else np.isnan(x)

    @staticmethod
    def logical_not(x: Any) -> Any:
        return not x if type(x) is not _Array else np.logical_not(x)

    # --- making --------------------------------------------------------------------------------

    @staticmethod
    def full_like(x: Any, value: Any, dtype: Any = None) -> Any:
        if type(x) is not _Array:
            return (dtype or type(x))(value)
        return np.full_like(x, value, dtype=dtype)

    @staticmethod
    def zeros_like(x: Any) -> Any:
        return type(x)(0) if type(x) is not _Array else np.zeros_like(x)

    @staticmethod
    def ones_like(x: Any) -> Any:
        return type(x)(1) if type(x) is not _Array else np.ones_like(x)

    @staticmethod
    def astype(x: Any, dtype: Any) -> Any:
        return np.dtype(dtype).type(x) if type(x) is not _Array else x.astype(dtype)

    @staticmethod
    def stack(values: Sequence[Any]) -> Any:
        return np.array(values)

    @staticmethod
    def reshape(x: Any, shape: tuple[int, ...]) -> Any:
        return np.reshape(x, shape)[()]

    # --- whole arrays --------------------------------------------------------------------------

    @staticmethod
    def sort(x: Any, axis: int = -1) -> Any:
        return np.sort(x, axis=axis)

    @staticmethod
    def max(x: Any, axis: int | None = None) -> Any:
        return np.maximum.reduce(x, axis=axis) if type(x) is _Array else x

    @staticmethod
    def min(x: Any, axis: int | None = None) -> Any:
        return np.minimum.reduce(x, axis=axis) if type(x) is _Array else x

    @staticmethod
    def sum(x: Any, axis: int | None = None, dtype: Any = None) -> Any:
        return np.add.reduce(x, axis=axis, dtype=dtype) if type(x) is _Array else x

    @staticmethod
    def argmax(x: Any) -> Any:
        return x.argmax()

    # --- arithmetic ----------------------------------------------------------------------------

    @staticmethod
    def abs(x: Any) -> Any:
        return abs(x)


scalars = _Scalars()
