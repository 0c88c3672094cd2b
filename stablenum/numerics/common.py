"""What all safe functions share: the format of the computation, and helpers for the ends of its range.

The framework differentiates the functions, so a gradient is correct only if no branch, not even one that is
not selected, produces a NaN: ``where(bad, safe value, f(x))`` alone lets a NaN through in the backward pass
(0 x inf). The argument is therefore replaced first, in the same places. This is called the "double where".
"""

from __future__ import annotations

import math
import operator
from typing import Any, TypeAlias

from stablenum._support.settings_checks import check_flag
from stablenum.errors import bad_field, bad_type
from stablenum.formats import get_format

__all__ = [
    "Axis",
    "check_axes",
    "check_axis",
    "check_broadcasts",
    "check_fill",
    "check_keepdims",
    "check_mask",
    "power_of_two_below",
    "smallest_normal",
    "widened",
    "without_gradient",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
Axis: TypeAlias = int | tuple[int, ...] | None


def widened(*values: Any, xp: Namespace) -> tuple[list[Array], Any]:
    """Return the arguments in the format of the computation, and the format of the result.

    The computation is in float32 or wider. The result has the arguments' format if all arguments have the
    same one, otherwise the format of the computation. Python numbers take the format of the computation.

    Raises:
        TypeError: no argument is an array, or an array is not of a floating-point format.
    """
    dtypes = [v.dtype for v in values if hasattr(v, "dtype")]
    if not dtypes or not all("float" in str(dtype) for dtype in dtypes):
        shown = ", ".join(str(getattr(v, "dtype", type(v).__name__)) for v in values)
        raise TypeError(f"x must be an array of a floating-point format; got {shown}. Convert it first.")
    # xp.result_type would fail: torch.compile does not accept it for the narrow formats.
    wide = xp.float64 if any("float64" in str(dtype) for dtype in dtypes) else xp.float32
    result = dtypes[0] if all(dtype == dtypes[0] for dtype in dtypes) else wide
    like = next(v for v in values if hasattr(v, "dtype"))
    arrays = [v if hasattr(v, "dtype") else xp.full_like(like, v, dtype=wide) for v in values]
    return [v if v.dtype == wide else xp.astype(v, wide) for v in arrays], result


def smallest_normal(x: Array) -> float:
    """Return the smallest normal number of x's format. Hardware or compilers may flush smaller numbers to
    zero."""
    return get_format(x.dtype).smallest_normal


def power_of_two_below(x: Array, *, deep: bool = False, xp: Namespace) -> Array:
    """Return a power of two near each positive finite element, and 1 elsewhere, without gradient.

    Dividing x by this power first keeps squares in range and rounds nothing. The power stays away from both
    ends of the range, so that its reciprocal (which XLA may multiply by instead) is a normal number, a
    gradient can be multiplied by it in the backward pass, and a logarithm that is rounded up at the largest
    number does not make it inf. With ``deep``, the power follows x nearly down to the smallest normal number.

    Where the quotient becomes a divisor, for example in the gradient of a logarithm, multiply by the
    reciprocal of the power: XLA rewrites ``a / (x / power)`` as ``a * power / x``, which overflows.
    """
    form = get_format(x.dtype)
    most = math.frexp(form.max)[1] - 4.0
    least = -most if deep else -0.6 * (most + 4.0) // 1
    ordinary = (x >= form.smallest_normal) & xp.isfinite(x)
    exponent = xp.floor(xp.log2(xp.where(ordinary, x, 1.0)))  # floor has gradient 0 everywhere
    exponent = xp.where(exponent < least, least, xp.where(exponent > most, most, exponent))
    return xp.pow(xp.full_like(exponent, 2.0), exponent)


def without_gradient(x: Array, *, xp: Namespace) -> Array:
    """Return x without its gradient; numbers too small for :func:`power_of_two_below` become 0."""
    form = get_format(x.dtype)
    power = power_of_two_below(xp.abs(x), xp=xp)
    step = power * (0.25 * form.eps)
    return xp.where(xp.abs(x) < power, 0.0, xp.floor(x / step) * step)


def _spelled(name: str, *, xp: Namespace) -> str:
    """Return an argument's name as the framework of ``xp`` has it, for a message."""
    torch = "torch" in getattr(xp, "__name__", "")
    return {"axis": "dim", "keepdims": "keepdim"}[name] if torch else name


def check_axis(axis: object, ndim: int, *, xp: Namespace) -> int:
    """Return ``axis`` as a non-negative number.

    Raises:
        ValueError: an array of ``ndim`` axes has no such axis.
    """
    if isinstance(axis, bool) or not isinstance(axis, int) or not -ndim <= axis < ndim:
        raise bad_field(_spelled("axis", xp=xp), f"a whole number from {-ndim} to {ndim - 1}", axis)
    return axis % ndim


def check_axes(axis: Any, ndim: int, *, xp: Namespace) -> Axis:
    """Return an axis or several, as a number, a tuple or None for all, after checking that they exist.

    Raises:
        ValueError: an array of ``ndim`` axes has no such axis, or one is given twice.
    """
    if axis is None:
        return None
    several = isinstance(axis, (tuple, list))
    most = max(ndim, 1)  # torch gives a number one axis
    found: list[int] = []
    for a in axis if several else (axis,):
        number = a if isinstance(a, int) else operator.index(a) if hasattr(a, "__index__") else most
        if isinstance(a, bool) or not -most <= number < most or number % most in [n % most for n in found]:
            allowed = f"a whole number from {-most} to {most - 1}, several different ones in a tuple, or None"
            raise bad_field(_spelled("axis", xp=xp), allowed, axis)
        found.append(number)
    return tuple(found) if several else found[0]


def check_keepdims(keepdims: object, *, xp: Namespace) -> None:
    """Check that ``keepdims`` is True or False.

    Raises:
        TypeError: it is not.
    """
    check_flag(_spelled("keepdims", xp=xp), keepdims)


def check_fill(fill: object) -> None:
    """Check that ``fill`` is a real number; inf and NaN are.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(fill, (int, float)) and "complex" in str(getattr(fill, "dtype", "complex")):
        raise bad_type("fill", "a real number", fill)


def check_broadcasts(name: str, value: Array | None, x: Array) -> None:
    """Check that an array, if it is given, can be broadcast to the shape of ``x``.

    Raises:
        ValueError: it cannot.
    """
    if value is None:
        return
    shape, whole = tuple(value.shape), tuple(x.shape)
    wrong = [n for n, m in zip(reversed(shape), reversed(whole), strict=False) if n not in (1, m)]
    if len(shape) > len(whole) or wrong:
        raise bad_field(f"{name}.shape", f"one that can be broadcast to the shape of x, {whole}", shape)


def check_mask(mask: Array | None, *, xp: Namespace) -> None:
    """Check that the mask is None or a bool array.

    Raises:
        TypeError: the mask is neither. (One framework would accept 0 and 1, the other would reject them.)
    """
    if mask is not None and getattr(mask, "dtype", None) != xp.bool:
        shown = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"mask must be a bool array, True where an element counts; got {shown}.")
