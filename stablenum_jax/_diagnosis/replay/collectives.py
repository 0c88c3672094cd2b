"""What each shard of a group gets from a collective operation.

The rules compute with the arrays of all shards of a group, in the order of their indices along the axes of
the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CASTS", "Exchange", "axes_of", "exchange_of", "is_collective"]

# Primitives that only change in which shards a value is said to differ.
CASTS = frozenset({
    "pvary", "preduced", "pcast", "reduced_vary_cast_p", "reduced_vary_cast", "vary_unreduced_cast_p",
    "vary_unreduced_cast",
})  # fmt: skip

_Rule = Callable[[Sequence[Any], Mapping[str, Any]], "Exchange"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The result of a collective operation on a group of shards.

    Attributes:
        results: the different results, in the order in which they are made.
        sources: for each of them, the positions in the group of the shards whose values it is made of.
        taken: for each shard of the group, the position of its result.
        pieces: for each result, the pieces of the sources' values of which it is made; None if it is made of
            the values as they are.
    """

    results: Sequence[Any]
    sources: Sequence[tuple[int, ...]]
    taken: Sequence[int]
    pieces: Sequence[Sequence[Any]] | None = None


def axes_of(name: str, params: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the axes of the mesh that a collective operation goes over."""
    axes = params["axes"] if "axes" in params else params["axis_name"]
    axes = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    return tuple(a for a in axes if not isinstance(a, int))


def is_collective(name: str) -> bool:
    """Return whether a primitive exchanges values between shards."""
    return _plain(name) in _RULES


def exchange_of(name: str, group: Sequence[Any], params: Mapping[str, Any]) -> Exchange:
    """Return what the shards of a group get.

    Args:
        name: the name of the primitive.
        group: the operand of each shard.
        params: the parameters of the equation.

    Raises:
        NotImplementedError: the operation has a form that is not known here.
    """
    rule = _RULES[_plain(name)]
    groups = params.get("axis_index_groups")
    if groups is None:
        return rule(group, params)
    parts = [(members, rule([group[m] for m in members], params)) for members in map(list, groups)]
    return _joined(len(group), parts)


def _joined(size: int, parts: Sequence[tuple[list[int], Exchange]]) -> Exchange:
    results: list[Any] = []
    sources: list[tuple[int, ...]] = []
    pieces: list[Sequence[Any]] = []
    taken = [0] * size
    for members, part in parts:
        for at, member in enumerate(members):
            taken[member] = len(results) + part.taken[at]
        results += part.results
        sources += [tuple(members[i] for i in s) for s in part.sources]
        pieces += part.pieces or ()
    return Exchange(results, sources, taken, pieces or None)


def _plain(name: str) -> str:
    return name.removesuffix("_start").removesuffix("_invariant").removeprefix("unreduced_")


def _reduced(function: Callable[[Any, Any], Any], within: Callable[..., Any]) -> _Rule:
    def rule(group: Sequence[Any], params: Mapping[str, Any]) -> Exchange:
        axes = tuple(a for a in params.get("axes", ()) if isinstance(a, int))
        arrays = [within(np.asarray(x), axis=axes) if axes else np.asarray(x) for x in group]
        return _same_for_all(_folded(function, arrays), len(group))

    return rule


def _folded(function: Callable[[Any, Any], Any], arrays: Sequence[Any]) -> Any:
    total = arrays[0]
    with np.errstate(all="ignore"):
        for x in arrays[1:]:
            total = np.asarray(function(total, x)).astype(arrays[0].dtype)
    return total


def _add(a: Any, b: Any) -> Any:
    return np.logical_or(a, b) if a.dtype.kind == "b" else np.add(a, b)


def _same_for_all(result: Any, size: int) -> Exchange:
    return Exchange([result], [tuple(range(size))], [0] * size)


def _all_gather(group: Sequence[Any], params: Mapping[str, Any]) -> Exchange:
    arrays = [np.asarray(x) for x in group]
    join = np.concatenate if params["tiled"] else np.stack
    return _same_for_all(join(arrays, axis=params["all_gather_dimension"]), len(group))


def _reduce_scatter(group: Sequence[Any], params: Mapping[str, Any]) -> Exchange:
    axis, size = params["scatter_dimension"], len(group)
    rows = [np.split(np.asarray(x), size, axis=axis) for x in group]
    pieces = [[row[i] if params["tiled"] else np.squeeze(row[i], axis) for row in rows] for i in range(size)]
    results = [_folded(_add, p) for p in pieces]
    return Exchange(results, [tuple(range(size))] * size, range(size), pieces)


def _all_to_all(group: Sequence[Any], params: Mapping[str, Any]) -> Exchange:
    size = len(group)
    rows = [np.split(np.asarray(x), size, axis=params["split_axis"]) for x in group]
    pieces = [[row[i] for row in rows] for i in range(size)]
    results = [np.concatenate(p, axis=params["concat_axis"]) for p in pieces]
    return Exchange(results, [tuple(range(size))] * size, range(size), pieces)


def _ppermute(group: Sequence[Any], params: Mapping[str, Any]) -> Exchange:
    size = len(group)
    sent = {dst % size: src % size for src, dst in params["perm"]}
    first = np.asarray(group[0])
    results = [np.asarray(group[sent[i]]) if i in sent else np.zeros_like(first) for i in range(size)]
    return Exchange(results, [(sent[i],) if i in sent else () for i in range(size)], range(size))


def _broadcast(group: Sequence[Any], params: Mapping[str, Any]) -> Exchange:
    source = params["source"]
    return Exchange([np.asarray(group[source])], [(source,)], [0] * len(group))


_RULES: dict[str, _Rule] = {
    "psum": _reduced(_add, np.sum),
    "pmax": _reduced(np.maximum, np.max),
    "pmin": _reduced(np.minimum, np.min),
    "all_gather": _all_gather,
    "all_gather_reduced": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _broadcast,
}
