"""Clip the optimizer's updates, before they are added to the parameters."""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

import stablenum
from stablenum.norms.wide import Wide, recorded
from stablenum_jax._step.apply import times
from stablenum_jax._step.derivatives import undefined_beyond, with_finite_slopes
from stablenum_jax._step.measure.norms import norm_tangent, ordinary_norms, saturating_float32
from stablenum_jax._step.measure.over_axes import AxisName, norms_over_axes
from stablenum_jax._trees.leaves import is_measurable, real_parts
from stablenum_jax._trees.names import Path
from stablenum_jax._trees.state import injects_hyperparams

__all__ = ["clip_updates", "injected_learning_rate"]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any


def clip_updates(
    rule: stablenum.ClipUpdateRMS, updates: PyTree, opt_state: PyTree, *, axis_name: AxisName | None = None
) -> PyTree:
    """Return the updates, each tensor multiplied by the rule's factor, in its own dtype.

    Args:
        rule: the rule.
        updates: what ``tx.update`` returned.
        opt_state: the state that ``tx.update`` returned, with the learning rate of this update in it.
        axis_name: mesh axes along which updates are sharded; the factors are then computed for the whole
            tensors, with one collective of its own.

    Raises:
        ValueError: the rule's limit is relative to the learning rate, and ``opt_state`` does not contain
            exactly one learning rate for all parameters.
    """
    rate = injected_learning_rate(opt_state) if rule.per_lr else 1.0
    leaves = {
        path: jnp.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates)
        if is_measurable(path, leaf) and jnp.size(leaf)
    }
    if not leaves:
        return updates
    rms = jnp.stack([_rms(leaf) for leaf in leaves.values()])
    if axis_name is not None:
        rms = with_finite_slopes(functools.partial(_joined, axis_name=axis_name))(rms)
    # Two, to be applied one after the other.
    factors = with_finite_slopes(functools.partial(rule.update_factors, xp=jnp))(rms, rate)
    factors = (undefined_beyond(factors[0], rms, rms, jnp.ones_like(rms)), factors[1])
    place = {path: i for i, path in enumerate(leaves)}

    def change(path: Path, leaf: Any) -> Any:
        if path not in place:
            return leaf
        changed = leaf = jnp.asarray(leaf)
        for factor in factors:
            own = factor[place[path]]
            changed = times(changed, own if leaf.dtype == factor.dtype else own.astype(jnp.float32))
        return changed.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(change, updates)


def injected_learning_rate(opt_state: PyTree) -> Array:
    """Return the learning rate that ``optax.inject_hyperparams`` keeps in the state: () float32.

    Raises:
        ValueError: there is none, or more than one, or the only one applies to some parameters only.
    """
    found = _injected(opt_state)
    shapes = {jnp.shape(rate) for rate, _ in found}
    if len(found) != 1:
        seen = f"{len(found)} of them"
    elif shapes != {()}:
        seen = f"one of shape {shapes.pop()}"
    elif found[0][1]:
        seen = "one below optax.partition or optax.masked, which applies to some parameters only"
    else:
        return jnp.asarray(found[0][0], jnp.float32)
    raise ValueError(
        "ClipUpdateRMS with per_lr=True must find exactly one learning_rate of optax.inject_hyperparams "
        f"in opt_state, for all parameters; got {seen}. Put inject_hyperparams around the whole optimizer, "
        "as in optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3), or limit the update itself: "
        "ClipUpdateRMS(max_rms, per_lr=False)."
    )


def _divides(node: object) -> bool:
    """Return whether the states inside cover some parameters only: the state of ``partition`` or
    ``masked``."""
    return isinstance(node, (optax.MultiTransformState, optax.MaskedState))


def _injected(opt_state: PyTree, *, partial: bool = False) -> list[tuple[Any, bool]]:
    """Return each learning rate found, and whether it is inside a state that divides the parameters."""
    found: list[tuple[Any, bool]] = []
    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: injects_hyperparams(node) or _divides(node)):
        if injects_hyperparams(node):
            # The values are read as leaves, because flax.nnx wraps each array in a node.
            found += [(rate, partial) for rate in jax.tree.leaves(node.hyperparams.get("learning_rate"))]
            # Injected optimizers may be nested, and each rate counts.
            found += _injected(node.inner_state, partial=partial)
        elif _divides(node):
            found += _injected(tuple(node), partial=True)
    return found


def _joined(rms: Array, *, axis_name: AxisName) -> Array:
    # All shards of a leaf have the same size. The values are divided first, so that the joint norm does not
    # overflow.
    parts = saturating_float32(rms) / jnp.sqrt(jnp.float32(lax.psum(1, axis_name)))
    return recorded(norms_over_axes(ordinary_norms(parts), axis_name), xp=jnp)


@jax.custom_jvp
def _rms(update: Array) -> Array:
    """Return the root mean square, () float32 or, of a float64 update, float64: not finite if and only if an
    element is not.

    One reduction of two operands computes two sums of squares: that of the elements, and that of the elements
    shrunk by a power of two, in case the first sum overflows. The second is finite for 2**47 finite elements.
    Squares that flush to zero belong to elements far below any limit.
    """
    parts = real_parts(update)
    shift = 2.0**768 if parts[0].dtype == jnp.float64 else 2.0**96
    sums = [_sums_of_squares(part, 1.0 / shift) for part in parts]
    plain, shrunk = (jnp.sqrt(functools.reduce(jnp.add, column)) for column in zip(*sums, strict=True))
    count = math.sqrt(update.size)
    large = jnp.minimum(shrunk / count * shift, jnp.finfo(plain.dtype).max)
    large = jnp.where(jnp.isfinite(shrunk), large, shrunk)
    rms = jnp.where(jnp.isfinite(plain), plain / count, large)
    return rms if rms.dtype == jnp.float64 else rms.astype(jnp.float32)


@_rms.defjvp
def _(args: Any, tangents: Any) -> tuple[Array, Array]:
    ((update,), (change,)) = args, tangents
    rms = _rms(update)
    norm = Wide(rms, jnp.zeros_like(rms, jnp.int32))
    return rms, norm_tangent(norm, update, change / update.size).astype(rms.dtype)


def _sums_of_squares(part: Array, factor: float) -> tuple[Array, Array]:
    """Return the sum of squares of all elements, and of all elements times ``factor``."""
    small, zero = part * factor, jnp.zeros((), part.dtype)
    plain, shrunk = lax.reduce(
        (part * part, small * small),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        tuple(range(part.ndim)),
    )
    return plain, shrunk
