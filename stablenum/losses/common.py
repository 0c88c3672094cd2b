"""What all losses share: checks of arguments, weights, and the reduction over valid items."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from stablenum._support.settings_checks import check_flag, check_int, check_number
from stablenum.errors import bad_field, bad_type
from stablenum.formats import get_format
from stablenum.numerics.common import check_axis, widened

__all__ = [
    "REDUCTIONS",
    "argument_kinds",
    "at_least_0",
    "check_arguments",
    "check_axis",
    "check_classes",
    "check_fits",
    "check_reduction",
    "check_same_shape",
    "check_smoothing",
    "classes_last",
    "floored",
    "for_slope",
    "is_floating",
    "items_left",
    "prepared",
    "reduced",
    "weighted",
    "wide_format",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

REDUCTIONS = ("mean", "sum", "none")


def argument_kinds(function: Callable[..., Any]) -> dict[str, str]:
    """Return the arguments of a loss that are arrays, flags or a class index, each with its annotation."""
    found = {name: str(p.annotation) for name, p in inspect.signature(function).parameters.items()}
    return {n: kind for n, kind in found.items() if kind.startswith(("Array", "bool")) or n == "ignore_index"}


def check_arguments(
    kinds: Mapping[str, str],
    args: Sequence[Any],
    options: Mapping[str, Any],
    *,
    is_array: Callable[[Any], bool],
    noun: str,
) -> None:
    """Check the types of a loss's arguments. Values, which may be on a device, are not read.

    Args:
        kinds: what :func:`argument_kinds` returned for the loss, the positional arguments first.
        args, options: what the loss was called with.
        is_array: whether a value is an array of the framework.
        noun: what the framework calls an array: "a tensor" or "an array".

    Raises:
        TypeError: an argument has a wrong type, or holds complex numbers.
        ValueError: ``ignore_index`` is not a whole number.
    """
    for name, value in (*zip(kinds, args), *options.items()):
        kind = kinds.get(name, "")
        if kind == "bool":
            check_flag(name, value)
        elif kind == "int":
            check_int(name, value, at_least=-(2**63), at_most=2**63 - 1)
        elif kind and not (value is None and "None" in kind):
            if not is_array(value):
                raise bad_type(name, f"{noun} or None" if "None" in kind else noun, value)
            if "complex" in str(value.dtype):
                raise TypeError(
                    f"{name} must hold real numbers; got {value.dtype}. Take the real part first."
                )


def check_reduction(reduction: object) -> str:
    """Check that ``reduction`` is ``"mean"``, ``"sum"`` or ``"none"``, and return it.

    Example:
        >>> check_reduction("avg")
        Traceback (most recent call last):
        ValueError: reduction must be "mean", "sum" or "none"; got 'avg'.
    """
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise bad_field("reduction", '"mean", "sum" or "none"', reduction)
    return reduction


def check_smoothing(label_smoothing: object) -> float:
    """Check that ``label_smoothing`` is at least 0 and below 1, and return it as a float."""
    return check_number("label_smoothing", label_smoothing, at_least=0.0, below=1.0)


def check_classes(logits: Array, axis: int) -> None:
    """Check that there is at least one class."""
    if logits.shape[axis] == 0:
        raise bad_field("logits", f"an array with at least one class along axis {axis}", tuple(logits.shape))


def check_same_shape(name: str, array: Array, other_name: str, other: Array) -> None:
    """Check that both arrays have the same shape: items are never broadcast silently."""
    if tuple(array.shape) != tuple(other.shape):
        shape = tuple(other.shape)
        raise bad_field(name, f"of the same shape as {other_name}, {shape}", tuple(array.shape))


def check_fits(name: str, array: Array, shape: tuple[int, ...], *, of: str) -> None:
    """Check that ``array`` broadcasts to ``shape``, and that a mask is a bool array."""
    if "mask" in name and "bool" not in str(array.dtype):
        raise bad_field(name, "a bool array that is False for whatever is left out", str(array.dtype))
    got = tuple(array.shape)
    fits = len(got) <= len(shape) and all(g in (1, s) for g, s in zip(reversed(got), reversed(shape)))
    if not fits:
        raise bad_field(name, f"broadcastable to the shape of {of}, {tuple(shape)}", got)


def classes_last(x: Array, axis: int, *, xp: Namespace) -> Array:
    """Return x with an axis (given as a non-negative number) moved to the end."""
    if axis == x.ndim - 1:
        return x
    return xp.permute_dims(x, (*range(axis), *range(axis + 1, x.ndim), axis))


def for_slope(z: Array, *, xp: Namespace) -> Array:
    """Clamp z to [-1e4, 1e4], with gradient 0 beyond, where the sigmoid is 0 or 1 anyway.

    A loss near the end of the range times a slope of 0 must give 0, not inf x 0.
    """
    z = xp.where(z > 1e4, 1e4, z)
    return xp.where(z < -1e4, -1e4, z)


def is_floating(array: Array) -> bool:
    """Return whether an array holds floating-point numbers."""
    return "float" in str(array.dtype)


def prepared(x: Array, *others: Array, dtype: Any = None, xp: Namespace) -> tuple[list[Array], Any]:
    """Return ``x`` and the others in the format of the computation, and the format of the result.

    The result has the format of ``x``, whatever the format of the targets, unless ``dtype`` is given.
    """
    (wide,), result = widened(x, xp=xp)
    rest = [other if other.dtype == wide.dtype else xp.astype(other, wide.dtype) for other in others]
    return [wide, *rest], result if dtype is None else dtype


def wide_format(x: Array, *, xp: Namespace) -> tuple[Any, Any]:
    """Return the format of the computation and that of the result, without computing on x."""
    (wide,), result = widened(x.reshape(-1)[:0], xp=xp)
    return wide.dtype, result


def items_left(mask: Array | None, *arrays: Array, shape: tuple[int, ...], xp: Namespace) -> list[Array]:
    """Return the arrays with 1 where the mask is False, so that masked values, including NaN, have no
    effect."""
    if mask is None:
        return list(arrays)
    check_fits("mask", mask, shape, of="the items")
    return [xp.where(mask, array, 1.0) for array in arrays]


def weighted(items: Array, weight: Array, *, xp: Namespace) -> Array:
    """Return ``weight * items``; a weight of 0 gives 0 even for an infinite item."""
    none = weight == 0
    return xp.where(none, 0.0, weight * xp.where(none, 0.0, items))


def reduced(
    items: Array,
    *,
    reduction: str,
    dtype: Any,
    mask: Array | None = None,
    weights: Array | None = None,
    xp: Namespace,
) -> Array:
    """Reduce the losses of items to one number, or return them with masked items set to 0.

    Args:
        items: the loss of each item.
        reduction: "mean" divides by the number of valid items, or by the sum of ``weights`` over them; if
            that is 0, the result is 0. "sum" and "none" do not divide.
        dtype: the format of the result; sums are computed in the format of ``items``.
        mask: False for items that are left out; broadcast with ``items``.
        weights: the weight of each item in the divisor of the mean; None for weights of 1.
        xp: the array namespace.
    """
    if mask is not None:
        mask = xp.broadcast_to(mask, items.shape)
        items = xp.where(mask, items, 0.0)
    if reduction == "none":
        return xp.astype(items, dtype)
    total = xp.sum(items)
    if reduction == "mean":
        total = total / _divisor(items, mask, weights, xp=xp)
    return xp.astype(total, dtype)


def _divisor(items: Array, mask: Array | None, weights: Array | None, *, xp: Namespace) -> Array | float:
    if mask is None and weights is None:
        return float(max(math.prod(items.shape), 1))
    if weights is None:
        count = xp.astype(xp.sum(xp.astype(mask, xp.int32)), items.dtype)
    else:
        count = xp.sum(weights if mask is None else xp.where(mask, weights, 0.0))
    return xp.where(count == 0, 1.0, count)


def floored(x: Array, floor: float, *, xp: Namespace) -> Array:
    """Return ``max(x, floor)`` with gradient 1 below the floor too, so that x can rise above it again.

    Below the floor, the value is ``floor + (x - x)``, where the second x has no gradient: it is x rounded
    down in steps far smaller than the last digit of the floor, and rounding down has no gradient. Below -2^60
    times the floor, the gradient is 0.

    Raises:
        ValueError: the floor, which is the user's ``eps``, is below the smallest normal number of x's format.
    """
    floor = check_number("eps", floor, at_least=get_format(x.dtype).smallest_normal)
    unit = 2.0 ** math.floor(math.log2(floor))  # a power of two, so that scaling is exact
    below = x < floor
    near = below & (x > -(2.0**60) * floor)
    ratio = xp.where(near, x / unit, 0.0)
    nothing = ratio - xp.floor(ratio * 2.0**54) * 2.0**-54
    return xp.where(below, floor + nothing * unit, x)


def at_least_0(items: Array, *, xp: Namespace) -> Array:
    """Return the items, with 0 in place of a rounding error below 0; their gradient is unchanged.

    An item below 0 is reduced by its own value, rounded down to a multiple of 2^-90. Rounding down has no
    gradient.
    """
    near = (items < 0) & (items > -(2.0**20))
    ratio = xp.where(near, items, 0.0) * 2.0**90
    nothing = (ratio - xp.floor(ratio)) * 2.0**-90
    return xp.where(items < 0, nothing, items)
