"""Measuring gradients: one L2 norm a leaf, safe for finite values of any size.

The norms answer three questions at the price of one read: is anything non-finite, which parameter
is it, and how far to clip. No policy lives here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from stablenum.formats import FLOAT32_MAX
from stablenum_jax.names import Path

__all__ = [
    "FP8_STATISTICS",
    "guarded_leaves",
    "is_measurable",
    "leaf_norms",
    "norms_over_axis",
    "saturating_float32",
]

Array: TypeAlias = jax.Array
AxisName: TypeAlias = Hashable | tuple[Hashable, ...]

# flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT: statistics that travel as "gradients" and replace
# the parameter instead of being added to it. They are no gradients, so nobody measures them.
FP8_STATISTICS = "_overwrite_with_gradient"

# Below this largest norm, squares that flush to zero could matter: 2**32 elements of 2**-63 (whose
# squares are below float32's smallest normal number) have a norm of 2**-47.
_SMALL = 2.0**-32


def is_measurable(path: Path, leaf: Any) -> bool:
    """Whether a leaf is a gradient: real or complex floating point, and no fp8 statistic.

    Integers, PRNG keys and float0 (JAX's gradient of an integer) are left alone.
    """
    if any(getattr(key, "key", None) == FP8_STATISTICS for key in path):
        return False
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return isinstance(leaf, (float, complex))
    return not jnp.issubdtype(dtype, jax.dtypes.extended) and bool(jnp.issubdtype(dtype, jnp.inexact))


def guarded_leaves(updates: Any, params: Any) -> dict[Path, Any]:
    """The gradients that a guard watches, by path; None for a parameter without gradient.

    With ``params`` there is an entry for each parameter, whether or not its gradient came, so that
    the n-th norm is always that of the n-th parameter.
    """
    given = {
        path: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(updates) if is_measurable(path, leaf)
    }
    if params is None:
        return given
    paths = [path for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_measurable(path, leaf)]
    if not set(given) <= set(paths):
        return given  # trees of different kinds: the gradients' own paths must do
    return {path: given.get(path) for path in paths}


def leaf_norms(leaves: Sequence[Any]) -> Array:
    """The L2 norm of each leaf.

    Squares are summed in float32 (float64 for float64 leaves). Where that overflows, or is so
    small that squares may have flushed to zero, all norms are taken again from leaves divided by
    a power of two near their largest element, as LAPACK's ``slassq`` does; this second read
    happens inside one ``lax.cond`` and costs nothing as long as it is not needed.

    Args:
        leaves: floating-point arrays of any shape, or None for a missing gradient.

    Returns:
        (n,) float32. Finite if and only if every element of the leaf is finite (a norm beyond
        float32's range saturates there); NaN if the leaf holds NaN, else inf if it holds inf;
        0 for None and for a leaf without elements.

    Example:
        >>> leaf_norms([jnp.asarray([3e30, 4e30]), None])
        Array([5.e+30, 0.e+00], dtype=float32)
    """
    index = [i for i, leaf in enumerate(leaves) if leaf is not None and jnp.size(leaf)]
    if not index:
        return jnp.zeros((len(leaves),), jnp.float32)
    present = [_real_parts(jnp.asarray(leaves[i])) for i in index]
    naive = jnp.stack([_naive_norm(parts) for parts in present])
    # One cond for the whole tree. Its operands are only read, so the hot path pays nothing for it.
    rescue = ~jnp.isfinite(naive).all() | (jnp.max(naive) < _SMALL)
    norms = lax.cond(rescue, lambda: jnp.stack([_scaled_norm(parts) for parts in present]), lambda: naive)
    if len(index) == len(leaves):
        return norms
    return jnp.zeros((len(leaves),), jnp.float32).at[jnp.asarray(index)].set(norms)


def norms_over_axis(norms: Array, axis_name: AxisName) -> Array:
    """The norms of leaves whose shards lie along a mesh axis, from the norms of the shards.

    Scaled by the largest shard's norm, so nothing overflows or flushes on the way.

    Args:
        norms: (n,) float32, this shard's.
        axis_name: the axis or axes of ``shard_map`` or ``pmap``.

    Returns:
        (n,) float32, the same on every shard; NaN if a shard has NaN, else inf if one has inf.
    """
    largest = lax.pmax(jnp.where(jnp.isfinite(norms), norms, 0.0), axis_name)
    infinite = lax.pmax(jnp.isinf(norms).astype(jnp.int32), axis_name) > 0
    missing = lax.pmax(jnp.isnan(norms).astype(jnp.int32), axis_name) > 0
    divisor = jnp.where(largest > 0, largest, 1.0)
    ratio = jnp.where(jnp.isfinite(norms), norms, 0.0) / divisor
    total = jnp.minimum(divisor * jnp.sqrt(lax.psum(ratio * ratio, axis_name)), FLOAT32_MAX)
    total = jnp.where(largest > 0, total, 0.0)
    return jnp.where(missing, jnp.nan, jnp.where(infinite, jnp.inf, total))


def saturating_float32(x: Any) -> Array:
    """``x`` as float32; a finite value beyond float32's range becomes its largest number, not inf."""
    x = jnp.asarray(x)
    if x.dtype == jnp.float64:
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -FLOAT32_MAX, FLOAT32_MAX), x)
    return x.astype(jnp.float32)


def _real_parts(x: Array) -> list[Array]:
    """``x`` in the precision in which it is summed: itself, or its real and imaginary part."""
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return [part if part.dtype == jnp.float64 else part.astype(jnp.float32) for part in parts]


def _naive_norm(parts: list[Array]) -> Array:
    return jnp.sqrt(sum(jnp.sum(part * part) for part in parts)).astype(jnp.float32)


def _scaled_norm(parts: list[Array]) -> Array:
    """``s sqrt(sum((x / s)^2))`` with s a power of two near the largest element."""
    # reduce_max propagates NaN, so a NaN wins over an inf.
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(part)) for part in parts]))
    scale, inverse = _power_of_two(largest)
    total = sum(jnp.sum((part * inverse) ** 2) for part in parts)
    norm = jnp.minimum(scale * jnp.sqrt(total), jnp.finfo(largest.dtype).max)
    return saturating_float32(jnp.where(jnp.isfinite(largest), norm, largest))


def _power_of_two(x: Array) -> tuple[Array, Array]:
    """A power of two within a factor of four of ``x`` > 0, and its inverse; both normal numbers.

    Taken from the exponent's bits: log2 and exp2 would fail at 0 and inf and are not exact.
    """
    bits, stored, integer = (64, 52, jnp.int64) if x.dtype == jnp.float64 else (32, 23, jnp.int32)
    top = 2 ** (bits - 1 - stored) - 1  # the exponent field of inf and NaN
    exponent = lax.bitcast_convert_type(x, integer) >> stored & top
    exponent = jnp.clip(exponent, 1, top - 2)
    return (
        lax.bitcast_convert_type(exponent << stored, x.dtype),
        lax.bitcast_convert_type(top - 1 - exponent << stored, x.dtype),
    )
