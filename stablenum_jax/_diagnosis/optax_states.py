"""Find the moments in an optimizer's state, by the names that optax gives them.

The leaves of the state may be anything: ``repair`` replaces each leaf by its number, which tells it where to
write the repaired leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax

from stablenum.diagnosis.audit import OPTAX_STATES, Role
from stablenum_jax._trees.names import path_name
from stablenum_jax._trees.state import GuardOptState, injects_hyperparams

__all__ = ["Group", "Part", "find_groups", "inner_state"]

PyTree: TypeAlias = Any


class Part(NamedTuple):
    """One leaf of the state.

    Attributes:
        entry: the field that contains the leaf, such as "nu".
        role: the role that the leaf has in the optimizer.
        leaf: the array, or what the caller put in its place.
    """

    entry: str
    role: Role
    leaf: Any


class Group(NamedTuple):
    """What one transformation keeps for one parameter.

    Attributes:
        parameter: the parameter's name.
        kind: the kind of the optimizer; "" for an unknown state.
        parts: the leaves.
        count: the leaf that counts steps, None if there is none.
        hyperparams: name -> leaf, of an ``optax.inject_hyperparams`` around the transformation.
    """

    parameter: str
    kind: str
    parts: tuple[Part, ...]
    count: Any
    hyperparams: Mapping[str, Any]


def inner_state(opt_state: PyTree) -> PyTree:
    """Return the optimizer's state in a flax ``TrainState`` or ``nnx.Optimizer``; else ``opt_state``
    itself."""
    known = type(opt_state).__module__.startswith("flax.") or hasattr(opt_state, "apply_gradients")
    return opt_state.opt_state if known and hasattr(opt_state, "opt_state") else opt_state


def find_groups(opt_state: PyTree, names: frozenset[str]) -> list[Group]:
    """Return what the state keeps for the parameters called ``names``, in the order of the state."""
    return list(_walk(inner_state(opt_state), names, {}))


def _walk(tree: PyTree, names: frozenset[str], hyperparams: Mapping[str, Any]) -> Iterator[Group]:
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_known):
        if isinstance(node, GuardOptState):
            continue  # the guard's history may contain infinities, and has no moments
        if injects_hyperparams(node):
            # The values are read as leaves, because flax.nnx wraps each array in a node.
            found = {
                name: leaves[0]
                for name, value in node.hyperparams.items()
                if len(leaves := jax.tree.leaves(value)) == 1
            }
            yield from _walk(node.inner_state, names, {**hyperparams, **found})
        elif type(node).__name__ in OPTAX_STATES and hasattr(node, "_fields"):
            yield from _of_node(node, names, hyperparams)
        else:
            name = _named(path_name(path), names)
            if name:
                entry = path_name(path)[: -len(name) - 1]
                part = Part(entry.rsplit(".", 1)[-1] or entry, Role.OTHER, node)
                yield Group(name, "", (part,), None, hyperparams)


def _is_known(node: object) -> bool:
    known = type(node).__name__ in OPTAX_STATES and hasattr(node, "_fields")
    return known or isinstance(node, GuardOptState) or injects_hyperparams(node)


def _of_node(node: Any, names: frozenset[str], hyperparams: Mapping[str, Any]) -> Iterator[Group]:
    kind, roles = OPTAX_STATES[type(node).__name__]
    parts: dict[str, list[Part]] = {}
    for field, role in roles.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(node, field, None)):
            parts.setdefault(_owner(path_name(path), names), []).append(Part(field, role, leaf))
    # Looked up by field name, because every tuple has a method called count.
    counting = next((field for field in ("count", "t") if field in node._fields), None)
    counts = [] if counting is None else jax.tree.leaves(getattr(node, counting))
    for parameter, found in parts.items():
        yield Group(parameter, kind, tuple(found), counts[0] if len(counts) == 1 else None, hyperparams)


def _owner(path: str, names: frozenset[str]) -> str:
    """Return the parameter that a path in a tree of moments leads to or through (SM3 keeps lists)."""
    parts = path.split(".")
    starts = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((start for start in starts if start in names), path)


def _named(path: str, names: frozenset[str]) -> str:
    """Return the parameter with the longest name that the path ends with; "" if there is none."""
    for i, character in enumerate(path):
        if character == "." and path[i + 1 :] in names:
            return path[i + 1 :]
    return ""
