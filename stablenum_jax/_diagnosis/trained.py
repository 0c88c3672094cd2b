"""The trained leaves of whatever holds parameters, with names, and the way back from leaves to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum_jax._trees.names import path_name

__all__ = ["Trained", "is_floating_array"]

Array: TypeAlias = Any
PyTree: TypeAlias = Any


def is_floating_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, of JAX or NumPy, of real floating-point numbers."""
    return isinstance(leaf, (jax.Array, np.ndarray)) and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _as_it_is(x: Any) -> Any:
    return x


@dataclass(frozen=True, slots=True)
class Trained:
    """The floating-point parameters of a pytree or a model.

    Attributes:
        leaves: the arrays.
        names: their dotted names.
    """

    leaves: list[Array]
    names: list[str]
    _treedef: Any
    _rest: list[Any]
    _places: list[int]
    _wrap: Callable[[Any], Any]

    @classmethod
    def of(cls, params: PyTree, convert: Callable[[Any], Any] = _as_it_is) -> Trained:
        """Find the trained leaves.

        Args:
            params: a pytree, linen's whole dict of collections (of which ``"params"`` is trained), a
                flax.nnx module or state (of which ``nnx.Param`` is trained), or an Equinox module.
            convert: what is done with each array first.
        """
        wrap: Callable[[Any], Any] = _as_it_is
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and isinstance(params, nnx.Module):
            graph, params, rest = nnx.split(params, nnx.Param, ...)

            def merged(tree: PyTree) -> PyTree:
                # Each trace gets new variables, because a BatchNorm writes to its variables.
                return nnx.merge(graph, tree, jax.tree.map(lambda leaf: leaf, rest))

            wrap = merged
        paths, treedef = jax.tree_util.tree_flatten_with_path(params)
        collections = isinstance(params, Mapping) and isinstance(params.get("params"), Mapping)
        leaves, names, rest_of, places = [], [], [], []
        for i, (path, leaf) in enumerate(paths):
            rest_of.append(convert(leaf))
            name = path_name(path)
            if is_floating_array(leaf) and (not collections or name.startswith("params.")):
                leaves.append(convert(jnp.asarray(leaf)))
                names.append(name.removeprefix("params.") if collections else name)
                places.append(i)
        return cls(leaves, names, treedef, rest_of, places, wrap)

    def model(self, leaves: Sequence[Array]) -> PyTree:
        """Return what the leaves came from, with these leaves."""
        full = list(self._rest)
        for place, leaf in zip(self._places, leaves):
            full[place] = leaf
        return self._wrap(jax.tree_util.tree_unflatten(self._treedef, full))

    def tree(self, leaves: Sequence[Array]) -> PyTree:
        """Return a tree of these leaves only, None elsewhere: the parameters of an optimizer."""
        full: list[Any] = [None] * len(self._rest)
        for place, leaf in zip(self._places, leaves):
            full[place] = leaf
        return jax.tree_util.tree_unflatten(self._treedef, full)
