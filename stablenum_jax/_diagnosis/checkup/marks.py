"""Marks in a traced program: which values are parameters, losses, and gradients.

A mark is JAX's ``name`` primitive, which passes its operand on.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from stablenum_jax._diagnosis.replay.jax_internals import any_equation, sub_jaxpr
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.names import path_name

__all__ = [
    "CLIPPED",
    "CUSTOM",
    "GRADIENT",
    "LOSS",
    "PARAMETER",
    "STATE",
    "USED",
    "has_marks",
    "make_transposable",
    "mark",
    "read_mark",
]

_PREFIX = "stablenum: "
PARAMETER, LOSS, GRADIENT, USED, CLIPPED = "parameter", "loss", "gradient", "used", "clipped"
STATE, CUSTOM = "state", "custom"


def mark(tree: Any, kind: str) -> Any:
    """Return a tree whose traced floating-point leaves (of a state, all) are marked with their kind and their
    names."""

    def one(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.core.Tracer) or not (is_floating(leaf) or kind == STATE):
            return leaf
        return checkpoint_name(leaf, f"{_PREFIX}{kind} {path_name(path)}")

    return jax.tree_util.tree_map_with_path(one, tree)


def make_transposable() -> None:
    """Give marks the transpose that JAX's primitive lacks, since a script may transpose a function with marks
    in it."""
    primitive = jax.make_jaxpr(lambda x: checkpoint_name(x, _PREFIX))(0.0).eqns[0].primitive
    ad.primitive_transposes.setdefault(primitive, lambda cotangent, *_, **params: [cotangent])


def read_mark(eqn_params: Any) -> tuple[str, str] | None:
    """Return the kind and the name that an equation marks; None if it is no mark of ours."""
    name = eqn_params.get("name")
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return None
    kind, _, rest = name.removeprefix(_PREFIX).partition(" ")
    return kind, rest


def has_marks(closed: Any, kind: str) -> bool:
    """Return whether a closed jaxpr has a mark of this kind."""

    def marks(eqn: Any) -> bool:
        found = read_mark(eqn.params) if eqn.primitive.name == "name" else None
        return found is not None and found[0] == kind

    return any_equation(sub_jaxpr(closed)[0], marks)
