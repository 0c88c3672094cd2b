"""Carry the parameters of the left program over to the right one: which is which, and in which layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.gates import apart, stacked, with_twins
from stablenum.diagnosis.diff.layouts import layouts
from stablenum.diagnosis.diff.origins import Gathered, Origin
from stablenum.diagnosis.diff.parameter_uses import Use

__all__ = ["UnmappedError", "WeightMap", "guessed"]

_MOST_PARTS = 16
_SKIP = 8.0


class UnmappedError(ValueError):
    """Parameters of the two programs that do not correspond."""


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Right parameter -> where it comes from."""

    origins: Mapping[str, Origin | Gathered]

    def of(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the right side's arrays, given the left side's."""
        return {name: origin.of(arrays) for name, origin in self.origins.items()}

    def with_origin(self, name: str, origin: Origin) -> WeightMap:
        """Return the map with another origin of one parameter."""
        return WeightMap({**self.origins, name: origin})

    def swapped(self, a: str, b: str) -> WeightMap:
        """Return the map with the origins of two parameters of one shape exchanged."""
        return WeightMap({**self.origins, a: self.origins[b], b: self.origins[a]})


def guessed(left: Sequence[Use], right: Sequence[Use]) -> WeightMap:
    """Return the map by the order of the first uses, sizes, kinds of operations and names.

    Raises:
        UnmappedError: a parameter of the right side has no counterpart.
    """
    origins: dict[str, Origin] = {}
    rest_left, rest_right = [], []
    for ours, theirs in _aligned(left, right):
        if ours and theirs:
            origins.update(_origins(ours, theirs))
        rest_left += ours if not theirs else []
        rest_right += theirs if not ours else []
    for rule in (stacked, apart):
        more = rule(rest_left, rest_right)
        origins.update(more)
        used = {name for origin in more.values() for name in origin.names}
        rest_right = [u for u in rest_right if u.name not in more]
        rest_left = [u for u in rest_left if u.name not in used]
    for use in list(rest_right):
        origin = _of_any(use, rest_left, left)
        if origin is not None:
            origins[use.name] = origin
            rest_left = [u for u in rest_left if u.name not in origin.names]
            rest_right.remove(use)
    if rest_right:
        raise UnmappedError(_message(rest_right, rest_left))
    return WeightMap(_in_one_way(with_twins(origins, left)))


def _message(right: Sequence[Use], left: Sequence[Use]) -> str:
    named = ", ".join(f"{u.name} {list(u.shape)}" for u in right[:8])
    candidates = ", ".join(f"{u.name} {list(u.shape)}" for u in left[:8]) or "none"
    return (
        f"weights='match' finds no counterpart for these parameters of the right program: {named}. "
        f"Parameters of the left program that are left over: {candidates}. "
        "Give weights={right name: left name}, or a function from the left arrays to the right ones; "
        "weights='as they are' leaves both alone."
    )


def _aligned(left: Sequence[Use], right: Sequence[Use]) -> list[tuple[list[Use], list[Use]]]:
    """Align two sequences of parameters: one with one, one with several, several with one."""
    n, m = len(left), len(right)
    best = np.full((n + 1, m + 1), np.inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}

    def offer(i: int, j: int, a: int, b: int, cost: float) -> None:
        if i + a <= n and j + b <= m and best[i, j] + cost < best[i + a, j + b]:
            best[i + a, j + b] = best[i, j] + cost
            came[i + a, j + b] = (i, j)

    for i in range(n + 1):
        for j in range(m + 1):
            if not np.isfinite(best[i, j]):
                continue
            offer(i, j, 1, 0, _SKIP)
            offer(i, j, 0, 1, _SKIP)
            if i < n and j < m:
                offer(i, j, 1, 1, _cost(left[i], right[j]))
                for count in range(2, _MOST_PARTS + 1):
                    offer(i, j, 1, count, _cost_parts(left[i], right[j : j + count], count))
                    offer(i, j, count, 1, _cost_parts(right[j], left[i : i + count], count))
    found, at = [], (n, m)
    while at != (0, 0):
        i, j = came[at]
        found.append((list(left[i : at[0]]), list(right[j : at[1]])))
        at = (i, j)
    return found[::-1]


def _cost(a: Use, b: Use) -> float:
    if a.size != b.size or not layouts(a.shape, b.shape, a.kind):
        return float("inf")
    return 1.0 * (a.kind != b.kind) + 2.0 * (1 - _likeness(a.words, b.words))


def _cost_parts(whole: Use, parts: Sequence[Use], count: int) -> float:
    if len(parts) < count or any(p.size * count != whole.size for p in parts):
        return float("inf")
    if any(p.kind != whole.kind for p in parts) or _split_axis(whole.shape, count) is None:
        return float("inf")
    return 1.0 + 0.5 * count


def _split_axis(shape: Sequence[int], count: int) -> int | None:
    """Return the axis along which an array is likely to be put together from parts: the first or the last."""
    if shape and shape[0] % count == 0 and (len(shape) < 2 or shape[0] >= shape[-1]):
        return 0
    if shape and shape[-1] % count == 0:
        return len(shape) - 1
    return 0 if shape and shape[0] % count == 0 else None


def _likeness(a: Sequence[str], b: Sequence[str]) -> float:
    first, second = set(a), set(b)
    return len(first & second) / max(len(first | second), 1)


def _origins(ours: Sequence[Use], theirs: Sequence[Use]) -> dict[str, Origin]:
    if len(ours) == len(theirs) == 1:
        (a,), (b,) = ours, theirs
        first, *others = layouts(a.shape, b.shape, a.kind)
        return {b.name: Origin((a.name,), b.shape, first, others=tuple(others))}
    if len(ours) == 1:
        whole, count = ours[0], len(theirs)
        axis = _split_axis(whole.shape, count) or 0
        piece = tuple(n // count if i == axis else n for i, n in enumerate(whole.shape))
        found = {}
        for i, use in enumerate(theirs):
            ways = layouts(piece, use.shape, use.kind)
            if ways:
                found[use.name] = Origin(
                    (whole.name,), use.shape, ways[0], part=(i, count, axis), others=ways[1:]
                )
        return found
    whole, count = theirs[0], len(ours)
    names = tuple(u.name for u in ours)
    for axis in dict.fromkeys([_split_axis(whole.shape, count) or 0, *range(len(whole.shape))]):
        piece = tuple(n // count if i == axis else n for i, n in enumerate(whole.shape))
        ways = layouts(ours[0].shape, piece, whole.kind) if whole.shape[axis] % count == 0 else ()
        if ways:
            return {whole.name: Origin(names, whole.shape, ways[0], axis=axis, others=ways[1:])}
    return {}


def _of_any(use: Use, rest: Sequence[Use], all_of_them: Sequence[Use]) -> Origin | None:
    """Return an origin out of order: the most alike of what is left over, else of all (tied weights)."""
    for candidates in (rest, all_of_them):
        fitting = [u for u in candidates if np.isfinite(_cost(u, use))]
        if fitting:
            best = min(fitting, key=lambda u: _cost(u, use))
            first, *others = layouts(best.shape, use.shape, use.kind)
            return Origin((best.name,), use.shape, first, others=tuple(others))
    return None


def _in_one_way(origins: Mapping[str, Origin]) -> dict[str, Origin]:
    """Lay square matrices out as the others are, where all others agree."""
    sure = [o.axes for o in origins.values() if len(o.axes) == 2 and not o.others]
    if not sure or len(set(sure)) > 1:
        return dict(origins)
    way = sure[0]
    return {
        name: replace(o, axes=way, others=tuple({o.axes, *o.others} - {way})) if way in o.others else o
        for name, o in origins.items()
    }
