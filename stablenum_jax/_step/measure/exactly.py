"""Sums of squares without rounding, as in :mod:`stablenum.norms.exact_sums`, with JAX's 32-bit integers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from stablenum.norms.exact_sums import DIGITS, LIMBS, Sums, digits_of, pieces, window
from stablenum_jax._step.measure.norms import saturating_float32
from stablenum_jax._trees.leaves import real_parts

__all__ = ["leaf_sums"]

Array: TypeAlias = jax.Array
Axes: TypeAlias = tuple[int, ...]

_MOST = 2**31  # an int32 is below it
_WIDTHS = (8, 4, 2, 1)  # a digit of 16 bits is summed in parts of so many bits


def leaf_sums(leaves: Sequence[Any]) -> Sums:
    """Return the sum of squares of each leaf.

    A float64 element is rounded to float32 first, and saturates at its largest number. Other formats are
    exact in float32. Subnormal numbers count, although XLA's arithmetic flushes them to zero.

    Args:
        leaves: floating-point arrays of any shape, or None for a missing gradient.

    Returns:
        n rows, as (n,) and (n, LIMBS, DIGITS) int32.
    """
    rows = [_of_leaf(leaf) for leaf in leaves]
    return Sums(*(jnp.stack(column) for column in zip(*rows, strict=True)))


def _of_leaf(leaf: Any) -> Sums:
    if leaf is None or not jnp.size(leaf):
        return Sums(window(jnp.zeros((), jnp.int32), xp=jnp), jnp.zeros((LIMBS, DIGITS), jnp.int32))
    parts = [
        lax.bitcast_convert_type(saturating_float32(part), jnp.int32)
        for part in real_parts(jnp.atleast_1d(leaf))
    ]
    top = window(functools.reduce(jnp.maximum, map(_largest, parts)), xp=jnp)
    limbs = [_total([[piece] for piece in pieces(part, top, xp=jnp)]) for part in parts]
    # Of a complex leaf, the two parts are added up; a sum of two digits fits.
    return Sums(top, functools.reduce(jnp.add, limbs))


def _largest(bits: Array) -> Array:
    """Return the largest magnitude's bits.

    This is one reduction of two operands, those of positive and of negative elements: for a reduction of one
    integer operand XLA on a CPU would write the operand to memory first.
    """
    zero = jnp.zeros((), jnp.int32)
    positive, negative = jnp.maximum(bits, 0), jnp.where(bits < 0, bits & 0x7FFFFFFF, 0)
    found = lax.reduce(
        (positive, negative),
        (zero, zero),
        lambda a, b: (lax.max(a[0], b[0]), lax.max(a[1], b[1])),
        tuple(range(bits.ndim)),
    )
    return jnp.maximum(*found)


def _total(limbs: list[list[Array]]) -> Array:
    """Return the digits of each limb's sum over all elements, (LIMBS, DIGITS) int32.

    The limbs are lists of digits. As many axes as int32 allows are summed at once; that is all of them for up
    to 2**23 elements.
    """
    while limbs[0][0].ndim:
        limbs = _summed(limbs, _next_axes(limbs[0][0].shape))
    return jnp.stack([jnp.stack(limb) for limb in limbs])


def _next_axes(shape: tuple[int, ...]) -> Axes:
    """Return the axes to sum over first: as many elements as possible, such that parts of 8 bits fit; or the
    shortest axis, if none fits."""
    some = [axes for n in range(1, len(shape) + 1) for axes in itertools.combinations(range(len(shape)), n)]
    fitting = [axes for axes in some if _count(shape, axes) * 2 ** _WIDTHS[0] <= _MOST]
    if not fitting:
        return (min(range(len(shape)), key=shape.__getitem__),)
    return max(fitting, key=lambda axes: _count(shape, axes))


def _count(shape: tuple[int, ...], axes: Axes) -> int:
    return math.prod(shape[i] for i in axes)


def _summed(limbs: list[list[Array]], axes: Axes) -> list[list[Array]]:
    """Return the digits of the sums over some axes. One reduction reads the elements once for all limbs."""
    count = _count(limbs[0][0].shape, axes)
    width = next(w for w in _WIDTHS if w == 1 or count * 2**w <= _MOST)
    # The last of all digits is small, since it counts 2**32 units.
    shifts = [[range(0, 16, width) if i < DIGITS - 1 else (0,) for i, _ in enumerate(limb)] for limb in limbs]
    operands = [
        (digit >> shift) & (2**width - 1) if len(each) > 1 else digit
        for limb, by_digit in zip(limbs, shifts, strict=True)
        for digit, each in zip(limb, by_digit, strict=True)
        for shift in each
    ]
    found = iter(_reduced(operands, axes))
    return [_recombined([[(s, next(found)) for s in each] for each in by_digit]) for by_digit in shifts]


def _reduced(operands: list[Array], axes: Axes) -> Sequence[Array]:
    zeros = (jnp.zeros((), jnp.int32),) * len(operands)
    return lax.reduce(tuple(operands), zeros, lambda a, b: tuple(map(lax.add, a, b)), axes)


def _recombined(sums: list[list[tuple[int, Array]]]) -> list[Array]:
    """Return the digits of a number, from sums at bits of its digits: (bit, sum) by digit."""
    zero = jnp.zeros_like(sums[0][0][1])
    digits = [zero] * DIGITS
    for i, parts in enumerate(sums):
        for shift, part in parts:
            if i == DIGITS - 1:
                digits[i] = digits[i] + part
            else:
                digits[i] = digits[i] + ((part << shift) & 0xFFFF)
                digits[i + 1] = digits[i + 1] + (part >> (16 - shift))
    return digits_of(digits, xp=jnp)
