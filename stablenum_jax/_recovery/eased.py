"""``eased``: an optimizer whose steps can be made smaller for a while, without being compiled again."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from stablenum.norms.wide import join, recorded
from stablenum_jax._step.apply import multiply_leaves
from stablenum_jax._step.measure.norms import leaf_norms
from stablenum_jax._step.measure.over_axes import AxisName, contributions, norms_over_axes
from stablenum_jax._step.transform import check_axis_name, check_named_once
from stablenum_jax._trees.leaves import check_transformation, is_measurable

__all__ = ["EasedState", "eased", "is_eased"]

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any


class EasedState(NamedTuple):
    """The state of :func:`eased`.

    Attributes:
        rate: () float32, the factor on the updates; usually 1.
        clip_at: () float32, the largest norm of the gradients; 0 for any, as usually.
        inner: the optimizer's state.
    """

    rate: Array
    clip_at: Array
    inner: PyTree


def is_eased(node: object) -> bool:
    """Return whether a node of a pytree is the state of :func:`eased`."""
    return isinstance(node, EasedState)


def eased(
    inner: optax.GradientTransformation, *, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that :class:`stablenum_jax.Recovery` can take smaller steps for a while.

    After a rewind, the recovery may lower the learning rate and clip gradients more tightly
    (:class:`stablenum.typing.Response`). In optax, both are fixed in the compiled step. This wrapper keeps a
    factor on the updates and a largest norm of the gradients in its state, where the recovery sets them. As
    long as it does not, the updates are those of ``inner`` bit for bit. A factor on the updates acts as one
    on the learning rate does, for decoupled weight decay too.

    Args:
        inner: the optimizer, behind the guard:
            ``optax.chain(stablenum_jax.guard(), stablenum_jax.eased(optax.adamw(1e-3)))``.
        axis_name: as in :func:`stablenum_jax.guard`: under ``shard_map``, the axes along which gradients are
            sharded.

    Raises:
        TypeError: ``inner`` is not an optax transformation, or ``axis_name`` no name of an axis.
        ValueError: ``axis_name`` names an axis twice.

    Example:
        >>> tx = eased(optax.sgd(0.5))
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.zeros(2)}))
        >>> updates["w"], float(state.rate)
        (Array([-0.5, -0.5], dtype=float32), 1.0)
    """
    check_transformation("inner", inner)
    check_axis_name(axis_name)
    check_named_once(axis_name)
    wrapped = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> EasedState:
        return EasedState(jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32), wrapped.init(params))

    def update(
        grads: PyTree, state: EasedState, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, EasedState]:
        # The norm is computed only where it is needed.
        grads = lax.cond(
            state.clip_at > 0, lambda g: _clipped(g, state.clip_at, axis_name), lambda g: g, grads
        )
        updates, inner_state = wrapped.update(grads, state.inner, params, **extra)
        return _scaled(updates, state.rate), state._replace(inner=inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _scaled(updates: PyTree, rate: Array) -> PyTree:
    # Selected, because a device may flush the smallest numbers to zero even where it multiplies them by 1.
    return jax.tree.map(
        lambda new, old: jnp.where(rate == 1, old, new), multiply_leaves(updates, rate), updates
    )


def _clipped(grads: PyTree, clip_at: Array, axis_name: AxisName | None) -> PyTree:
    leaves = [x for path, x in jax.tree_util.tree_leaves_with_path(grads) if is_measurable(path, x)]
    norms = leaf_norms(leaves)
    if axis_name is not None:
        norms = norms_over_axes(
            norms._replace(value=norms.value * contributions(leaves, axis_name)), axis_name
        )
    norm = recorded(join(norms, xp=jnp), xp=jnp)
    return multiply_leaves(grads, jnp.where(norm > clip_at, clip_at / norm, jnp.ones_like(norm)))
