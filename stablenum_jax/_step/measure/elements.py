"""Measure gradient elements for loss-scale rules: the largest, and how many float16 would lose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from stablenum_jax._step.measure.norms import saturating_float32
from stablenum_jax._trees.leaves import real_parts

__all__ = ["Elements", "elements", "largest_element"]

Array: TypeAlias = jax.Array


class Elements(NamedTuple):
    """What is counted of the elements: three () float32.

    Attributes:
        largest: the largest magnitude; for complex numbers, of either part. 0 if there are no elements; a
            finite value beyond float32's range saturates at the largest float32. Undefined for leaves that
            are not finite.
        nonzero: how many elements are not 0. Numbers below float32's smallest normal number may count as 0,
            because XLA may flush them to zero.
        few: how many of these are at most the bound.
    """

    largest: Array
    nonzero: Array
    few: Array

    @property
    def tiny(self) -> Array:
        """The fraction of the elements other than 0 that are at most the bound; 0 if all elements are 0."""
        return self.few / jnp.maximum(self.nonzero, 1.0)


def largest_element(leaves: Sequence[Any]) -> Array:
    """Return the largest magnitude of an element, as in :class:`Elements`.

    Args:
        leaves: floating-point arrays, or None for a missing gradient.

    Example:
        >>> largest_element([jnp.asarray([1.0, -4.0]), None])
        Array(4., dtype=float32)
    """
    return _maximum([jnp.max(jnp.abs(part)) for leaf in leaves for part in _parts(leaf)])


def elements(
    leaves: Sequence[Any], bound: Array | float, *, counted: Sequence[Array] | None = None
) -> Elements:
    """Return the largest magnitude, and how many elements are not 0, and how many of these at most ``bound``.

    Args:
        leaves: as for :func:`largest_element`.
        bound: a magnitude, () float32 or a number.
        counted: for each leaf, () bool: whether its elements are counted; None for yes.

    Example:
        >>> elements([jnp.asarray([0.0, 1e-9, -4.0]), None], 2.0**-24).tiny
        Array(0.5, dtype=float32)
    """
    found = [(i, _read_once(part, bound)) for i, leaf in enumerate(leaves) for part in _parts(leaf)]

    def total(which: int) -> Array:
        counts = [one[which].astype(jnp.float32) for _, one in found]
        if counted is not None:
            counts = [x * counted[i].astype(jnp.float32) for (i, _), x in zip(found, counts, strict=True)]
        return functools.reduce(jnp.add, counts, jnp.zeros((), jnp.float32))

    return Elements(_maximum([one[0] for _, one in found]), total(1), total(2))


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


def _maximum(largest: list[Array]) -> Array:
    return functools.reduce(jnp.maximum, map(saturating_float32, largest), jnp.zeros((), jnp.float32))


def _parts(leaf: Any) -> list[Array]:
    return real_parts(jnp.asarray(leaf)) if leaf is not None and jnp.size(leaf) else []
