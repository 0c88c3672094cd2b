"""Align the parameters of two programs in the order of their uses: one with one, one with several."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.diff.weights.origins import Cut, Joined, Origin, Piece, Source
from stablenum.diagnosis.diff.weights.parameter_uses import Use

__all__ = ["aligned", "any_of", "by_full_names", "cut_from", "likeness"]

# A matrix is put together from at most so many, such as the queries, keys and values of several heads.
# Chosen, not measured.
_MOST_PARTS = 16
# A parameter is compared with those of the other side that are no farther from its place in the order of uses
# than this and than the sides differ in length, so that the work grows with the number of parameters and not
# with its square. Chosen, not measured.
_BAND = 64
# To leave out two parameters costs more than the dearest pair, so that nothing that fits is left out.
_SKIP = 8.0
# Among matrices that multiply one value, names count for more than order: four of them cross six times at
# most, and a name without a word in common costs 2, as each of two teams of matrices that are exchanged
# would.
_CROSSED, _EXCHANGED = 0.1, 0.5
# So many matrices that multiply one value are tried in any order, of which there are 24: the queries, keys
# and values, and one more.
_MOST_IN_GROUP = 4
_APART = [{a, b} for a in ("matmul", "conv") for b in ("mul", "add")]
_Pair: TypeAlias = "tuple[Sequence[Use], Sequence[Use]]"
_Offer: TypeAlias = "Callable[[int, int, int, int, float, list[_Pair]], None]"


def aligned(left: Sequence[Use], right: Sequence[Use]) -> dict[str, Source]:
    """Return the origins of the parameters that have a counterpart in this order."""
    found = dict[str, Source]()
    for ours, theirs in _pairs(left, right)[1]:
        if len(ours) == len(theirs) == 1:
            found[theirs[0].name] = _whole(ours[0], theirs[0])
        elif len(ours) == 1:
            found.update(cut_from(ours[0], theirs))
        elif ours:
            found[theirs[0].name] = _joined(ours, theirs[0])
    return found


def any_of(use: Use, rest: Sequence[Use], all_of_them: Sequence[Use]) -> Source | None:
    """Return an origin out of order: the most alike of what is left over, else of all (tied weights)."""
    for candidates in (rest, all_of_them):
        fitting = [u for u in candidates if u.kind == use.kind and np.isfinite(_cost(u, use))]
        if fitting:
            return _whole(min(fitting, key=lambda u: _cost(u, use)), use)
    return None


def by_full_names(left: Sequence[Use], right: Sequence[Use]) -> dict[str, Origin] | None:
    """Return the origins of parameters that have the same full names, but for what the frameworks call them;
    None if names do not tell all."""
    mine = {use.words: use for use in left}
    whole = len(mine) == len(left) and len({use.words for use in right}) == len(right)
    pairs = [(mine.get(use.words), use) for use in right]
    if not whole or any(a is None or not np.isfinite(_cost(a, b)) for a, b in pairs):
        return None
    return {b.name: _whole(a, b) for a, b in pairs if a is not None}


def cut_from(whole: Use, parts: Sequence[Use | None], axis: int | None = None) -> dict[str, Source]:
    """Return the origins of parameters that are the parts of another one, one after another; None among
    them is a part that nothing takes, as large as the others."""
    known = [u for u in parts if u is not None]
    cuts = (
        _cuts(whole, known, axis) if len(known) == len(parts) else _equal_cuts(whole, len(parts), axis or 0)
    )
    found = dict[str, Source]()
    for use, cut in zip(parts, cuts or (), strict=False):
        shape = _cut_shape(whole.shape, cut)
        ways = layouts(shape, use.shape, use.kind) if use is not None else ()
        if use is not None and ways:
            piece = Piece(whole.piece.name, (*whole.piece.cuts, cut))
            found[use.name] = Origin(piece, use.shape, ways[0], ways[1:])
    return found


def _whole(mine: Use, use: Use) -> Origin:
    first, *others = layouts(mine.shape, use.shape, mine.kind)
    return Origin(mine.piece, use.shape, first, tuple(others))


def _joined(parts: Sequence[Use], whole: Use) -> Joined:
    cuts = _cuts(whole, parts) or []
    origins = []
    for use, cut in zip(parts, cuts, strict=True):
        shape = _cut_shape(whole.shape, cut)
        first, *others = layouts(use.shape, shape, whole.kind)
        origins.append(Origin(use.piece, shape, first, tuple(others)))
    return Joined(tuple(origins), whole.shape, cuts[0].axis)


def _pairs(left: Sequence[Use], right: Sequence[Use], *, teams: bool = True) -> tuple[float, list[_Pair]]:
    """Align two sequences at the least cost, which is returned, too: one with one, one with several, several
    with one, and with ``teams`` the matrices that multiply one value in any order."""
    n, m = len(left), len(right)
    best = np.full((n + 1, m + 1), np.inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int, list[_Pair] | None]] = {}

    def offer(i: int, j: int, a: int, b: int, cost: float, pairs: list[_Pair] | None = None) -> None:
        if best[i, j] + cost < best[i + a, j + b]:
            best[i + a, j + b] = best[i, j] + cost
            came[i + a, j + b] = (i, j, pairs)

    ends = (_team_ends(left), _team_ends(right)) if teams else ({}, {})
    width = _BAND + abs(n - m)
    for i in range(n + 1):
        for j in range(max(0, i - width), min(m, i + width) + 1):
            if i < n:
                offer(i, j, 1, 0, _SKIP)
            if j < m:
                offer(i, j, 0, 1, _SKIP)
            if i < n and j < m and best[i, j] < np.inf:
                offer(i, j, 1, 1, _cost(left[i], right[j]))
                for count in _counts(left[i], right[j : j + _MOST_PARTS]):
                    offer(i, j, 1, count, _cost_parts(left[i], right[j : j + count]))
                for count in _counts(right[j], left[i : i + _MOST_PARTS]):
                    offer(i, j, count, 1, _cost_parts(right[j], left[i : i + count]))
                if teams:
                    a, b = _group_size(left, i), _group_size(right, j)
                    offer(i, j, a, b, *_in_any_order(left[i : i + a], right[j : j + b]))
                    if i in ends[0] and j in ends[1]:
                        _offer_exchanged(left, right, (i, *ends[0][i]), (j, *ends[1][j]), offer)
    found, at = list[_Pair](), (n, m)
    while at != (0, 0):
        i, j, pairs = came[at]
        found += reversed(pairs or [(left[i : at[0]], right[j : at[1]])])
        at = (i, j)
    return float(best[n, m]), found[::-1]


def _group_size(uses: Sequence[Use], at: int) -> int:
    """Return how many uses from here on belong to a group; 0 within a group."""
    group = uses[at].group
    if at and uses[at - 1].group == group:
        return 0
    return next((k for k in range(1, len(uses) - at) if uses[at + k].group != group), len(uses) - at)


def _team_ends(uses: Sequence[Use]) -> dict[int, tuple[int, int]]:
    """Return, by where a team begins, where it ends and where the next one does; nothing for the last."""
    begins = [k for k in range(len(uses)) if not k or uses[k].team != uses[k - 1].team]
    bounds = [*begins, len(uses)]
    return {begin: (bounds[k + 1], bounds[k + 2]) for k, begin in enumerate(begins[:-1])}


def _in_any_order(left: Sequence[Use], right: Sequence[Use]) -> tuple[float, list[_Pair] | None]:
    """Return the least cost of the uses of a group in any order, and the pairs."""
    if (
        not left
        or not 1 < len(right) <= _MOST_IN_GROUP
        or sum(u.size for u in left) != sum(u.size for u in right)
    ):
        return float("inf"), None
    found = []
    for order in itertools.permutations(range(len(right))):
        cost, pairs = _pairs(left, [right[k] for k in order], teams=False)
        crossed = sum(a > b for a, b in itertools.combinations(order, 2))
        found.append((cost + _CROSSED * crossed, pairs))
    return min(found, key=lambda f: f[0])


def _offer_exchanged(
    left: Sequence[Use], right: Sequence[Use], a: tuple[int, int, int], b: tuple[int, int, int], offer: _Offer
) -> None:
    """Offer that two teams are computed in another order: the queries before the keys, or after them.

    Args:
        left, right: the uses.
        a, b: for each side, where a team begins, where the next one does, and where that ends.
        offer: takes the alignment and its cost.
    """
    teams = left[a[0] : a[1]], left[a[1] : a[2]]
    others = right[b[1] : b[2]], right[b[0] : b[1]]
    if all(_size(team) == _size(other) for team, other in zip(teams, others, strict=True)):
        first, pairs = _pairs(teams[0], others[0], teams=False)
        second, more = _pairs(teams[1], others[1], teams=False)
        offer(a[0], b[0], a[2] - a[0], b[2] - b[0], first + second + _EXCHANGED, [*pairs, *more])


def _size(uses: Sequence[Use]) -> int:
    return sum(u.size for u in uses)


def _counts(whole: Use, parts: Sequence[Use]) -> Iterator[int]:
    """Yield how many parts have the size of the whole."""
    size = 0
    for count, use in enumerate(parts[:_MOST_PARTS], 1):
        size += use.size
        if size == whole.size and count > 1:
            yield count
        if size >= whole.size or use.kind != whole.kind:
            return


def _cost(a: Use, b: Use) -> float:
    if a.size != b.size or not layouts(a.shape, b.shape, a.kind) or _is_other(a, b):
        return float("inf")
    # What they multiply counts most, then names, then the operation. Chosen, not measured.
    return 1.0 * (a.kind != b.kind) + 2.0 * (1 - likeness(a.words, b.words)) + 3.0 * a.unlike(b)


def _is_other(a: Use, b: Use) -> bool:
    """Return whether one is a matrix, and the other a gain or a bias that happens to be as large."""
    shapes = [sorted(n for n in use.shape if n != 1) for use in (a, b)]
    return {a.kind, b.kind} in _APART and shapes[0] != shapes[1]


def _cost_parts(whole: Use, parts: Sequence[Use]) -> float:
    if any(p.kind != whole.kind for p in parts) or _cuts(whole, parts) is None:
        return float("inf")
    unequal = len({p.size for p in parts}) > 1
    # The more parts, and the less equal, the more of a guess. Chosen, not measured.
    return 1.0 + 1.0 * unequal + 0.5 * len(parts) + 3.0 * max(whole.unlike(p) for p in parts)


def likeness(a: Sequence[str], b: Sequence[str]) -> float:
    """Return how much two names resemble each other, given their words, from 0 to 1."""
    first, second = set(a), set(b)
    return len(first & second) / max(len(first | second), 1)


def _cuts(whole: Use, parts: Sequence[Use], axis: int | None = None) -> list[Cut] | None:
    """Return how a parameter is cut into parts of these sizes; None if it cannot be."""
    shape = whole.shape
    for i in _axes(shape, parts) if axis is None else [axis]:
        across = whole.size // max(shape[i], 1)
        lengths = [p.size // max(across, 1) for p in parts]
        if sum(lengths) != shape[i] or not all(lengths) or (len(shape) > 2 and len(set(lengths)) > 1):
            continue
        ends = np.cumsum(lengths).tolist()
        count = len(parts)
        cuts = [Cut(ends[k] - n, ends[k], i, k, count) for k, n in enumerate(lengths)]
        if all(
            layouts(_cut_shape(shape, c), p.shape, p.kind) and layouts(p.shape, _cut_shape(shape, c), p.kind)
            for c, p in zip(cuts, parts, strict=True)
        ):
            return cuts
    return None


def _equal_cuts(whole: Use, count: int, axis: int) -> list[Cut] | None:
    length, rest = divmod(whole.shape[axis], max(count, 1))
    return None if rest else [Cut(i * length, (i + 1) * length, axis, i, count) for i in range(count)]


def _cut_shape(shape: Sequence[int], cut: Cut) -> tuple[int, ...]:
    return tuple(cut.end - cut.begin if i == cut.axis else n for i, n in enumerate(shape))


def _axes(shape: Sequence[int], parts: Sequence[Use]) -> list[int]:
    """Return the axes along which an array may be put together, the most likely one first: one that counts
    the parts, if it is not one of theirs."""
    own = len(shape) <= 2 and any(len(p.shape) == len(shape) for p in parts)
    exact = [i for i, n in enumerate(shape) if n == len(parts) and len(shape) > 1 and not own]
    ends = [0, len(shape) - 1] if shape and (len(shape) < 2 or shape[0] >= shape[-1]) else [len(shape) - 1, 0]
    return list(dict.fromkeys([*exact, *(ends if shape else []), *range(len(shape))]))
