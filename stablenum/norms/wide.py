"""Numbers beyond float32's range, in every array namespace: a float32 and a power of two.

The norm of finite gradients, and the factor that clips it, may lie outside float32's range: a norm of 1e39
divided by a loss scale of 65536 is an ordinary number, and a float64 gradient of 1e200 is finite. JAX has no
float64 by default, so such a number is kept as ``value * 2**power``, with a power that is a multiple of 64.
The power is 0 for every number in float32's range, and then each function computes exactly what float32
arithmetic computes.

Without powers (``power`` is None) the functions are float32 arithmetic that saturates. Powers of two are
applied in fixed steps, because ``exp2`` and ``pow`` are not exact in every framework; each step has its own
condition, so that no compiler merges two of them into one power that float32 does not hold. Steps of 64 are
few, which matters to compilers: every training step contains these functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from stablenum.arrays import at_least, at_most, combine_norms
from stablenum.formats import FLOAT32_MAX, FLOAT32_TINY

__all__ = [
    "STEP",
    "Wide",
    "choose",
    "exceeds",
    "fold",
    "join",
    "lower",
    "multiply",
    "narrow",
    "over_scale",
    "quotient",
    "recorded",
    "settle",
    "shrink",
    "times_scale",
    "unscale",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

STEP = 64  # powers are multiples of it
_UP, _DOWN = 2.0**STEP, 2.0**-STEP
_TOP = 2.0 ** (128 - STEP)  # a value below it can be multiplied by _UP


class Wide(NamedTuple):
    """The numbers ``value * 2**power``.

    Attributes:
        value: () or (n,) float32; for a norm with a power above 0 it is in [2**64, 2**128).
        power: int32 of the same shape, a multiple of 64: at least 0 for a norm, at most 0 for a factor. None
            if numbers outside float32's range saturate.
    """

    value: Array
    power: Array | None = None


def settle(value: Array, power: Array, *, xp: Namespace) -> Wide:
    """Return the norm ``value * 2**power`` with the smallest power of 0 and above that its value allows; the
    value of a norm with a power is 2**-64 or more."""
    for _ in range(2):
        raises = (power > 0) & (value < _TOP)
        value = xp.where(raises, value * _UP, value)
        power = xp.where(raises, power - STEP, power)
    return Wide(value, xp.where(xp.isfinite(value), power, xp.zeros_like(power)))


def lower(value: Array, power: Array, *, xp: Namespace) -> Array:
    """Return ``value * 2**power`` where the power is below 0, and elsewhere the value."""
    for step in range(1, 4):  # what is left of the power makes no difference to numbers so small
        value = xp.where(power <= -step * STEP, value * _DOWN, value)
    return value


def narrow(norm: Array, power: Array, *, xp: Namespace) -> Wide:
    """Return float64 norms ``norm * 2**power``; where they are in float32's range, ``power`` must be 0."""
    for step in (512, 256, 128, STEP):
        lowers = (norm >= _TOP * 2.0**step) & xp.isfinite(norm)
        norm = xp.where(lowers, norm * 2.0**-step, norm)
        power = xp.where(lowers, power + step, power)
    # Rounding to float32 must not turn a finite norm into inf.
    norm = xp.where(xp.isfinite(norm), at_most(norm, FLOAT32_MAX, xp=xp), norm)
    return Wide(xp.astype(norm, xp.float32), power)


def recorded(norm: Wide, *, xp: Namespace) -> Array:
    """Return the norm as float32; beyond its range, its largest number."""
    if norm.power is None:
        return norm.value
    return xp.where(norm.power > 0, xp.full_like(norm.value, FLOAT32_MAX), norm.value)


def choose(condition: Array, a: Wide, b: Wide, *, xp: Namespace) -> Wide:
    """Return ``a`` where the condition holds, otherwise ``b``."""
    value = xp.where(condition, a.value, b.value)
    if a.power is None or b.power is None:
        return Wide(value)
    return Wide(value, xp.where(condition, a.power, b.power))


def join(norms: Wide, *, xp: Namespace) -> Wide:
    """Return the L2 norm of a vector from the (n,) norms of its parts."""
    if norms.power is None or norms.value.shape[0] == 0:
        total = combine_norms(norms.value, xp=xp)
        return Wide(total, None if norms.power is None else xp.sum(norms.power, dtype=xp.int32))
    top = xp.max(norms.power)
    parts = lower(norms.value, norms.power - top, xp=xp)
    # From 2**100 on, the joint norm of many parts may be outside float32's range.
    largest = xp.max(parts)
    large = (largest >= 2.0**100) & xp.isfinite(largest)
    total = combine_norms(xp.where(large, parts * _DOWN, parts), xp=xp)
    return settle(total, xp.where(large, top + STEP, top), xp=xp)


def unscale(norm: Wide, scale: Array, *, xp: Namespace) -> Wide:
    """Return ``norm / scale``. (A scale below 1 enlarges the norm.)"""
    quotient_ = norm.value / scale
    finite = xp.isfinite(norm.value)
    if norm.power is None:
        return Wide(xp.where(finite, at_most(quotient_, FLOAT32_MAX, xp=xp), norm.value))
    over = finite & xp.logical_not(xp.isfinite(quotient_))
    value = xp.where(over, (norm.value * _DOWN) / (scale * _UP), quotient_)
    return settle(value, xp.where(over, norm.power + 2 * STEP, norm.power), xp=xp)


def times_scale(norm: Wide, scale: Array, *, xp: Namespace) -> Wide:
    """Return ``norm * scale``."""
    product = norm.value * scale
    finite = xp.isfinite(norm.value)
    if norm.power is None:
        return Wide(xp.where(finite, at_most(product, FLOAT32_MAX, xp=xp), norm.value))
    over = finite & xp.logical_not(xp.isfinite(product))
    value = xp.where(over, (norm.value * _DOWN) * (scale * _DOWN), product)
    return settle(value, xp.where(over, norm.power + 2 * STEP, norm.power), xp=xp)


def exceeds(norm: Wide, limit: Array, *, xp: Namespace) -> Array:
    """Return whether a finite norm is above the limit."""
    above = xp.isfinite(norm.value) & (norm.value > limit)
    return above if norm.power is None else above | ((norm.power > 0) & xp.isfinite(limit))


def quotient(limit: Array | float, norm: Wide, *, xp: Namespace) -> Wide:
    """Return the factor ``limit / norm``, for limits below the norm."""
    if norm.power is None:
        return Wide(limit / norm.value)
    if isinstance(limit, (int, float)):
        limit = xp.full_like(norm.value, limit)
    plain = limit / norm.value
    tiny = plain < 2.0**-100
    value = xp.where(tiny, (limit * _UP) / (norm.value * _DOWN), plain)
    power = xp.where(tiny, -2 * STEP - norm.power, -norm.power)
    above = (value > 1) & (power < 0)
    return Wide(xp.where(above, value * _DOWN, value), xp.where(above, power + STEP, power))


def multiply(a: Wide, b: Wide, *, xp: Namespace) -> Wide:
    """Return the product of two factors."""
    if a.power is None or b.power is None:
        return fold(Wide(a.value * fold(b, xp=xp).value), xp=xp)
    a, b = _lifted(a, xp=xp), _lifted(b, xp=xp)
    return Wide(a.value * b.value, a.power + b.power)  # type: ignore[operator]


def shrink(norm: Wide, factor: Wide, *, xp: Namespace) -> Wide:
    """Return ``norm * factor``, a norm."""
    if norm.power is None or factor.power is None:
        return Wide(norm.value * factor.value)
    down = (norm.value >= _UP) & (factor.power < 0)
    value = xp.where(down, norm.value * _DOWN, norm.value) * factor.value
    power = norm.power + factor.power
    power = xp.where(down, power + STEP, power)
    # A factor below 1 leaves a norm in float32's range.
    return settle(lower(value, power, xp=xp), at_least(power, 0, xp=xp), xp=xp)


def over_scale(factor: Wide, scale: Array, *, xp: Namespace) -> Wide:
    """Return ``factor / scale``, a factor, or a number above 1 with the power 0 or below."""
    if factor.power is None:
        return Wide(factor.value / scale)
    value, power = _lifted(factor, xp=xp)
    assert power is not None
    large = scale >= _UP
    value = xp.where(large, value * _UP, value) / scale
    return Wide(value, xp.where(large, power - STEP, power))


def fold(factor: Wide, *, xp: Namespace) -> Wide:
    """Return the factor with the power nearest 0 for which its value is a normal float32.

    Without powers it is raised to the smallest normal number: a factor that was flushed to zero would
    silently turn finite gradients into zeros.
    """
    value, power = factor
    if power is not None:
        for _ in range(3):
            lowers = (power < 0) & (value >= FLOAT32_TINY * _UP)
            value = xp.where(lowers, value * _DOWN, value)
            power = xp.where(lowers, power + STEP, power)
    return Wide(at_least(value, FLOAT32_TINY, xp=xp), power)


def _lifted(factor: Wide, *, xp: Namespace) -> Wide:
    """Return the factor with a value of 2**-62 or more, so that it can be multiplied by another."""
    small = factor.value < 2.0**-62
    assert factor.power is not None
    return Wide(
        xp.where(small, factor.value * _UP, factor.value), xp.where(small, factor.power - STEP, factor.power)
    )
