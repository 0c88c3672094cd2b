"""A call split into the arrays among its arguments, with names and roles, and the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stablenum_jax._diagnosis.replay.processes import gathered, spans_in
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.state import guard_leaves, numbered_guards

__all__ = ["Call", "Leaf", "at_hand", "call_of"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments.

    Attributes:
        guard: "scale" for the loss scale in a guard's state, "statistic" for any other array in such a state,
            "" for all other arrays.
        sharding: that of an array whose data was gathered from several processes.
    """

    data: Any
    role: str
    name: str
    differentiated: bool
    guard: str = ""
    sharding: Any = None


@dataclass(frozen=True, slots=True)
class Call:
    """``fun(*args, **kwargs)`` as a function of its arrays."""

    fun: Callable[..., Any]
    leaves: tuple[Leaf, ...]
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]

    def __call__(self, arrays: Sequence[Any]) -> Any:
        args, kwargs = self.rebuild(arrays)
        return self.fun(*args, **kwargs)


def call_of(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    argnums: tuple[int, ...],
    opt_state: Any = None,
) -> Call:
    """Split the arguments into arrays and the rest.

    Numbers, strings, functions and None become constants of the call; numbers among the parameters become
    arrays. A model of flax.nnx is split into its arrays and merged again inside the call, so the user's model
    is never changed.
    """
    tree = ([_split(a) for a in args], dict(kwargs))
    paths, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)
    guards = _in_guards(tree)
    fixed: list[Any] = []
    positions: list[int] = []
    leaves: list[Leaf] = []
    for index, (path, value) in enumerate(paths):
        number = path[1].idx if path[0].idx == 0 else None
        part = tree[0][number] if number is not None else None
        rest = isinstance(part, _Split) and path[2].name == "rest"
        differentiated = number in argnums and not rest
        whole = args[number] if number is not None else None
        fixed.append(value)  # an array is replaced in rebuild
        if not _goes_in(value, differentiated and not _is_equinox(whole)):
            continue
        guard = guards.get(jax.tree_util.keystr(path), "")
        role = (
            "buffer" if rest else "state" if guard else _role(path, value, differentiated, whole, opt_state)
        )
        leaves.append(
            Leaf(
                data=value if isinstance(value, jax.Array) else jnp.asarray(value),
                role=role,
                name=_name(path, part, number in argnums and len(argnums) == 1),
                differentiated=differentiated and is_floating(value),
                guard=guard,
            )
        )
        positions.append(index)

    def rebuild(arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = list(fixed)
        for position, array in zip(positions, arrays, strict=True):
            values[position] = array
        parts, named = jax.tree_util.tree_unflatten(structure, values)
        return tuple(_merged(p) for p in parts), named

    return Call(fun, tuple(leaves), rebuild)


def at_hand(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Return the leaves with the data of arrays that span several processes gathered in this one. All
    processes must do so."""
    return [
        replace(leaf, data=gathered(leaf.data), sharding=leaf.data.sharding) if spans_in(leaf.data) else leaf
        for leaf in leaves
    ]


def _is_empty(node: Any) -> bool:
    return node is None


def _goes_in(value: Any, numbers: bool) -> bool:
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return not (isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "OSUVMm")
    if isinstance(value, (float, complex)) and not isinstance(value, bool):
        return numbers or not np.isfinite(value)
    return False


def _role(path: tuple[Any, ...], value: Any, differentiated: bool, whole: Any, opt_state: Any) -> str:
    keys = [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
    if (whole is not None and (whole is opt_state or _is_optimizer_state(whole))) or "opt_state" in keys:
        return "state"
    if "batch_stats" in keys:
        return "buffer"
    if differentiated:
        return "parameter" if is_floating(value) else "buffer"
    return "input"


def _in_guards(tree: Any) -> dict[str, str]:
    """Return what the arrays of guards are, by path: a loss scale or a statistic."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    scales = {i for g in numbered_guards(tree) for i in jax.tree.leaves(g.scale)}
    return {paths[i]: "scale" if i in scales else "statistic" for i in guard_leaves(tree)}


def _is_optimizer_state(whole: Any) -> bool:
    def own(node: Any) -> bool:
        return hasattr(node, "_fields") and type(node).__module__.startswith(("optax", "stablenum_jax"))

    return any(own(n) for n in jax.tree.leaves(whole, is_leaf=own))


def _name(path: tuple[Any, ...], part: Any, bare: bool) -> str:
    text = jax.tree_util.keystr(path[3:] if isinstance(part, _Split) else path[2:]).removesuffix(".value")
    if path[0].idx == 1:
        return f"kwargs[{path[1].key!r}]{text}"
    if bare and text:
        return text
    return f"args[{path[1].idx}]{text}"


# --- flax.nnx and equinox, if the program uses them ------------------------------------------------------


def _is_equinox(whole: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(whole, equinox.Module)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class _Split:
    """An nnx model in parts: trained variables, other variables, and the graph definition."""

    definition: Any
    trained: Any
    rest: Any

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Return the two states."""
        key = jax.tree_util.GetAttrKey
        return ((key("trained"), self.trained), (key("rest"), self.rest)), self.definition

    @classmethod
    def tree_unflatten(cls, definition: Any, children: Any) -> _Split:
        """Return the inverse."""
        return cls(definition, *children)


def _split(arg: Any) -> Any:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(arg, nnx.Module):
        return arg
    return _Split(*nnx.split(arg, nnx.Param, ...))


def _merged(part: Any) -> Any:
    if not isinstance(part, _Split):
        return part
    return sys.modules["flax.nnx"].merge(part.definition, part.trained, part.rest)
