"""A pytree as nested dicts of arrays and plain values, and back into the structure of another.

A guard's state becomes what ``guard_state_dict`` returns, so that it loads under other settings; a key of the
random number generator becomes its numbers and the name of its kind. Leaves that are no data, such as the
activation functions in modules of equinox, are not saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.errors import CheckpointError
from stablenum_jax._step.readout import guard_state_dict, load_guard_state_dict
from stablenum_jax._trees.names import Path, path_name
from stablenum_jax._trees.places import placed_like
from stablenum_jax._trees.state import is_guard

__all__ = ["as_dicts", "check_like", "is_array", "is_key", "leaves_of", "put_into"]

PyTree: TypeAlias = Any

_KEY_DATA, _KEY_IMPL = "key_data", "key_impl"
_EMPTY = "empty_array"
_PLAIN = (bool, int, float, complex, str, bytes)


def is_array(value: object) -> bool:
    """Return whether a value is an array that is saved as one."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def is_key(value: Any) -> bool:
    """Return whether a value is a typed key of the random number generator."""
    return is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def leaves_of(tree: PyTree) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Yield the path, the name and the value of each leaf that is saved; a guard's state is one.

    Raises:
        TypeError: the tree is traced.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_guard):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{path_name(path)} is traced: save and load outside jit, grad, vmap and scan.")
        if is_guard(leaf) or is_array(leaf) or isinstance(leaf, _PLAIN):
            keys = _keys(path)
            yield keys, ".".join(keys), leaf


def _keys(path: Path) -> tuple[str, ...]:
    """Return the keys under which a leaf is saved."""
    return tuple(path_name((key,)) for key in path) or (path_name(path),)


def as_dicts(tree: PyTree) -> dict[str, Any]:
    """Return nested dicts with what is saved of a tree: arrays, plain values, and guards' states as such.

    Raises:
        TypeError: the tree is traced.
        ValueError: two leaves have one path, or a guard's state is stacked.
    """
    nested: dict[str, Any] = {}
    for keys, name, leaf in leaves_of(tree):
        inner = nested
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        if not isinstance(inner, dict) or keys[-1] in inner:
            raise ValueError(f"the state has two leaves called {name}; rename one of them.")
        inner[keys[-1]] = _saved(leaf)
    return nested


def check_like(like: PyTree) -> None:
    """Check that a state can be loaded into the structure of another.

    Raises:
        TypeError: it is traced, or a guard in it is abstract.
    """
    for _, name, leaf in leaves_of(like):
        if is_guard(leaf) and any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(leaf)):
            raise TypeError(
                f"like must hold the guard's own arrays, which tell how it is set up; those of {name} are "
                "abstract. Make the rest abstract with jax.tree.map(f, state, is_leaf=lambda x: "
                "isinstance(x, stablenum_jax.typing.GuardOptState)), where f returns a GuardOptState "
                "unchanged."
            )


def _saved(leaf: Any) -> Any:
    if is_guard(leaf):
        return guard_state_dict(leaf)
    if is_key(leaf) and isinstance(leaf, jax.ShapeDtypeStruct):
        return {_KEY_DATA: jax.eval_shape(jax.random.key_data, leaf), _KEY_IMPL: ""}
    if is_key(leaf):
        return {_KEY_DATA: jax.random.key_data(leaf), _KEY_IMPL: str(jax.random.key_impl(leaf))}
    if is_array(leaf) and 0 in leaf.shape:  # which Orbax cannot write
        return {_EMPTY: list(leaf.shape), "dtype": leaf.dtype.name}
    return leaf


def put_into(like: PyTree, nested: Mapping[str, Any]) -> PyTree:
    """Return a tree with the structure, dtypes and shardings of ``like`` and the saved values.

    Args:
        like: a state of the training that goes on. Its arrays may be ``jax.ShapeDtypeStruct``, but for those
            of guards.
        nested: what :func:`as_dicts` returned.

    Raises:
        CheckpointError: a value is missing, or does not fit.
    """
    saved = dict(nested)

    def found(path: Any, leaf: Any) -> Any:
        if not (is_guard(leaf) or is_array(leaf) or isinstance(leaf, _PLAIN)):
            return leaf
        keys = _keys(path)
        return _restored(".".join(keys), leaf, _at(saved, keys))

    return jax.tree_util.tree_map_with_path(found, like, is_leaf=is_guard)


def _at(nested: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    inner: Any = nested
    for key in keys:
        if not isinstance(inner, Mapping) or key not in inner:
            raise CheckpointError(f"{'.'.join(keys)} is not in it")
        inner = inner[key]
    return inner


def _restored(name: str, like: Any, saved: Any) -> Any:
    if is_guard(like):
        return _restored_guard(name, like, saved)
    if is_key(like):
        return _restored_key(name, like, saved)
    if isinstance(saved, Mapping) and _EMPTY in saved:
        saved = np.zeros(saved[_EMPTY], jnp.dtype(saved["dtype"]))
    if not is_array(like):
        if is_array(saved) or isinstance(saved, Mapping):
            raise CheckpointError(f"{name} is a plain value here but not in the checkpoint")
        return saved
    if not is_array(saved):
        raise CheckpointError(f"{name} is an array here but not in the checkpoint")
    _check_fit(name, like, saved)
    return _placed(saved, like)


def _restored_guard(name: str, like: Any, saved: Any) -> Any:
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"{name} is a guard's state here but not in the checkpoint")
    try:
        loaded = load_guard_state_dict(like, saved)
    except ValueError as error:
        raise CheckpointError(f"the guard's state {name} does not fit: {error}") from error
    return jax.tree.map(placed_like, loaded, like)


def _restored_key(name: str, like: Any, saved: Any) -> Any:
    if not isinstance(saved, Mapping) or set(saved) != {_KEY_DATA, _KEY_IMPL}:
        raise CheckpointError(f"{name} is a random key here but not in the checkpoint")
    key = jax.random.wrap_key_data(jnp.asarray(saved[_KEY_DATA]), impl=saved[_KEY_IMPL])
    if key.dtype != like.dtype or key.shape != like.shape:
        raise CheckpointError(f"{name} is {key.dtype}{key.shape} there and {like.dtype}{like.shape} here")
    return placed_like(key, like)


def _check_fit(name: str, like: Any, saved: Any) -> None:
    kinds = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)
    alike = any(jnp.issubdtype(like.dtype, k) and jnp.issubdtype(saved.dtype, k) for k in kinds)
    if tuple(saved.shape) != tuple(like.shape) or not alike:
        raise CheckpointError(
            f"{name} is {saved.dtype}{tuple(saved.shape)} there and {like.dtype}{tuple(like.shape)} here"
        )


def _placed(saved: Any, like: Any) -> Any:
    """Return an array of the kind and dtype of ``like``, where it is."""
    if isinstance(saved, jax.Array):  # restored by Orbax, in its place
        return placed_like(saved.astype(like.dtype), like)
    with np.errstate(over="ignore"):  # what becomes inf is found when all values are looked at
        array = np.array(saved, dtype=like.dtype)
    if isinstance(like, (np.ndarray, np.generic)):
        return array[()] if isinstance(like, np.generic) else array
    weak = getattr(like, "weak_type", False) and not array.shape
    return placed_like(jnp.asarray(array.item()) if weak else jnp.array(array), like)
