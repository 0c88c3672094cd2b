"""Measure gradients: one L2 norm per leaf, safe for finite values of any size.

The norms answer three questions with one read: is anything non-finite, which parameter is it, and how far
to clip. Nothing is decided here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from stablenum.errors import bad_type
from stablenum.formats import FLOAT32_MAX
from stablenum.norms.wide import STEP, Wide, narrow, settle
from stablenum_jax._trees.leaves import real_parts

__all__ = [
    "SMALL",
    "leaf_norms",
    "norm_tangent",
    "ordinary_norms",
    "power_of_two",
    "replicated",
    "saturating_float32",
    "scalar_loss",
    "split",
    "with_room",
    "within_range",
]

Array: TypeAlias = jax.Array

# Below this largest norm, squares that flush to zero could matter: 2**32 elements of 2**-63 (whose
# squares are below float32's smallest normal number) have a norm of 2**-47.
SMALL = 2.0**-32

# Whether a leaf is float64 -> two factors for its elements: one if their sum of squares is above 1 (float32's
# largest number becomes 2**32), one if it is not (the smallest normal number becomes 2**-31). A float64 sum
# of squares flushes only where the norm is 0 in float32 anyway.
_FACTORS = {False: (2.0**-96, 2.0**95), True: (2.0**-600, 1.0)}


def leaf_norms(leaves: Sequence[Any]) -> Wide:
    """Return the L2 norm of each leaf.

    Squares are summed in float32 (float64 for float64 leaves). If a sum overflows, or is so small that
    squares may have flushed to zero, norms are computed again from leaves multiplied by a power of two that
    brings their squares into range (Blue 1978, doi 10.1145/355769.355771); this second read is inside one
    ``lax.cond`` and costs nothing unless it is needed.

    Args:
        leaves: floating-point arrays of any shape, or None for a missing gradient.

    Returns:
        (n,) float32 and (n,) int32: the norms are ``value * 2**power``, with a power above 0 only beyond
        float32's range. A norm is finite if and only if every element of the leaf is finite; NaN if the leaf
        holds NaN, else inf if it holds inf; 0 for None and for a leaf without elements. The norm of a leaf
        whose elements are below 1e-19 may be 0 if others are of ordinary size; this changes neither the joint
        norm nor a decision, nor a statistic: AdaGC leaves such norms out.

    Example:
        >>> leaf_norms([jnp.asarray([3e30, 4e30]), None]).value
        Array([5.e+30, 0.e+00], dtype=float32)
    """
    index = [i for i, leaf in enumerate(leaves) if leaf is not None and jnp.size(leaf)]
    zeros = ordinary_norms(jnp.zeros((len(leaves),), jnp.float32))
    if not index:
        return zeros
    present = [jnp.asarray(leaves[i]) for i in index]
    squares = [_sum_of_squares(leaf) for leaf in present]
    # With a float64 leaf, the whole stack is float64.
    naive = jnp.sqrt(jnp.stack(squares)).astype(jnp.float32)
    largest = jnp.max(naive)  # NaN if a norm is NaN, and then no comparison holds
    ordinary = (largest >= SMALL) & (largest <= FLOAT32_MAX)
    # One cond for the whole tree. Its operands are only read, so an ordinary step pays nothing for it. They
    # are the leaves themselves: a leaf cast to float32 outside the cond would be another array in memory.
    norms = lax.cond(ordinary, lambda: ordinary_norms(naive), lambda: _rescued_norms(present, squares))
    if len(index) == len(leaves):
        return norms
    return jax.tree.map(lambda zero, found: zero.at[jnp.asarray(index)].set(found), zeros, norms)


def ordinary_norms(norms: Array) -> Wide:
    """Return norms in float32's range."""
    # Unlike a bare constant, these zeros vary over the same mesh axes as the norms.
    zero = jnp.zeros((), jnp.int32)
    return Wide(norms, jnp.where(jnp.isnan(norms), zero, zero))


def norm_tangent(norm: Wide, x: Any, tangent: Any, axes: tuple[int, ...] | None = None) -> Array:
    """Return the tangent of the value of a norm, () float32, or of the norms of units, (u,).

    It is the product of the tangent and ``x / norm``, which is 0 where the norm is 0, not finite or beyond
    float32's range.

    Args:
        norm: the norm or norms.
        x: what they were computed from.
        tangent: the tangent of ``x``.
        axes: the axes that a unit extends over; None for all.
    """
    axes = tuple(range(jnp.ndim(x))) if axes is None else axes
    by_unit = [1 if axis in axes else n for axis, n in enumerate(jnp.shape(x))]
    regular = (norm.value > 0) & jnp.isfinite(norm.value) & (norm.power == 0)
    divisor = jnp.where(regular, norm.value, 1.0).reshape(by_unit)

    def part_of(part: Array, change: Array) -> Array:
        direction = jnp.where(regular.reshape(by_unit), part / divisor.astype(part.dtype), 0)
        return jnp.sum(direction * change, axis=axes)

    parts = map(part_of, real_parts(jnp.asarray(x)), real_parts(tangent))
    total = replicated(functools.reduce(jnp.add, parts)).reshape(jnp.shape(norm.value))
    return total.astype(jnp.float32)


def replicated(x: Array) -> Array:
    """Return ``x`` on all devices: on a mesh with explicit axes, gradients and weights may be sharded
    differently, and few arrays that are sharded can be reshaped."""
    sharding = jax.typeof(x).sharding
    return x if not any(sharding.spec) else jax.sharding.reshard(x, P(*[None] * x.ndim))


def saturating_float32(x: Any) -> Array:
    """Return ``x`` as float32; a finite value beyond float32's range becomes its largest number, not inf."""
    x = jnp.asarray(x)
    if x.dtype == jnp.float64:
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -FLOAT32_MAX, FLOAT32_MAX), x)
    return x.astype(jnp.float32)


def check_real_loss(name: str, value: Any) -> None:
    """Check that a loss is real: an array of real numbers, or a number. Only its dtype is looked at.

    Raises:
        TypeError: it is not.
    """
    try:
        if value is None:
            raise TypeError
        dtype = jnp.result_type(value)
    except (TypeError, ValueError):
        raise bad_type(name, "the loss, a real number", value) from None
    if jnp.issubdtype(dtype, jax.dtypes.extended) or jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{name} must be the loss, a real number; got dtype {dtype}. Take its real part first."
        )


def within_range(value: Any) -> Any:
    """Return a loss that JAX can hold. Without x64 it turns a number beyond float32's range into inf."""
    wide = isinstance(value, float) or getattr(value, "dtype", None) == np.float64
    if jax.config.jax_enable_x64 or not wide or not np.isfinite(value).all():
        return value
    return np.clip(value, -FLOAT32_MAX, FLOAT32_MAX) if (np.abs(value) > FLOAT32_MAX).any() else value


def scalar_loss(value: Any) -> Array | None:
    """Return the loss as () float32, or None.

    Raises:
        TypeError: ``value`` is not a real number.
        ValueError: ``value`` is not a scalar.
    """
    if value is None:
        return None
    check_real_loss("value", value)
    if jnp.shape(value) != ():
        raise ValueError(
            f"value must be the scalar loss of the step; got shape {jnp.shape(value)}. Take its mean or sum."
        )
    return saturating_float32(within_range(value))


def _sum_of_squares(leaf: Array, factor: Array | None = None) -> Array:
    parts = real_parts(leaf)
    scaled = parts if factor is None else [part * factor for part in parts]
    return functools.reduce(jnp.add, [jnp.sum(part * part) for part in scaled])


def _rescued_norms(leaves: list[Array], squares: list[Array]) -> Wide:
    """Return the norms of all leaves, where a sum of squares may have overflowed or flushed to zero.

    Each leaf is multiplied by one power of two, chosen by the leaf's own sum of squares, so the leaf is read
    once more, and XLA compiles one kernel for all leaves of a shape. A sum is enough: it is NaN if and only
    if an element is, and inf if and only if one is. A maximum would not be enough: over a sharded leaf it is
    an all-reduce, which may drop a NaN.
    """
    # XLA must not know that a leaf is a constant (a frozen parameter's gradient of zeros): it would turn
    # (0 f)(0 f) into 0 f^2, which is NaN where f^2 overflows.
    leaves = lax.optimization_barrier(leaves)
    factors = [_FACTORS[square.dtype == jnp.float64] for square in squares]
    again = jnp.stack(
        [
            _sum_of_squares(leaf, jnp.where(square > 1, *(jnp.asarray(x, square.dtype) for x in pair)))
            for leaf, square, pair in zip(leaves, squares, factors, strict=True)
        ]
    )
    naive = jnp.stack(squares)
    back = [
        jnp.asarray([1 / factor for factor in column], again.dtype) for column in zip(*factors, strict=True)
    ]
    roots, large = jnp.sqrt(again), naive > 1
    kept = (naive >= SMALL * SMALL) & jnp.isfinite(naive)
    norms = jnp.where(kept, jnp.sqrt(naive), roots * jnp.where(large, *back))
    beyond = large & jnp.isinf(norms) & jnp.isfinite(again)
    # The power by which a large leaf was divided; float64 leaves may have a norm beyond float64, too.
    exponents = [round(-math.log2(factor[0])) for factor in factors]
    rest = jnp.asarray([2.0 ** (e % STEP) for e in exponents], again.dtype)
    powers = jnp.asarray([e // STEP * STEP for e in exponents], jnp.int32)
    return split(jnp.where(beyond, roots * rest, norms), jnp.where(beyond, powers, jnp.zeros_like(powers)))


def with_room(scale: Array) -> tuple[Array, Array]:
    """Return the scale of a sum of parts, made smaller where the sum may be outside the format's range, and
    the power of two that was taken out."""
    power = jnp.where(scale >= 2.0**100, STEP, 0).astype(jnp.int32)
    return jnp.where(power > 0, scale * 2.0**-STEP, scale), power


def split(norms: Array, powers: Array) -> Wide:
    """Return norms ``norms * 2**powers`` in float32 or float64 as float32 and powers."""
    if norms.dtype == jnp.float64:
        return narrow(norms, powers, xp=jnp)
    return settle(norms, powers, xp=jnp)


def power_of_two(x: Array) -> tuple[Array, Array]:
    """Return the power of two at or below ``x``, and its inverse. Both are normal for any finite x >= 0.

    The power is taken from the exponent's bits, because log2 and exp2 would fail at 0 and inf and are not
    exact.
    """
    wide = x.dtype == jnp.float64
    stored, bias, integer = (52, 1023, jnp.int64) if wide else (23, 127, jnp.int32)
    within = jnp.clip(x, 2.0 ** (1 - bias), 2.0 ** (bias - 1))
    scale = lax.bitcast_convert_type(within, integer) & ((2 * bias + 1) << stored)
    # The exponents of a number and its inverse add up to twice the bias.
    inverse = ((2 * bias) << stored) - scale
    return lax.bitcast_convert_type(scale, x.dtype), lax.bitcast_convert_type(inverse, x.dtype)
