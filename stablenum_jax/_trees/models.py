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
    "first_state_of",
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

    An equinox module keeps its floating-point arrays; any other tree keeps its arrays and numbers, and has
    the ``nnx.Param`` of each object of flax nnx in its place.

    Args:
        model: the model, or its parameters, which are returned unchanged.
        grads: the gradients, if they are known. For an nnx object they say which variables are trained: those
            at their paths, of whatever kind. For other trees they are not used.

    Raises:
        ValueError: ``grads`` holds a variable that the nnx module does not have.
    """
    objects = nnx_objects(model)
    if objects:
        states = _trained_variables(objects, _parts_at_objects(model, grads))
        model = with_objects(model, states)
    keep = _is_floating_array if holds_equinox(model) else _is_data
    return jax.tree.map(lambda x: x if keep(x) or _is_state(x) else None, model, is_leaf=_is_state)


def with_parameters(model: PyTree, params: PyTree) -> PyTree:
    """Return the model with new parameters; objects of nnx are changed in place, and stay in the tree.

    Args:
        model: what was given to :func:`parameters`.
        params: a tree like the one it returned.
    """

    def put(old: Any, new: Any) -> Any:
        if not _is_object(old):
            return old if new is None else new
        from flax import nnx

        nnx.update(old, new)
        return old

    return jax.tree.map(put, model, params, is_leaf=lambda node: node is None or _is_object(node))


def first_state_of(model: PyTree) -> str:
    """Return the call that makes the state of an optimizer for a model, for a message."""
    if _is_object(model):
        return "tx.init(nnx.state(params, nnx.Param))"
    if holds_nnx(model):
        return "tx.init(params), where tx is stablenum_jax.chain(guard, optimizer)"
    if holds_equinox(model):
        return "tx.init(equinox.filter(params, equinox.is_inexact_array))"
    return "tx.init(params)"


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
    return nnx is not None and isinstance(node, nnx.Pytree)  # the base of modules, Rngs and Optimizer


def holds_equinox(tree: PyTree) -> bool:
    """Return whether a tree holds an equinox module, whose Python numbers are settings, not parameters."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return False

    def is_module(node: object) -> bool:
        return isinstance(node, equinox.Module)

    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _is_state(node: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.State)


def _parts_at_objects(model: PyTree, grads: PyTree) -> list[Any] | None:
    """Return the parts of ``grads`` at the places of the model's nnx objects; None if there are none."""
    places, structure = jax.tree.flatten(model, is_leaf=_is_object)
    try:
        parts = structure.flatten_up_to(grads)
    except (TypeError, ValueError):
        return None  # a tree of another structure
    found = [part for place, part in zip(places, parts, strict=True) if _is_object(place)]
    return found if all(map(_is_state, found)) else None


def _trained_variables(objects: list[Any], grads: list[Any] | None) -> list[Any]:
    """Return a state of the trained variables for each object: those with a gradient, or each ``nnx.Param``.

    A variable that two of the objects share belongs to the first, as in ``nnx.grad``.
    """
    from flax import nnx

    if grads is None:
        shares = nnx.state(objects, nnx.Param)
        return [shares.get(i, nnx.State({})) for i in range(len(objects))]
    return [_variables_at(*pair) for pair in zip(objects, grads, strict=True)]


def _variables_at(model: Any, grads: Any) -> Any:
    from flax import nnx

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
