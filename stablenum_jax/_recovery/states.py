"""The state of a training as a list of leaves, and back; objects of flax nnx are changed in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from stablenum_jax._trees.models import nnx_objects, with_objects
from stablenum_jax._trees.names import path_name

__all__ = ["flattened", "names_of", "put_back", "replaced"]

PyTree: TypeAlias = Any


def flattened(state: PyTree) -> tuple[list[Any], Any]:
    """Return the leaves of a state and its structure; the variables of nnx objects are leaves at the end."""
    objects = nnx_objects(state)
    if not objects:
        return jax.tree.flatten(state)
    from flax import nnx

    return jax.tree.flatten((with_objects(state, [None] * len(objects)), nnx.state(objects)))


def names_of(structure: Any) -> list[str]:
    """Return a name for each leaf of a structure that :func:`flattened` returned; no two are the same."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    names: dict[str, None] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(numbered):
        name, number = path_name(path), 1
        while name in names:  # a key may have a dot in it
            number += 1
            name = f"{path_name(path)}#{number}"
        names[name] = None
    return list(names)


def put_back(state: PyTree, leaves: Sequence[Any], structure: Any) -> PyTree:
    """Return a state of these leaves.

    Args:
        state: the present state, whose nnx objects get the variables, and stay in the tree.
        leaves: leaves that :func:`flattened` returned, or others like them.
        structure: what it returned with them.
    """
    objects = nnx_objects(state)
    tree = jax.tree.unflatten(structure, leaves)
    if not objects:
        return tree
    from flax import nnx

    rest, variables = tree
    nnx.update(objects, variables)
    return _with_objects_in(rest, state, objects)


def _with_objects_in(rest: PyTree, state: PyTree, objects: Sequence[Any]) -> PyTree:
    """Return ``rest``, which has None where ``state`` has its nnx objects, with these in their places."""
    numbered = with_objects(state, [_Place(i) for i in range(len(objects))])
    places = jax.tree.leaves(numbered, is_leaf=lambda node: isinstance(node, _Place) or node is None)
    leaves, structure = jax.tree.flatten(rest, is_leaf=lambda node: node is None)
    found = [
        objects[place.number] if isinstance(place, _Place) else leaf
        for place, leaf in zip(places, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, found)


class _Place:
    """The place of an nnx object in a state: a leaf, as JAX does not know it."""

    def __init__(self, number: int) -> None:
        self.number = number


def replaced(state: PyTree, change: Callable[[Any], Any], is_changed: Callable[[Any], bool]) -> PyTree:
    """Return the state with ``change(node)`` in place of each node for which ``is_changed`` holds."""
    new = jax.tree.map(lambda node: change(node) if is_changed(node) else node, state, is_leaf=is_changed)
    if not nnx_objects(state):
        return new
    # The tree above has new objects, whose variables the objects of the caller get.
    return put_back(state, *flattened(new))
