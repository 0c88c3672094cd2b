"""The parameters of a model that is given as it is: an equinox module, a flax nnx module, or any pytree.

A model holds more than parameters: functions, flags, rates, keys, statistics. The step and the gradients act
on the parameters alone, in a tree that has None (or, for nnx, nothing) in place of everything else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from stablenum_jax._trees.leaves import is_floating

__all__ = [
    "differentiable",
    "holds_nnx",
    "nnx_objects",
    "parameters",
    "watched_parameters",
    "with_objects",
    "with_parameters",
]

PyTree: TypeAlias = Any


def parameters(model: PyTree, grads: PyTree = None) -> PyTree:
    """Return the parameters of a model as a tree that an optimizer takes.

    An equinox module keeps its floating-point arrays and a flax nnx module gives its ``nnx.Param``; any other
    tree keeps its arrays and numbers.

    Args:
        model: the model, or its parameters, which are returned unchanged.
        grads: the gradients, if they are known. For an nnx module they say which variables are trained: those
            at their paths, of whatever kind. For other trees they are not used.

    Raises:
        ValueError: ``grads`` holds a variable that the nnx module does not have.
    """
    if is_nnx(model):
        return _nnx_variables(model, grads)
    keep = _is_floating_array if holds_equinox(model) else _is_data
    return jax.tree.map(lambda leaf: leaf if keep(leaf) else None, model)


def with_parameters(model: PyTree, params: PyTree) -> PyTree:
    """Return the model with new parameters; an nnx module is changed in place and returned.

    Args:
        model: what was given to :func:`parameters`.
        params: a tree like the one it returned.
    """
    if is_nnx(model):
        from flax import nnx

        nnx.update(model, params)
        return model
    return jax.tree.map(
        lambda old, new: old if new is None else new, model, params, is_leaf=lambda leaf: leaf is None
    )


def watched_parameters(params: PyTree) -> PyTree:
    """Return the parameters whose gradients an optimizer gets: of ``optax.lookahead``, the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def differentiable(arg: PyTree) -> PyTree:
    """Return what JAX can differentiate in an argument of a function, with None elsewhere.

    If JAX can differentiate all leaves, or none, the argument itself is returned, and JAX decides.
    """
    leaves = jax.tree.leaves(arg)
    if not holds_equinox(arg) and all(map(is_floating, leaves)):
        return arg
    if not any(map(_is_floating_array, leaves)):
        return arg
    return jax.tree.map(lambda leaf: leaf if _is_floating_array(leaf) else None, arg)


def is_nnx(tree: PyTree) -> bool:
    """Return whether a tree is a flax nnx module."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(tree, nnx.Module)


def holds_nnx(tree: PyTree) -> bool:
    """Return whether a tree holds an object of flax nnx, which a function that is called may change."""
    return bool(nnx_objects(tree))


def nnx_objects(tree: PyTree) -> list[Any]:
    """Return the modules and other objects of flax nnx in a tree; those inside one another count once."""
    return [node for node in jax.tree.leaves(tree, is_leaf=_is_object) if _is_object(node)]


def with_objects(tree: PyTree, objects: Sequence[Any]) -> PyTree:
    """Return the tree with other nnx objects in place of its own, in the order of :func:`nnx_objects`."""
    rest = iter(objects)
    return jax.tree.map(lambda node: next(rest) if _is_object(node) else node, tree, is_leaf=_is_object)


def _is_object(node: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, (nnx.Module, nnx.Rngs, nnx.Optimizer))


def holds_equinox(tree: PyTree) -> bool:
    """Return whether a tree holds an equinox module, whose Python numbers are settings, not parameters."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return False

    def is_module(node: object) -> bool:
        return isinstance(node, equinox.Module)

    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _nnx_variables(model: Any, grads: PyTree) -> PyTree:
    from flax import nnx

    if not isinstance(grads, nnx.State):
        return nnx.state(model, nnx.Param)
    state = dict(nnx.to_flat_state(nnx.state(model)))
    wanted = [path for path, _ in nnx.to_flat_state(grads)]
    unknown = [".".join(map(str, path)) for path in wanted if path not in state]
    if unknown:
        raise ValueError(
            f"grads must be gradients of variables of the {type(model).__name__} in params; it has no "
            f"{unknown[0]}. Pass what value_and_grad returned for this module."
        )
    return nnx.from_flat_state([(path, state[path]) for path in wanted])


def _is_data(leaf: object) -> bool:
    """Return whether a leaf is an array, a number or the shape of an array."""
    return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))


def _is_floating_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)) and is_floating(leaf)
