"""Carry the parameters of the left program over to the right one: which is which, and in which layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from stablenum.diagnosis.diff.weights.gates import apart, with_twins
from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.diff.weights.origins import Joined, Origin, Source
from stablenum.diagnosis.diff.weights.parameter_uses import Use
from stablenum.diagnosis.diff.weights.pieces import columns_apart, layers_apart, put_together, rows_apart
from stablenum.diagnosis.diff.weights.sequences import aligned, any_of
from stablenum.diagnosis.diff.weights.siblings import beside_their_matrices

__all__ = [
    "Apart", "Revision", "UnmappedError", "WeightMap", "guessed", "is_stack", "numbered", "stacks_apart",
    "stacks_apart_by_layers",
]  # fmt: skip

Revision: TypeAlias = "Callable[[dict[str, Source]], dict[str, Source]]"
Apart: TypeAlias = "Callable[[Sequence[Use]], list[Use]]"
# An error names so many parameters of each side, and shows an entry for so many. Chosen, not measured.
_MOST_LISTED, _MOST_ENTRIES = 8, 4
_Both: TypeAlias = "tuple[Sequence[Use], Sequence[Use]]"


class UnmappedError(ValueError):
    """Parameters of the two programs that do not correspond."""


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Right parameter -> where it comes from.

    Attributes:
        origins: by the name of the right parameter.
        by_trial: whether names and order did not tell, and the map is the one of several that fits best.
        carried: whether the right program is given these weights, or only its gradients are compared by them.
        shared: left parameter -> the right ones to which the caller gives it more than once, as to the table
            and the head of a model that does not tie them.
    """

    origins: Mapping[str, Source]
    by_trial: bool = False
    carried: bool = True
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the right side's arrays, given the left side's."""
        return {name: origin.of(arrays) for name, origin in self.origins.items()}


def guessed(
    left: Sequence[Use],
    right: Sequence[Use],
    *,
    alike: bool = False,
    rows_first: Apart | None = None,
    revised: Revision | None = None,
) -> WeightMap:
    """Return the map by the order of the first uses, sizes, kinds of operations, names and what is read.

    Args:
        alike: whether both programs are of one framework, where arrays usually have the same layout.
        rows_first: cuts matrices that are stacked, such as those of experts, by rows, which is then done
            before they are taken for several matrices side by side.
        revised: is given the origins before the layouts that are left open are chosen, and returns better
            ones.

    Raises:
        UnmappedError: a parameter of the right side has no counterpart.
    """
    origins: dict[str, Source] = {}
    rest_left, rest_right = list(left), list(right)
    for opened in (*_first(rows_first), *_OPENED) if rows_first is not None else _OPENED:
        mine, theirs = opened(rest_left, rest_right)
        found = aligned(mine, theirs)
        found.update(apart(_unused(mine, found), _missing(theirs, found), _parts_of(theirs, found)))
        more = put_together(theirs, found, {u.name: u.shape for u in right})
        origins.update(more)
        rest_left, rest_right = _unused(rest_left, more), _missing(rest_right, more)
        more = _as_many(rest_left, rest_right)
        origins.update(more)
        rest_left, rest_right = _unused(rest_left, more), _missing(rest_right, more)
    for use in list(rest_right):
        origin = any_of(use, rest_left, left)
        if origin is not None:
            origins[use.name] = origin
            rest_left = [u for u in rest_left if u.name not in origin.names]
            rest_right.remove(use)
    if rest_right:
        raise UnmappedError(_message(rest_right, rest_left, left))
    found = beside_their_matrices(with_twins(origins, left), left)
    found = found if revised is None else revised(found)
    return WeightMap(_in_one_way(_as_they_lie(found) if alike else found))


# How parameters are cut before they are compared: by the layers of a loop; then what is left over by rows,
# and by what a matrix multiplies.
_OPENED = (
    lambda left, right: (layers_apart(left), layers_apart(right)),
    lambda left, right: (left, rows_apart(right)),
    lambda left, right: (rows_apart(left), right),
    lambda left, right: (columns_apart(left), right),
    lambda left, right: (left, columns_apart(right)),
)


def _first(rows: Apart) -> tuple[Callable[[Sequence[Use], Sequence[Use]], _Both], ...]:
    return lambda left, right: (left, rows(right)), lambda left, right: (rows(left), right)


def stacks_apart(uses: Sequence[Use]) -> list[Use]:
    """Return the rows of stacked matrices, those of all layers together."""
    return rows_apart([u for u in uses if is_stack(u)])


def stacks_apart_by_layers(uses: Sequence[Use]) -> list[Use]:
    """Return the rows of stacked matrices, where those that are used one after the other and have the same
    numbers in their names belong to one layer."""
    runs = itertools.groupby(uses, key=lambda u: (is_stack(u), [w for w in u.words if w.isdigit()]))
    return [row for (stacked, _), run in runs if stacked for row in rows_apart(list(run))]


def is_stack(use: Use) -> bool:
    """Return whether a parameter may be several matrices, such as those of experts."""
    return use.kind == "matmul" and len(use.shape) > 2 and not use.layers


def numbered(mapped: WeightMap) -> int:
    """Return how many parameters are put together from parameters whose names differ in one number alone, as
    those of layers and experts do."""
    joined = [o for o in mapped.origins.values() if isinstance(o, Joined) and len(o.names) > 1]
    return sum(_differ_in_one_number([name.split(".") for name in o.names]) for o in joined)


def _differ_in_one_number(names: Sequence[Sequence[str]]) -> bool:
    if len({len(name) for name in names}) > 1:
        return False
    differing = [set(parts) for parts in zip(*names, strict=True) if len(set(parts)) > 1]
    return len(differing) == 1 and all(part.isdigit() for part in differing[0])


def _as_many(left: Sequence[Use], right: Sequence[Use]) -> dict[str, Source]:
    """Return the origins of matrices and kernels that were left over because they are used in another order,
    where both sides have as many of one shape."""
    found: dict[str, Source] = {}
    for key in dict.fromkeys(map(_shape_of, right)):
        mine, theirs = ([u for u in uses if _shape_of(u) == key] for uses in (left, right))
        if len(key[1]) > 1 and len(mine) == len(theirs):
            for a, b in zip(mine, theirs, strict=True):
                origin = any_of(b, [a], [])
                found.update({} if origin is None else {b.name: origin})
    return found


def _shape_of(use: Use) -> tuple[str, tuple[int, ...]]:
    return use.kind, tuple(sorted(n for n in use.shape if n != 1))


def _unused(left: Sequence[Use], origins: Mapping[str, Source]) -> list[Use]:
    """Return the uses that nothing was taken from."""
    taken = [piece for origin in origins.values() for piece in origin.pieces]
    return [u for u in left if not any(piece.lies_in(u.piece) for piece in taken)]


def _parts_of(right: Sequence[Use], origins: Mapping[str, Source]) -> dict[str, list[Use]]:
    """Return which parameters of the right side are the parts of one of the left side, in order."""
    found: dict[str, list[Use]] = {}
    for use in right:
        origin = origins.get(use.name)
        if isinstance(origin, Origin) and origin.piece.cuts:
            found.setdefault(str(replace(origin.piece, cuts=origin.piece.cuts[:-1])), []).append(use)
    return found


def _missing(right: Sequence[Use], origins: Mapping[str, Source]) -> list[Use]:
    return [u for u in right if u.name not in origins]


def _message(right: Sequence[Use], left: Sequence[Use], all_of_them: Sequence[Use]) -> str:
    named = ", ".join(f"{u.name} {list(u.shape)}" for u in right[:_MOST_LISTED])
    candidates = ", ".join(f"{u.name} {list(u.shape)}" for u in left[:_MOST_LISTED]) or "none"
    entries = {u.name: _fitting(u, left) or _fitting(u, all_of_them) for u in right[:_MOST_ENTRIES]}
    return (
        f"weights='match' finds no counterpart for these parameters of the right program: {named}. "
        f"Parameters of the left program that are left over: {candidates}. "
        f"Name what is missing beside the match, such as weights=('match', {entries}) with the left "
        "parameters that you mean, or None for one that keeps its own values. Or give all of them: "
        "weights={right name: left name}, or a function from the left arrays to the right ones; "
        "weights='as they are' leaves both alone."
    )


def _fitting(use: Use, left: Sequence[Use]) -> str | None:
    """Return the only left parameter that can be laid out as a right one; None if there are several."""
    fitting = [u.name for u in left if u.size == use.size and layouts(u.shape, use.shape, use.kind)]
    return fitting[0] if len(fitting) == 1 else None


def _as_they_lie(origins: Mapping[str, Source]) -> dict[str, Source]:
    """Leave the axes as they are where that fits, also those of square matrices and kernels."""
    return {name: o.laid(tuple(range(len(o.ways[0])))) if o.ways else o for name, o in origins.items()}


def _in_one_way(origins: Mapping[str, Source]) -> dict[str, Source]:
    """Lay square matrices out as the others are, where all others agree."""
    sure = {o.ways[0] for o in origins.values() if len(o.ways) == 1 and len(o.ways[0]) == 2}
    if len(sure) != 1:
        return dict(origins)
    (way,) = sure
    return {name: o.laid(way) for name, o in origins.items()}
