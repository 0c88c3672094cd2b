"""Objects of flax nnx among the arguments of a function that is traced once per format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import jax

from stablenum_jax._precision.casts import in_dtypes_of
from stablenum_jax._precision.policy import Policy
from stablenum_jax._trees.models import nnx_objects, with_objects

__all__ = ["cast_arguments", "copied", "update_objects"]

PyTree: TypeAlias = Any
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def cast_arguments(policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Arguments]:
    """Give the arguments in the policy's formats.

    Of an nnx object only the parameters are cast, in a copy; what the body changes besides them is written
    back at the end.
    """
    objects = nnx_objects((args, kwargs))
    if not objects:
        yield _cast(policy, (args, kwargs))
        return
    from flax import nnx

    graph, params, rest = nnx.split(objects, nnx.Param, ...)
    narrow = nnx.State({i: policy.cast_to_compute(part) for i, part in params.items()})
    copies = nnx.merge(graph, narrow, rest, copy=True)
    marks = [_Mark() for _ in objects]
    cast = _cast(policy, with_objects((args, kwargs), marks))
    of_mark = dict(zip(marks, copies, strict=True))
    yield jax.tree.map(lambda leaf: of_mark[leaf] if isinstance(leaf, _Mark) else leaf, cast)
    before = nnx.state(objects, nnx.Not(nnx.Param))
    nnx.update(objects, in_dtypes_of(nnx.state(copies, nnx.Not(nnx.Param)), before))


class _Mark:
    """Holds the place of an object in a tree: a leaf that no cast changes."""


def _cast(policy: Policy, arguments: Arguments) -> Arguments:
    args, kwargs = arguments
    return tuple(map(policy.cast_to_compute, args)), policy.cast_to_compute(kwargs)


def copied(tree: PyTree) -> tuple[PyTree, Callable[[], PyTree]]:
    """Return the tree with copies of its nnx objects, and a function that returns their state but parameters.

    A function that is traced several times must not change the same objects each time.
    """
    objects = nnx_objects(tree)
    if not objects:
        return tree, lambda: None
    from flax import nnx

    copies = nnx.merge(*nnx.split(objects), copy=True)
    return with_objects(tree, copies), lambda: nnx.state(copies, nnx.Not(nnx.Param))


def update_objects(tree: PyTree, changed: PyTree) -> None:
    """Write what the function of :func:`copied` returned to the tree's own nnx objects."""
    objects = nnx_objects(tree)
    if objects:
        from flax import nnx

        nnx.update(objects, changed)
