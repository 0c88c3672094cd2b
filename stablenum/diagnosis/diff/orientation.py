"""Choose among the layouts that fit a parameter by what both programs do with its axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stablenum.diagnosis.diff.axis_roles import Roles, apart
from stablenum.diagnosis.diff.origins import Joined, Origin, Piece, Source

__all__ = ["is_open", "oriented"]


def is_open(origin: Source) -> bool:
    """Return whether shapes leave a choice of layouts, in the whole or in a part."""
    if isinstance(origin, Joined):
        return any(map(is_open, origin.parts))
    return len(origin.ways) > 1


def oriented(
    origins: Mapping[str, Source],
    left: Mapping[str, Roles],
    right: Mapping[str, Roles],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Source]:
    """Return the origins with only those layouts in which both programs sum over the same axes.

    An origin of which that is not known, or which no layout makes alike, keeps all of them.

    Args:
        origins: by the name of the right parameter.
        left, right: the roles of the axes, by the names of the parameters.
        shapes: of the left parameters.
    """
    return {name: _oriented(origin, left, right.get(name, ()), shapes) for name, origin in origins.items()}


def _oriented(
    origin: Source, left: Mapping[str, Roles], right: Roles, shapes: Mapping[str, tuple[int, ...]]
) -> Source:
    if isinstance(origin, Joined):
        parts = []
        for part in origin.parts:
            stacked = len(part.shape) == len(origin.shape) - 1
            inner = (*right[: origin.axis], *right[origin.axis + 1 :]) if stacked else right
            parts.append(_oriented(part, left, inner, shapes))
        return replace(origin, parts=tuple(parts))
    if not isinstance(origin, Origin) or len(origin.ways) < 2 or not right:
        return origin
    roles, shape = _cut(origin.piece, left.get(origin.piece.name, ()), shapes[origin.piece.name])
    unlike = {way: apart(roles, right, way, (shape, origin.shape)) for way in origin.ways}
    possible = {way: found[1] for way, found in unlike.items() if found is not None and not found[0]}
    alike = [way for way, count in possible.items() if count == min(possible.values())]
    return replace(origin, axes=alike[0], others=tuple(alike[1:])) if alike else origin


def _cut(piece: Piece, roles: Roles, shape: tuple[int, ...]) -> tuple[Roles, tuple[int, ...]]:
    """Return the roles and the sizes of the axes that are left of a parameter."""
    for cut in piece.cuts:
        after = cut.axis + 1
        if cut.layer:
            roles, shape = (*roles[: cut.axis], *roles[after:]), (*shape[: cut.axis], *shape[after:])
        else:
            shape = (*shape[: cut.axis], cut.end - cut.begin, *shape[after:])
    return roles, shape
