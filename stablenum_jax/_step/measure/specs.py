"""The specs of parameters: along which mesh axes each dimension is divided, as in ``shard_map``."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from stablenum.errors import bad_type
from stablenum_jax._trees.leaves import varying_axes
from stablenum_jax._trees.names import Path, path_name

__all__ = ["Specs", "axes_of", "check_axes", "check_specs", "entries", "specs_of", "whole_shape"]

PyTree: TypeAlias = Any
Specs: TypeAlias = dict[Path, PartitionSpec]  # what was given as ``specs``, by the place in the tree
Places: TypeAlias = tuple[tuple[Hashable, ...], ...]


def check_specs(specs: PyTree, axis_name: Hashable) -> Specs | None:
    """Check what can be checked without the parameters, and return the specs by their paths.

    Raises:
        TypeError: a leaf is no PartitionSpec.
        ValueError: there is no ``axis_name``; a spec names an axis twice, or leaves a dimension open.
    """
    if specs is None:
        return None
    if axis_name is None:
        raise ValueError(
            "specs must be None without axis_name; got specs for axis_name=None. Inside shard_map or pmap, "
            "pass axis_name too; under plain jit leave both out, norms of sharded arrays are global there."
        )
    by_path: Specs = dict(jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec))
    for path, spec in by_path.items():
        if not _is_spec(spec):
            raise bad_type(f"specs{jax.tree_util.keystr(path)}", "a jax.sharding.PartitionSpec", spec)
        _check_entries(path_name(path), spec)
    return by_path


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


def _check_entries(name: str, spec: PartitionSpec) -> None:
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
        raise ValueError(f"specs must say how each dimension is divided; got {spec} for {name!r}.")
    axes = axes_of(spec)
    if len(set(axes)) < len(axes):
        raise ValueError(f"specs must name each axis once in a spec; got {spec} for {name!r}.")


def entries(spec: PartitionSpec, ndim: int) -> Places:
    """Return, for each dimension, the axes along which it is divided; the last one counts fastest.

    Example:
        >>> entries(PartitionSpec("x", None, ("y", "z")), 4)
        (('x',), (), ('y', 'z'), ())
    """
    given = [() if one is None else one if isinstance(one, tuple) else (one,) for one in spec]
    return (*given, *[()] * (ndim - len(given)))


def axes_of(spec: PartitionSpec) -> list[Hashable]:
    """Return the axes along which any dimension is divided.

    Example:
        >>> axes_of(PartitionSpec("x", None, ("y", "z")))
        ['x', 'y', 'z']
    """
    return [name for entry in entries(spec, len(spec)) for name in entry]


def whole_shape(shape: Sequence[int], spec: PartitionSpec) -> tuple[int, ...]:
    """Return the shape of a parameter of which this device has a part of this shape."""
    divided = entries(spec, len(shape))
    return tuple(
        n * math.prod(lax.psum(1, name) for name in names) for n, names in zip(shape, divided, strict=True)
    )


def specs_of(
    specs: Specs, paths: Sequence[Path], leaves: Sequence[Any], *trees: PyTree
) -> tuple[PartitionSpec, ...]:
    """Return the spec of each parameter. A spec may stand for a subtree, as in ``shard_map``.

    Args:
        specs: as given to the guard.
        paths: the paths of the parameters.
        leaves: the parameters, or their gradients; None for a missing gradient.
        *trees: what else has places for which specs may be given: the gradients, the parameters.

    Raises:
        ValueError: a parameter has no spec, a spec no parameter, or more dimensions than its parameter.
    """
    found = []
    for path, leaf in zip(paths, leaves, strict=True):
        at = _place(specs, path)
        if at is None:
            raise ValueError(
                "specs must be a pytree of PartitionSpec with the structure of the parameters, or a prefix "
                f"of it, as the in_specs of shard_map; got none for {path_name(path)!r}."
            )
        spec = specs[at]
        if leaf is not None and len(spec) > jnp.ndim(leaf):
            raise ValueError(
                f"specs must divide dimensions that a parameter has; got {spec} for {path_name(path)!r}, "
                f"which has {jnp.ndim(leaf)} dimension(s)."
            )
        found.append(spec)
    known = {_place(specs, path) for path in (*paths, *(path for tree in trees for path in _places(tree)))}
    for path, spec in specs.items():
        if path not in known:
            raise ValueError(
                "specs must be a pytree of PartitionSpec with the structure of the parameters; got "
                f"{spec} for {path_name(path)!r}, where there is no parameter."
            )
    return tuple(found)


def _place(specs: Specs, path: Path) -> Path | None:
    """Return the path of the spec of a parameter: its own, or that of a subtree in which it is."""
    return next((path[:k] for k in range(len(path) + 1) if path[:k] in specs), None)


def _places(tree: PyTree) -> Iterator[Path]:
    """Yield the paths of all leaves, and of what stands where a leaf is left out."""

    def is_left_out(node: object) -> bool:
        return node is None or isinstance(node, optax.MaskedNode)

    for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_left_out):
        yield path


def check_axes(
    names: Sequence[str], specs: Sequence[PartitionSpec], *leaves: Sequence[Any], joined: Sequence[Hashable]
) -> None:
    """Check the axes that specs name, where they are bound.

    Only ``shard_map`` with its ``check_vma`` knows which axes a leaf varies over.

    Args:
        names: the parameters' names.
        specs: their specs.
        *leaves: their gradients, and their weights; () if they are not known.
        joined: the axes along which devices decide together.

    Raises:
        ValueError: an axis is not bound; a leaf varies over a joined axis that its spec does not name.
    """
    for i, (name, spec) in enumerate(zip(names, specs, strict=True)):
        for axis in axes_of(spec):
            _check_bound(name, spec, axis)
        for leaf in (part[i] for part in leaves if len(part)):
            varies = () if leaf is None else varying_axes(leaf)
            missing = [axis for axis in joined if axis in varies and axis not in axes_of(spec)]
            if missing:
                raise ValueError(
                    f"specs must name the axes along which a parameter is divided; got {spec} for {name!r}, "
                    f"which varies over {missing[0]!r}. Pass the in_specs of the parameter, and average "
                    "gradients of copies over the axis."
                )


def _check_bound(name: str, spec: PartitionSpec, axis: Hashable) -> None:
    try:
        lax.psum(1, axis)
    except NameError as error:
        raise ValueError(
            f"specs must name axes that shard_map or pmap binds around the training step; got {spec} for "
            f"{name!r}, and {axis!r} is not bound here."
        ) from error
