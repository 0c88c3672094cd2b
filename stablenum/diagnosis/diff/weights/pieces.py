"""Parameters cut into pieces, so that what one program keeps together can be compared with what the other one
keeps apart: the layers of a stack, and the columns of a matrix that multiplies several values at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stablenum.diagnosis.diff.weights.origins import Cut, Joined, Piece, Source
from stablenum.diagnosis.diff.weights.parameter_uses import Use

__all__ = ["columns_apart", "layers_apart", "put_together", "rows_apart"]

# No stack has more layers: a longer first axis is one of features. Chosen, not measured.
_MOST_LAYERS = 256
# A stack of layers has at least so many parameters, such as a matrix and a gain: sizes of one parameter show
# none.
_FEWEST = 2


def layers_apart(uses: Sequence[Use]) -> list[Use]:
    """Return the parameters that a loop takes row by row as single layers, layer by layer, and the other
    parameters as they are."""
    first = next((i for i, u in enumerate(uses) if u.layers), len(uses))
    stacked = [u for u in uses if u.layers]
    layers = max((u.layers for u in stacked), default=0)
    rows = [_layer(u, i) for i in range(layers) for u in stacked if i < u.layers]
    return [*uses[:first], *rows, *(u for u in uses[first:] if not u.layers)]


def rows_apart(uses: Sequence[Use]) -> list[Use]:
    """Return the rows of the parameters that have one row for each layer, as far as sizes tell: the number of
    layers is the first size that most parameters share. Nothing is returned if none do."""
    counts = Counter(u.shape[0] for u in uses if len(u.shape) > 1 and 1 < u.shape[0] <= _MOST_LAYERS)
    layers, shared = max(counts.items(), key=lambda item: item[1], default=(0, 0))
    if shared < _FEWEST:
        return []
    stacked = [u for u in uses if len(u.shape) > 1 and u.shape[0] == layers]
    return [_layer(u, i) for i in range(layers) for u in stacked]


def _layer(use: Use, i: int) -> Use:
    return _piece(use, Cut(i, i + 1, 0, i, use.shape[0], layer=True), use.shape[1:], (i,))


def columns_apart(uses: Sequence[Use]) -> list[Use]:
    """Return a piece for each value that a matrix multiplies, and the other parameters as they are."""
    found = []
    for use in uses:
        axis = next((i for i in (1, 0) if use.columns and use.shape[i : i + 1] == (sum(use.columns),)), None)
        if axis is None or len(use.shape) != 2 or len(use.columns) < 2:
            found.append(use)
            continue
        begin = 0
        for i, width in enumerate(use.columns):
            shape = tuple(width if k == axis else n for k, n in enumerate(use.shape))
            cut = Cut(begin, begin + width, axis, i, len(use.columns))
            found.append(_piece(use, cut, shape, (begin,)))
            begin += width
    return found


def _piece(use: Use, cut: Cut, shape: tuple[int, ...], place: tuple[int, ...]) -> Use:
    piece = Piece(use.piece.name, (*use.piece.cuts, cut))
    team, group = (*place, *use.team), (*place, *use.group)
    return replace(
        use, name=str(piece), shape=shape, piece=piece, team=team, group=group, columns=(), layers=0
    )


def put_together(
    pieces: Sequence[Use], origins: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Source]:
    """Return the origins of the parameters all of whose pieces have one."""
    of: dict[str, list[Use]] = {}
    for use in pieces:
        of.setdefault(use.piece.name, []).append(use)
    found = dict[str, Source]()
    for name, parts in of.items():
        if all(u.name in origins for u in parts):
            if len(parts) == 1 and not parts[0].piece.cuts:
                found[name] = origins[name]
            else:
                ordered = sorted(parts, key=lambda u: u.piece.cuts[0].begin)
                axis = ordered[0].piece.cuts[0].axis
                found[name] = Joined(tuple(origins[u.name] for u in ordered), shapes[name], axis)
    return found
