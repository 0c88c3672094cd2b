"""Apply a decision to gradients: one multiplication, and a clamp if a rule has a bound for elements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

import stablenum
from stablenum.norms.wide import STEP
from stablenum_jax._trees.leaves import is_measurable, varying_axes, wide_dtype
from stablenum_jax._trees.names import Path

__all__ = [
    "apply_multiplier",
    "grads_or_negative_zeros",
    "in_promotable_dtype",
    "multiply_leaves",
    "negative_zeros",
    "negative_zeros_unless",
    "times",
    "zeros_unless",
]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any


def apply_multiplier(
    config: stablenum.GuardConfig,
    updates: PyTree,
    paths: Sequence[Path],
    decision: stablenum.Decision,
    shapes: Sequence[tuple[int, ...]],
) -> PyTree:
    """Return the gradients that the optimizer receives in an applied step.

    The computation is in float32 or wider. A leaf keeps its dtype, except under loss scaling, where float16
    and other narrow gradients become float32: unscaled, they would flush to zero in float16.

    Args:
        config: the guard's settings.
        updates: the gradients; returned unchanged if no setting changes gradients.
        paths: the paths of the watched gradients, in the order of their norms.
        decision: contains the multiplier, and the units' multipliers if a rule clips units.
        shapes: the shapes of the whole gradients, which say what a unit is; a device may have parts of them.
    """
    if not config.changes_gradients:
        return updates
    place = {path: i for i, path in enumerate(paths)}
    keep_dtype = config.loss_scale is None
    # Unscaling alone needs no factor below float32's smallest normal number.
    on_elements = stablenum.ClipByValue, stablenum.ClipUpdateRMS
    shrinks = config.shrinks_spikes or not all(isinstance(rule, on_elements) for rule in config.clip_rules)

    powers = functools.cache(functools.partial(_powers, decision.shift))

    def change(path: Path, leaf: Any) -> Any:
        if path not in place or not is_measurable(path, leaf):
            return leaf
        changed = jnp.asarray(leaf)
        i = place[path]
        for factor in _factors(config, decision, i, changed, shapes[i], powers if shrinks else None):
            changed = times(changed, factor)
        if config.max_value is not None:
            changed = _clamp(changed, config.max_value)
        return changed.astype(jnp.asarray(leaf).dtype) if keep_dtype else changed

    return jax.tree_util.tree_map_with_path(change, updates)


def _factors(
    config: stablenum.GuardConfig,
    decision: stablenum.Decision,
    i: int,
    leaf: Array,
    whole: tuple[int, ...],
    powers: Callable[[int], list[Array]] | None,
) -> list[Array]:
    """Return the factors on the i-th gradient, to be applied in this order: one per unit, one per tensor, or
    one for all gradients. ``powers`` gives those of the decision's shift; with None they are left out."""
    bits = jnp.finfo(leaf.dtype).bits
    of_units = decision.unit_multipliers[i] if decision.unit_multipliers else None
    if config.unit_rule is not None and of_units is not None and of_units.shape[0]:
        axes = config.unit_rule.unit_axes(whole, default="last")
        by_unit = config.unit_rule.unit_shape(leaf.shape, axes)
        return [part.reshape(by_unit) for part in (*_powers(decision.unit_shifts[i], bits), of_units)]
    all_of_them = [*([] if powers is None else powers(bits)), decision.multiplier]
    return [part[i] for part in all_of_them] if config.per_tensor else all_of_them


def _powers(shift: Array, bits: int) -> list[Array]:
    """Return numbers with the product ``2**shift``, which a format of 32 or 64 bits may not hold itself."""
    dtype, most = (jnp.float64, 15) if bits == 64 else (jnp.float32, 1)
    steps = [jnp.where(shift <= -STEP * n, 2.0**-STEP, 1.0).astype(dtype) for n in range(1, most + 3)]
    return [functools.reduce(jnp.multiply, part) for part in (steps[:most], steps[most : 2 * most])]


def multiply_leaves(grads: PyTree, factor: Array, *, widen: bool = False) -> PyTree:
    """Multiply all gradients by a () float32, in float32 or wider; with ``widen`` the results keep that
    dtype."""

    def change(path: Path, leaf: Any) -> Any:
        if not is_measurable(path, leaf):
            return leaf
        leaf = jnp.asarray(leaf)
        changed = times(leaf, factor)
        return changed if widen else changed.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(change, grads)


def in_promotable_dtype(updates: PyTree, grads: PyTree) -> PyTree:
    """Return updates that can be added to parameters of the gradients' dtypes.

    An update of a narrow gradient that was divided by the loss scale is float32, which JAX does not add to an
    8-bit number: such an update is rounded to the dtype of its gradient, which it has without a loss scale.
    """

    def change(update: Any, grad: Any) -> Any:
        narrow = is_measurable((), grad) and jnp.finfo(jnp.asarray(grad).dtype).bits <= 8
        return update.astype(grad.dtype) if narrow else update

    alike = jax.tree.structure(updates) == jax.tree.structure(grads)
    return jax.tree.map(change, updates, grads) if alike else updates


def zeros_unless(condition: Array, updates: PyTree) -> PyTree:
    """Return ``updates`` where the () bool ``condition`` holds, else zeros, selected and not multiplied."""

    def change(path: Path, leaf: Any) -> Any:
        return jnp.where(condition, leaf, jnp.zeros_like(leaf)) if is_measurable(path, leaf) else leaf

    return jax.tree_util.tree_map_with_path(change, updates)


def negative_zeros(updates: PyTree, grads: PyTree) -> PyTree:
    """Return updates that change nothing when added: ``x + -0.0`` is x bit for bit, ``-0.0 + 0.0`` is not.

    Args:
        updates: the shapes and dtypes of the updates.
        grads: the gradients; where one has the update's shape, the zeros are on the same devices and
            vary over the same mesh axes, unlike a bare constant.
    """

    def zeros(update: Any, grad: Any = None) -> Array:
        if not jnp.issubdtype(update.dtype, jnp.inexact):
            return jnp.zeros(update.shape, update.dtype)
        zero = complex(-0.0, -0.0) if jnp.issubdtype(update.dtype, jnp.complexfloating) else -0.0
        if not is_measurable((), grad) or jnp.shape(grad) != update.shape:
            return _varying_like(update, jnp.full(update.shape, zero, update.dtype))
        constant = jnp.asarray(zero, update.dtype)
        return jnp.where(jnp.isnan(grad), constant, constant)

    alike = jax.tree.structure(updates) == jax.tree.structure(grads)
    return jax.tree.map(zeros, updates, grads) if alike else jax.tree.map(zeros, updates)


def _varying_like(shape: Any, constant: Array) -> Array:
    """Return the constant as an array that varies over the mesh axes that ``shape`` varies over."""
    axes = tuple(varying_axes(shape))
    return jax.lax.pcast(constant, axes, to="varying") if axes else constant


def grads_or_negative_zeros(updates: PyTree, grads: PyTree) -> PyTree:
    """Return :func:`negative_zeros`, but the gradient itself where it has the update's shape and dtype.

    This is for the branch of a skip: XLA then writes the other branch's updates over the gradients and needs
    no memory for them. The caller has to apply :func:`negative_zeros_unless` afterwards.
    """
    zeros = negative_zeros(updates, grads)
    if jax.tree.structure(zeros) != jax.tree.structure(grads):
        return zeros

    def choose(zero: Array, grad: Any) -> Any:
        alike = getattr(grad, "dtype", None) == zero.dtype and jnp.shape(grad) == zero.shape
        return grad if alike and is_measurable((), grad) else zero

    return jax.tree.map(choose, zeros, grads)


def negative_zeros_unless(condition: Array, updates: PyTree) -> PyTree:
    """Return ``updates`` where the () bool ``condition`` holds, else -0.0, selected and not multiplied;
    integers are unchanged."""

    def change(update: Any) -> Any:
        if not is_measurable((), update):
            return update
        zero = complex(-0.0, -0.0) if jnp.iscomplexobj(update) else -0.0
        return jnp.where(condition, update, jnp.asarray(zero, update.dtype))

    return jax.tree.map(change, updates)


def times(leaf: Array, factor: Array) -> Array:
    """Return the product, computed in float32 or wider."""
    wide = wide_dtype(leaf.dtype)
    return leaf.astype(wide) * factor.astype(wide)


def _clamp(leaf: Array, bound: float) -> Array:
    if jnp.iscomplexobj(leaf):
        return jax.lax.complex(jnp.clip(leaf.real, -bound, bound), jnp.clip(leaf.imag, -bound, bound))
    return jnp.clip(leaf, -bound, bound)
