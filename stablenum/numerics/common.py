"""What all safe functions share: the format they compute in, and its ends.

A function is differentiated by the framework, so its gradient is right only if no branch that is not
taken makes a NaN: ``where(bad, safe value, f(x))`` alone leaks one through the backward pass (0 x inf). The
argument is replaced first, in the places where the result will be: the double where.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.formats import get_format

__all__ = ["power_of_two_below", "smallest_normal", "widened"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


def widened(*values: Any, xp: Namespace) -> tuple[list[Array], Any]:
    """The arguments in the format that is computed in, and the format of the result.

    Formats narrower than float32 are computed in float32. Python numbers take the format of the arrays.

    Raises:
        TypeError: no argument is an array of a floating format.
    """
    dtypes = [v.dtype for v in values if hasattr(v, "dtype")]
    if not dtypes or not all("float" in str(dtype) for dtype in dtypes):
        shown = ", ".join(str(getattr(v, "dtype", type(v).__name__)) for v in values)
        raise TypeError(f"x must be an array of a floating format; got {shown}. Convert it first.")
    result = xp.result_type(*dtypes)
    wide = result if "float32" in str(result) or "float64" in str(result) else xp.float32
    like = next(v for v in values if hasattr(v, "dtype"))
    arrays = [v if hasattr(v, "dtype") else xp.full_like(like, v, dtype=wide) for v in values]
    return [v if v.dtype == wide else xp.astype(v, wide) for v in arrays], result


def smallest_normal(x: Array) -> float:
    """Of the format of ``x``. What lies below may be flushed to zero by the hardware or the compiler."""
    return get_format(x.dtype).smallest_normal


def power_of_two_below(x: Array, *, xp: Namespace) -> Array:
    """About the power of two below each positive finite element, 1 elsewhere; without gradient.

    Dividing by it first keeps squares in range. It need not be exact, only the same in every place.
    """
    ordinary = (x >= smallest_normal(x)) & xp.isfinite(x)
    exponent = xp.floor(xp.log2(xp.where(ordinary, x, 1.0)))  # floor: its gradient is 0 everywhere
    return xp.exp(exponent * 0.6931471805599453)
