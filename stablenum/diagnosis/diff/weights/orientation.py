"""Choose among the layouts that fit a parameter by what both programs do with its axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stablenum.diagnosis.diff.weights.axis_roles import Roles, apart
from stablenum.diagnosis.diff.weights.origins import Joined, Origin, Piece, Source

__all__ = ["in_convention", "is_open", "oriented"]


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

    An origin keeps all of them if that is not known, or if no layout makes it so.

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


def in_convention(
    origins: Mapping[str, Source],
    left: Mapping[str, Roles],
    right: Mapping[str, Roles],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Source]:
    """Return the origins, but for a square matrix that the right program alone has the other way round the
    origin in which it lies as the others do.

    A port keeps its matrices in one way: it sums over the same axis of all that the left program uses in the
    same way. If it sums over the other axis of a square matrix, that one is transposed by mistake, unless the
    left program sums over that axis too. Laid out like the others, it shows as a difference.
    """
    axes = {
        name: _summed_over(
            *_cut(o.piece, left.get(o.piece.name, ()), shapes[o.piece.name]), right.get(name, ())
        )
        for name, o in origins.items()
        if isinstance(o, Origin) and len(o.shape) == 2
    }
    known = {name: found for name, found in axes.items() if found is not None}
    found = dict(origins)
    for name, (mine, theirs) in known.items():
        others = [b for other, (a, b) in known.items() if a == mine and other != name]
        odd = others.count(theirs) < len(others) - others.count(theirs)
        origin = origins[name]
        if isinstance(origin, Origin) and mine != theirs and odd and len(set(origin.shape)) == 1:
            found[name] = replace(origin, axes=(0, 1), others=())
    return found


def _summed_over(left: Roles, shape: tuple[int, ...], right: Roles) -> tuple[int, int] | None:
    """Return over which axis of a matrix each side sums; None for what is no matrix, or not known."""
    if len(shape) != 2:
        return None
    found = [[i for i, roles in enumerate(side) if roles == {"summed"}] for side in (left, right)]
    return (found[0][0], found[1][0]) if len(found[0]) == len(found[1]) == 1 else None


def _cut(piece: Piece, roles: Roles, shape: tuple[int, ...]) -> tuple[Roles, tuple[int, ...]]:
    """Return the roles and the sizes of the axes that are left of a parameter."""
    for cut in piece.cuts:
        after = cut.axis + 1
        if cut.layer:
            roles, shape = (*roles[: cut.axis], *roles[after:]), (*shape[: cut.axis], *shape[after:])
        else:
            shape = (*shape[: cut.axis], cut.end - cut.begin, *shape[after:])
    return roles, shape
