"""An optax state that goes on from where an optimizer of another program stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.diagnosis.diff.sides.play import COUNT, Moments
from stablenum_jax._diagnosis.optax_states import Group, find_groups
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.names import path_name

__all__ = ["continued"]

PyTree: TypeAlias = Any


def continued(state: PyTree, params: PyTree, names: Sequence[str], moments: Moments) -> PyTree:
    """Return an optax state with the arrays that ``moments`` gives; the others stay.

    Args:
        state: from ``optimizer.init(params)``.
        params: what the optimizer trains.
        names: the name of each floating-point leaf of ``params``, by which ``moments`` is asked.
        moments: gives the array of a parameter and a role, or None.
    """
    leaves, structure = jax.tree.flatten(state)
    paths = [p for p, x in jax.tree_util.tree_leaves_with_path(params) if is_floating(x)]
    by_path = {path_name(p): name for p, name in zip(paths, names, strict=True)}
    numbered = jax.tree.unflatten(structure, list(range(len(leaves))))
    for group in find_groups(numbered, frozenset(by_path)):
        for role, number in _places(group):
            found = moments(by_path.get(group.parameter, ""), role)
            if found is not None:
                own = leaves[number]
                leaves[number] = jnp.asarray(np.reshape(found, own.shape), own.dtype)
    return jax.tree.unflatten(structure, leaves)


def _places(group: Group) -> Iterator[tuple[str, int]]:
    """Yield the role and the number of each leaf, those of a role that two leaves have left out."""
    roles = [part.role for part in group.parts]
    for part in group.parts:
        if roles.count(part.role) == 1:
            yield str(part.role), part.leaf
    if group.count is not None:
        yield COUNT, group.count
