"""Measure gradient elements for loss-scale rules: the largest, and how many float16 would lose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from stablenum_jax._step.measure import AxisName, saturating_float32, shares
from stablenum_jax._trees.leaves import real_parts

__all__ = ["extremes", "largest_element"]

Array: TypeAlias = jax.Array


def largest_element(leaves: Sequence[Any], *, axis_name: AxisName | None = None) -> Array:
    """Return the largest magnitude of an element: () float32; for complex numbers, of either part.

    Args:
        leaves: floating-point arrays, or None for a missing gradient.
        axis_name: mesh axes along which the leaves are sharded.

    Returns:
        0 if there are no elements; a finite value beyond float32's range saturates at the largest float32.
        The result is undefined for leaves that are not finite.

    Example:
        >>> largest_element([jnp.asarray([1.0, -4.0]), None])
        Array(4., dtype=float32)
    """
    largest = [jnp.max(jnp.abs(part)) for part in _parts(leaves)]
    return _joint_maximum(largest, axis_name)


def extremes(
    leaves: Sequence[Any], bound: Array | float, *, axis_name: AxisName | None = None
) -> tuple[Array, Array]:
    """Return the largest magnitude, and the fraction of the elements other than 0 that are at most ``bound``.

    Args:
        leaves: as for :func:`largest_element`. Numbers below float32's smallest normal number may count as
            0, because XLA may flush them to zero.
        bound: a magnitude, () float32 or a number.
        axis_name: mesh axes along which the leaves are sharded.

    Returns:
        Two () float32; the fraction is 0 if all elements are 0.

    Example:
        >>> extremes([jnp.asarray([0.0, 1e-9, -4.0]), None], 2.0**-24)
        (Array(4., dtype=float32), Array(0.5, dtype=float32))
    """
    parts = _parts(leaves)
    found = [_read_once(part, bound) for part in parts]

    def total(counts: list[Array]) -> Array:
        if axis_name is not None:
            counts = [x * share for x, share in zip(counts, shares(parts, axis_name), strict=True)]
        count = functools.reduce(jnp.add, [x.astype(jnp.float32) for x in counts], jnp.zeros((), jnp.float32))
        return count if axis_name is None else lax.psum(count, axis_name)

    nonzero, tiny = total([one[1] for one in found]), total([one[2] for one in found])
    return _joint_maximum([one[0] for one in found], axis_name), tiny / jnp.maximum(nonzero, 1.0)


def _read_once(part: Array, bound: Array | float) -> tuple[Array, Array, Array]:
    """Return the largest magnitude, how many elements are not 0, and how many of those are at most ``bound``.

    This is one reduction of three operands: for three reductions XLA would write each operand to memory
    first.
    """
    # Counts are exact as integers; where they do not fit in int32, float32's seven digits are enough.
    dtype = jnp.int32 if part.size < 2**31 else jnp.float32
    size, nonzero = jnp.abs(part), part != 0
    zero = jnp.zeros((), dtype)
    largest, some, few = lax.reduce(
        (size, nonzero.astype(dtype), (nonzero & (size <= bound)).astype(dtype)),
        (jnp.zeros((), part.dtype), zero, zero),
        lambda a, b: (lax.max(a[0], b[0]), a[1] + b[1], a[2] + b[2]),
        tuple(range(part.ndim)),
    )
    return largest, some, few


def _joint_maximum(largest: list[Array], axis_name: AxisName | None) -> Array:
    joint = functools.reduce(jnp.maximum, map(saturating_float32, largest), jnp.zeros((), jnp.float32))
    return joint if axis_name is None else lax.pmax(joint, axis_name)


def _parts(leaves: Sequence[Any]) -> list[Array]:
    present = [jnp.asarray(leaf) for leaf in leaves if leaf is not None and jnp.size(leaf)]
    return [part for leaf in present for part in real_parts(leaf)]
