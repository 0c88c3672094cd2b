"""The results of two programs side by side: losses, gradients and updated parameters, and which differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint, sketch
from stablenum.diagnosis.diff.sides.play import Result
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.diff.weights.layouts import laid_back, layouts
from stablenum.diagnosis.diff.weights.origins import Origin, elements_of
from stablenum.diagnosis.diff.weights.weights import WeightMap

__all__ = ["Group", "Pair", "Update", "groups_after", "groups_of"]

# A result is compared element by element, which the noise moves more than it moves a sum. Chosen, not
# measured.
_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Pair:
    """One result on both sides.

    Attributes:
        left, right: what is compared.
        error: the largest difference of an element, relative to the largest element.
        allowed: what rounding in float64 explains.
    """

    left: Result
    right: Result
    error: float
    allowed: float

    @property
    def differs(self) -> bool:
        """Whether the two differ by more than rounding."""
        return not self.error <= self.allowed


@dataclass(frozen=True, slots=True)
class Group:
    """All results of one kind and training step.

    Attributes:
        kind, step: as in ``Result``.
        pairs: the results.
        since: for each side, the last step of its trace that an earlier group of results comes from.
        shown_by: the kind of the results that show a difference of the forward pass, if it is too small to be
            seen in the loss.
    """

    kind: str
    step: int
    pairs: tuple[Pair, ...]
    since: tuple[int, int]
    shown_by: str = ""

    @property
    def results(self) -> str:
        """The kind of the results."""
        return self.shown_by or self.kind

    @property
    def differing(self) -> list[Pair]:
        """The results that differ."""
        return [p for p in self.pairs if p.differs]


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter: what both sides make of the same gradient.

    Attributes:
        parameter, gradient: before the update.
        left, right: the changes of the parameter.
        name: that of the parameter.
        differs: whether the parameter differs by more than rounding explains.
        result: the value of the right side that is the updated parameter.
        told: whether the gradient is known anywhere, rather than 0 but for rounding.
        rest: what the right change is added to; where a gradient is 0 but for rounding, what the left side
            makes of it.
    """

    parameter: Any
    gradient: Any
    left: Any
    right: Any
    name: str = ""
    differs: bool = True
    result: int = -1
    rest: Any = 0.0
    told: bool = True


def groups_of(left: Side, right: Side, weights: WeightMap) -> list[Group]:
    """Return the results by training step and kind, in the order in which they are computed.

    Raises:
        ValueError: the programs have no result of the same kind, or outputs that do not correspond.
    """
    found, since = list[Group](), (-1, -1)
    mine, theirs = _by_kind(left), _by_kind(right)
    for (step, kind), results in theirs.items():
        pairs = _pairs(left, right, mine.get((step, kind), []), results, weights)
        if pairs:
            found.append(Group(kind, step, tuple(pairs), since))
            since = (_last(left, mine[step, kind]), _last(right, results))
    if not found:
        kinds = [", ".join(sorted({r.kind for r in s.play.results})) or "nothing" for s in (left, right)]
        raise ValueError(
            f"the two programs have no results in common: the left one gives {kinds[0]}, the right one "
            f"{kinds[1]}. Return a loss (a floating-point scalar) from both, or outputs from both."
        )
    return found


def groups_after(
    groups: Sequence[Group], before: tuple[Side, Side], after: tuple[Side, Side], weights: WeightMap
) -> list[Group]:
    """Return the groups of copies of two sides, some of whose results are others."""
    changed = {
        (r.step, r.kind)
        for old, new in zip(before, after, strict=True)
        for r in new.play.results
        if new.arrays.get(r.value) is not old.arrays.get(r.value)
    }
    mine, theirs = (_by_kind(side) for side in after)

    def again(group: Group) -> Group:
        key = group.step, group.kind
        if key not in changed:
            return group
        return replace(group, pairs=tuple(_pairs(*after, mine[key], theirs[key], weights)))

    return [again(group) for group in groups]


def _by_kind(side: Side) -> dict[tuple[int, str], list[Result]]:
    found: dict[tuple[int, str], list[Result]] = {}
    for r in side.play.results:
        found.setdefault((r.step, r.kind), []).append(r)
    return found


def _last(side: Side, results: Sequence[Result]) -> int:
    makers = (side.trace.values[r.value].producer for r in results)
    return max((m for m in makers if m is not None), default=-1)


def _pairs(
    left: Side, right: Side, mine: Sequence[Result], theirs: Sequence[Result], weights: WeightMap
) -> list[Pair]:
    if theirs and theirs[0].kind in ("loss", "output"):
        if len(mine) != len(theirs):
            return []
        return [_output(left, right, a, b) for a, b in zip(mine, theirs, strict=True)]
    named = {r.name: r for r in mine}
    found = _sums(left, right, named, theirs, weights)
    found += _wholes(left, right, named, theirs, weights)
    apart = {name for names in weights.shared.values() for name in names}
    for b in theirs:
        origin = weights.origins.get(b.name)
        if (
            b.name in apart
            or origin is None
            or any(n not in named for n in origin.names)
            or not origin.invertible
        ):
            continue
        arrays = {n: left.arrays[named[n].value] for n in origin.names if named[n].value in left.arrays}
        a = named[origin.names[0]]
        if len(arrays) == len(set(origin.names)) and b.value in right.arrays:
            found.append(_pair(left, right, a, b, origin.of(arrays)))
        elif b.value not in right.arrays and isinstance(origin, Origin) and not origin.piece.cuts:
            found.append(_by_prints(left, right, a, b))
    return found


def _wholes(
    left: Side, right: Side, named: Mapping[str, Result], theirs: Sequence[Result], weights: WeightMap
) -> list[Pair]:
    """Return the results of left parameters whose entries a recording does not hold, each beside what the
    right ones that come from it make of it in its layout: by sums, and by a sketch of where entries lie.
    Updates of right parameters that share a left one do not add up to its own."""
    found = []
    for name, a in named.items():
        if a.value in left.arrays or (a.kind == "updated" and name in weights.shared):
            continue
        parts = [
            b
            for b in theirs
            if (origin := weights.origins.get(b.name)) is not None
            and name in origin.names
            and origin.invertible
            and b.value in right.arrays
            and all(n in named for n in origin.names)
        ]
        whole, filled = _assembled(left, right, named, name, parts, weights)
        if parts and filled.all():
            moved = sum(right.tolerance[b.value] for b in parts)
            found.append(_by_sketch(left, a, parts[0], whole, moved))
    return found


def _assembled(
    left: Side,
    right: Side,
    named: Mapping[str, Result],
    name: str,
    parts: Sequence[Result],
    weights: WeightMap,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of right results in the layout of the left parameter that they come from, and which of
    its entries they give."""
    whole = np.zeros(int(np.prod(left.shapes[named[name].value], dtype=int)))
    filled = np.zeros(whole.size, bool)
    for b in parts:
        source = weights.origins[b.name]
        shapes = {n: np.broadcast_to(0.0, left.shapes[named[n].value]) for n in source.names}
        of, places = elements_of(source, shapes)
        own = of == source.names.index(name)
        np.add.at(whole, places[own], np.ravel(right.arrays[b.value])[own])
        filled[places[own]] = True
    return whole, filled


def _by_sketch(left: Side, a: Result, b: Result, whole: np.ndarray, moved: float) -> Pair:
    """Compare a result of a recording, of which sums and a sketch are known, with an array in its layout."""
    mine, theirs = left.prints[a.value], fingerprint(whole)
    allowed = _FACTOR * (left.tolerance[a.value] + moved)
    known = getattr(left.program, "sketches", {}).get(a.value)
    size = max(mine.squares, theirs.squares) ** 0.5 or 1.0
    lies = 0.0 if known is None or known != known else abs(known - sketch(whole)) / size
    return Pair(a, b, max(distance(mine, theirs), lies), allowed)


def _sums(
    left: Side, right: Side, named: Mapping[str, Result], theirs: Sequence[Result], weights: WeightMap
) -> list[Pair]:
    """Return the gradients of left parameters that several right ones come from, each beside the sum of
    theirs. Updates are no such sums."""
    found, given = [], {r.name: r for r in theirs if r.kind == "gradient"}
    for name, parts in weights.shared.items():
        if name in named and named[name].value in left.arrays and any(part in given for part in parts):
            a, results = named[name], [given[part] for part in parts if part in given]
            whole, _ = _assembled(left, right, named, name, results, weights)
            allowed = sum(right.tolerance[b.value] for b in results)
            found.append(_pair(left, right, a, results[0], left.arrays[a.value], whole, allowed))
    return found


def _output(left: Side, right: Side, a: Result, b: Result) -> Pair:
    if a.value not in left.arrays and b.value in right.arrays:
        theirs, shape = right.arrays[b.value], left.shapes[a.value]
        if theirs.size == np.prod(shape, dtype=int):
            same = tuple(theirs.shape) == shape
            ways = () if same else layouts(shape, tuple(theirs.shape), "other")
            turned = [laid_back(theirs, shape, w) for w in ways] or [theirs]
            pairs = [_by_sketch(left, a, b, np.ravel(x), right.tolerance[b.value]) for x in turned]
            return min(pairs, key=lambda p: p.error)
    if a.value not in left.arrays or b.value not in right.arrays:
        return _by_prints(left, right, a, b)
    mine, theirs = left.arrays[a.value], right.arrays[b.value]
    if mine.size != theirs.size:
        if left.replaced or right.replaced:  # what was put in place of a value makes another one of it
            return Pair(a, b, float("inf"), 0.0)
        raise ValueError(
            f"{a.kind} {a.name} has the shape {list(mine.shape)} on the left and {list(theirs.shape)} on the "
            "right. Give both programs the same batch, and return the same outputs in the same order."
        )
    if mine.shape != theirs.shape and sorted(mine.shape) == sorted(theirs.shape):
        mine = _turned(mine, theirs)
    return _pair(left, right, a, b, mine.reshape(theirs.shape))


def _by_prints(left: Side, right: Side, a: Result, b: Result) -> Pair:
    """Compare two results whose entries are not both known, as of a large one of a recorded program."""
    allowed = left.tolerance[a.value] + right.tolerance[b.value]
    return Pair(a, b, distance(left.prints[a.value], right.prints[b.value]), allowed)


def _turned(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the transpose that is nearest to the other array."""
    ways = layouts(tuple(mine.shape), tuple(theirs.shape), "other")
    turned = [mine.transpose(w).reshape(theirs.shape) for w in ways]
    return min(turned, key=lambda x: float(np.abs(x - theirs).max()), default=mine)


def _pair(
    left: Side,
    right: Side,
    a: Result,
    b: Result,
    mine: np.ndarray,
    theirs: np.ndarray | None = None,
    moved: float | None = None,
) -> Pair:
    """Compare two arrays: those of two results, or what was made from them."""
    theirs = right.arrays[b.value] if theirs is None else theirs.reshape(mine.shape)
    allowed = _FACTOR * (left.tolerance[a.value] + (right.tolerance[b.value] if moved is None else moved))
    if not mine.size:
        return Pair(a, b, 0.0, allowed)
    kept = np.isfinite(mine) & np.isfinite(theirs)
    if not np.array_equal(mine[~kept], theirs[~kept], equal_nan=True):
        return Pair(a, b, float("inf"), allowed)
    x, y = mine[kept] * 1.0, theirs[kept] * 1.0  # also of flags
    size = max(float(np.abs(x).max(initial=0.0)), float(np.abs(y).max(initial=0.0))) or 1.0
    return Pair(a, b, float(np.abs(x - y).max(initial=0.0)) / size, allowed)
