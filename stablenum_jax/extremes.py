"""Measuring elements: the largest, and how many of them float16 loses. Only for loss-scale rules that ask."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from stablenum_jax.measure import AxisName, real_parts, saturating_float32

__all__ = ["largest_element", "tiny_fraction"]

Array: TypeAlias = jax.Array


def largest_element(leaves: Sequence[Any], *, axis_name: AxisName | None = None) -> Array:
    """The largest magnitude of an element: () float32; of complex numbers that of either part.

    Args:
        leaves: floating-point arrays, or None for a missing gradient.
        axis_name: mesh axes along which the leaves are sharded.

    Returns:
        0 for no elements; a finite value beyond float32's range saturates there. Of leaves that are not
        finite it says nothing.

    Example:
        >>> largest_element([jnp.asarray([1.0, -4.0]), None])
        Array(4., dtype=float32)
    """
    largest = [saturating_float32(jnp.max(jnp.abs(part))) for part in _parts(leaves)]
    amax = functools.reduce(jnp.maximum, largest, jnp.zeros((), jnp.float32))
    return amax if axis_name is None else lax.pmax(amax, axis_name)


def tiny_fraction(leaves: Sequence[Any], bound: Array | float, *, axis_name: AxisName | None = None) -> Array:
    """Of the elements that are not 0 the fraction of at most ``bound``: () float32, 0 for none.

    Args:
        leaves: floating-point arrays, or None for a missing gradient. What is below float32's smallest
            normal number may count as 0, as XLA computes with it.
        bound: a magnitude, () float32 or a number.
        axis_name: mesh axes along which the leaves are sharded.

    Example:
        >>> tiny_fraction([jnp.asarray([0.0, 1e-9, 1.0]), None], 2.0**-24)
        Array(0.5, dtype=float32)
    """
    parts = _parts(leaves)
    # Whole numbers stay exact as long as they fit; beyond that seven digits have to do.
    dtype = jnp.int32 if sum(part.size for part in parts) < 2**31 else jnp.float32

    def count(chosen: list[Array]) -> Array:
        found = [jnp.sum(part, dtype=dtype) for part in chosen]
        total = functools.reduce(jnp.add, found, jnp.zeros((), dtype)).astype(jnp.float32)
        return total if axis_name is None else lax.psum(total, axis_name)

    nonzero = count([part != 0 for part in parts])
    tiny = count([(part != 0) & (jnp.abs(part) <= bound) for part in parts])
    return tiny / jnp.maximum(nonzero, 1.0)


def _parts(leaves: Sequence[Any]) -> list[Array]:
    present = [jnp.asarray(leaf) for leaf in leaves if leaf is not None and jnp.size(leaf)]
    return [part for leaf in present for part in real_parts(leaf)]
