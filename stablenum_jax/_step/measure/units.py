"""Measure the units of weights, in the one read of the gradients that gives the tensors' norms too.

This is for :class:`stablenum.AdaptiveGradClip`. Nothing is decided here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from stablenum.norms.wide import STEP, Wide, join, recorded
from stablenum.rules.clipping import Units
from stablenum_jax._step.measure.norms import (
    SMALL,
    ordinary_norms,
    power_of_two,
    replicated,
    split,
    with_room,
)
from stablenum_jax._trees.leaves import real_parts

__all__ = ["leaf_and_unit_norms"]

Array: TypeAlias = jax.Array
Axes: TypeAlias = tuple[int, ...]


def leaf_and_unit_norms(
    leaves: Sequence[Any], weights: Sequence[Any], axes: Sequence[Axes | None]
) -> tuple[Wide, Units]:
    """Return the L2 norm of each leaf, and of each unit of its gradient and of its weights.

    Norms are measured as by ``leaf_norms`` of ``norms``, also with a single ``lax.cond``: where a sum of
    squares overflows or may have flushed to zero, each unit is measured again from elements divided by a
    power of two near its largest.

    Args:
        leaves: floating-point arrays, or None for a missing gradient.
        weights: the parameters, of the same shapes; read where ``axes`` is not None.
        axes: for each leaf the axes that a unit extends over, None if it has no units.

    Returns:
        The (n,) norms as ``leaf_norms`` gives them, and the units' norms: (0,) where there are none. A norm
        is finite if and only if all elements are; it is NaN if one is, else inf. The norm of a unit may be 0
        if its elements are below 1e-19 and a tensor is of ordinary size.

    Example:
        >>> norms, units = leaf_and_unit_norms([jnp.asarray([[3.0], [4.0]])], [jnp.zeros((2, 1))], [(0,)])
        >>> norms.value, units.norms[0]
        (Array([5.], dtype=float32), Array([5.], dtype=float32))
    """
    index = [i for i, leaf in enumerate(leaves) if leaf is not None and jnp.size(leaf)]
    with_units = [i for i in index if axes[i] is not None]
    none = (ordinary_norms(jnp.zeros((0,), jnp.float32)),) * len(leaves)
    zeros = ordinary_norms(jnp.zeros((len(leaves),), jnp.float32))
    if not index:
        empty = tuple(one.value for one in none)
        return zeros, Units(empty, empty, tuple(one.power for one in none))
    whole = [axes[i] or tuple(range(jnp.ndim(leaves[i]))) for i in index]
    over = whole + [axes[i] or () for i in with_units]
    arrays = [jnp.asarray(leaves[i]) for i in index] + [jnp.asarray(weights[i]) for i in with_units]
    # Without the barrier XLA merges the units' sums into one sum over the tensor and computes both from the
    # squares, for which it then needs memory of the tensor's size.
    squares = lax.optimization_barrier(
        [_squares(real_parts(x), axis) for x, axis in zip(arrays, over, strict=True)]
    )
    totals = jnp.stack([jnp.sqrt(jnp.sum(x)).astype(jnp.float32) for x in squares])
    gradients = totals[: len(index)]
    rescue = (
        ~jnp.isfinite(gradients).all() | (jnp.max(gradients) < SMALL) | jnp.isinf(totals[len(index) :]).any()
    )

    def again() -> tuple[Wide, list[Wide]]:
        # The cast is inside the branch, because a leaf cast to float32 outside would be another array in
        # memory.
        opaque = lax.optimization_barrier(arrays)  # see _rescued_norms
        norms = [_scaled(real_parts(x), *one) for x, *one in zip(opaque, over, squares, strict=True)]
        joined = [join(x, xp=jnp) for x in norms[: len(index)]]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *joined), norms

    def as_they_are() -> tuple[Wide, list[Wide]]:
        plain = [ordinary_norms(jnp.sqrt(x).astype(jnp.float32)) for x in squares]
        return ordinary_norms(gradients), plain

    norms, found = lax.cond(rescue, again, as_they_are)
    if len(index) < len(leaves):
        norms = jax.tree.map(lambda zero, some: zero.at[jnp.asarray(index)].set(some), zeros, norms)
    of_gradients = dict(zip(index, found, strict=False))
    of_weights = dict(zip(with_units, found[len(index) :], strict=True))
    each = [of_gradients[i] if i in of_weights else none[i] for i in range(len(leaves))]
    weighed = [of_weights.get(i, none[i]) for i in range(len(leaves))]
    return norms, Units(
        tuple(one.value for one in each),
        tuple(recorded(one, xp=jnp) for one in weighed),
        tuple(one.power for one in each),
    )


def _squares(parts: list[Array], axes: Axes) -> Array:
    """Return (u,) sums of squares, in the precision of ``parts``."""
    squares = functools.reduce(jnp.add, [jnp.sum(part * part, axis=axes) for part in parts])
    return replicated(squares).ravel()


def _scaled(parts: list[Array], axes: Axes, squares: Array) -> Wide:
    """Return (u,) norms ``s sqrt(sum((x / s)^2))`` with s a power of two near the unit's largest element."""
    largest = functools.reduce(
        jnp.maximum, [jnp.max(jnp.abs(part), axis=axes, keepdims=True) for part in parts]
    )
    largest = replicated(largest)
    scale, inverse = power_of_two(largest)
    scale = scale.ravel()
    scale, powers = with_room(scale)
    norms = scale * jnp.sqrt(_squares([part * inverse for part in parts], axes))
    norms = jnp.where(jnp.isposinf(largest).ravel(), jnp.inf, norms)
    # A sum of squares is NaN if and only if an element is; a maximum may lose the NaN (see _rescued_norms).
    norms = jnp.where(jnp.isnan(squares), jnp.nan, norms)
    if norms.dtype == jnp.float64:  # narrow takes a power only for a norm beyond float32's range
        back = (powers > 0) & (norms < 2.0**600)
        norms, powers = jnp.where(back, norms * 2.0**STEP, norms), jnp.where(back, 0, powers)
    return split(norms, powers)
