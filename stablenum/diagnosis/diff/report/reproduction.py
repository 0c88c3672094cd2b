"""Reproduce the first difference: the operations of each side from shared values to one that differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.differences import Difference, Location
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Frontier, Start, last_of_line
from stablenum.diagnosis.diff.places.patches import Patch, candidates
from stablenum.diagnosis.diff.places.slices import given_at, sliced
from stablenum.diagnosis.diff.report.repro import Repro
from stablenum.diagnosis.diff.report.script_parts import Part, largest, named, script_of
from stablenum.diagnosis.diff.report.scripts import Script, comparing_script, side_script
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.replay.trace import Step

__all__ = ["reproduction", "reproduction_of"]

# A report holds arrays for its scripts up to so many bytes; a script that needs more says so and stops.
# Chosen, not measured.
_MOST_BYTES = 32 * 2**20


def reproduction(
    comparison: Comparison, place: Frontier, patch: Patch | None, difference: Difference
) -> Repro:
    """Return the scripts and numbers that show the first difference and nothing else."""
    group = comparison.differing
    since = (-1, -1) if group is None else group.since
    ends = _ends(comparison, place, patch)
    shared: tuple[Mapping[int, Any], ...] = (comparison.found.left, comparison.found.right)
    parts = {
        name: _part(name, comparison.side(name), getattr(place, name), end, known, last)
        for name, end, known, last in zip(("left", "right"), ends, shared, since, strict=True)
        if end is not None
    }
    names = named(comparison, parts)
    arrays = {names[side][v]: part.arrays[v] for side, part in parts.items() for v in part.kept}
    arrays |= {side: part.arrays[part.cut.end] for side, part in parts.items()}
    kept = _small(arrays)
    sides = {
        side: script_of(parts[side], names[side], kept) if side in parts and parts[side].cut.steps else None
        for side in ("left", "right")
    }
    texts = {f"{side}.py": side_script(script) for side, script in sides.items() if script is not None}
    ways = {side: _way(script, known=side in parts, kept=side in kept) for side, script in sides.items()}
    texts["compare.py"] = comparing_script(_title(difference), ways, _turned(parts))
    return Repro(texts, kept)


def reproduction_of(difference: Difference, side: str, array: Any) -> Repro:
    """Return what shows a result that only one side has: its array there."""
    ways = {name: _way(None, known=name == side, kept=name == side) for name in ("left", "right")}
    kept = _small({side: array})
    return Repro({"compare.py": comparing_script(_title(difference), ways, "")}, kept)


def _way(script: Script | None, *, known: bool, kept: bool) -> str:
    """Return how ``compare.py`` gets the value of a side, or why it does not."""
    if script is not None:
        return "script"
    if kept:
        return "given"
    return "its value was too large to keep" if known else "nothing of it leads to the difference"


# --- what is shown -----------------------------------------------------------------------------------------


def _ends(comparison: Comparison, place: Frontier, patch: Patch | None) -> tuple[int | None, int | None]:
    """Return the first value of each side that differs."""
    if patch is not None:
        return patch.left, patch.right
    for pair in candidates(comparison, place):
        allowed = comparison.left.tolerance[pair.left] + comparison.right.tolerance[pair.right]
        if not np.allclose(pair.mine, pair.theirs, 0.0, allowed * largest(pair.theirs), equal_nan=True):
            return pair.left, pair.right
    return _results(comparison, place) or (
        _own_end(comparison.left, place.left, place.region_left),
        _own_end(comparison.right, place.right, place.region_right),
    )


def _results(comparison: Comparison, place: Frontier) -> tuple[int, int] | None:
    """Return the results that differ and follow from both places in the fewest operations; None if that is
    too many."""
    group, sides, shared = comparison.differing, (comparison.left, comparison.right), comparison.found
    if group is None:
        return None
    starts, known = (place.left, place.right), (shared.left, shared.right)
    found = []
    for pair in group.differing:
        ends = (pair.left.value, pair.right.value)
        cuts = [
            sliced(side.trace, end, given_at(side, start, like, since))
            for side, end, start, like, since in zip(sides, ends, starts, known, group.since, strict=True)
        ]
        if all(c.holds(start) and not c.cut for c, start in zip(cuts, starts, strict=True)):
            found.append((sum(len(c.steps) for c in cuts), ends))
    return min(found)[1] if found else None


def _own_end(side: Side, start: Start | None, region: Iterable[Step]) -> int | None:
    if start is None or start.missing:
        return None if start is None else start.value
    last = last_of_line(side, start, region)
    return next(iter(start.step.outputs), None) if last is None else last


def _part(
    name: str, side: Side, start: Start | None, end: int, shared: Mapping[int, Any], since: int
) -> Part:
    whole = sliced(side.trace, end, given_at(side, start, shared, since))
    options: dict[str, Any] = {"weights": side.weights, "replace": side.replaced, "steps": side.steps}
    asked = [s.index for s in whole.steps]
    code = side.program.play(lambda index, data: None, code=asked, **options).code
    cut = whole.without(side.trace, code)
    return Part(name, side, cut, code, arrays_of(side, {*cut.reads, end}))


def _small(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays, the smallest first, as long as they take no more memory than a report may."""
    found, used = dict[str, Any](), 0
    for name, array in sorted(arrays.items(), key=lambda item: item[1].nbytes):
        used += array.nbytes
        if used <= _MOST_BYTES:
            found[name] = array
    return found


def _turned(parts: Mapping[str, Part]) -> str:
    """Return the code that lays out the left side's value ``a`` as the right one's; "" if none does."""
    if len(parts) < 2:
        return ""
    mine, theirs = (part.arrays[part.cut.end] for part in parts.values())
    if mine.shape == theirs.shape and (mine.ndim < 2 or _gap(mine, theirs) < 1.0):
        return "a"
    ways = layouts(tuple(mine.shape), tuple(theirs.shape), "other") if mine.size == theirs.size else ()
    if not ways:
        return ""
    way = min(ways, key=lambda w: _gap(mine.transpose(w).reshape(theirs.shape), theirs))
    moved = "a" if list(way) == sorted(way) else f"a.transpose({list(way)})"
    same = mine.transpose(way).shape == theirs.shape
    return moved if same else f"{moved}.reshape({list(theirs.shape)})"


def _gap(a: Any, b: Any) -> float:
    """Return the size of a difference, relative to that of two arrays of unrelated numbers."""
    both = np.isfinite(a) & np.isfinite(b)
    x, y = a[both] * 1.0, b[both] * 1.0
    size = float(np.square(np.abs(x)).sum() + np.square(np.abs(y)).sum())
    return float(np.square(np.abs(x - y)).sum()) / size if size else 0.0


def _title(difference: Difference) -> str:
    def said(place: Location | None) -> str:
        if place is None:
            return "nothing"
        return f"{place.operation or 'no such operation'} ({place.where})"

    return (
        f"The first difference: {said(difference.left)} on the left, {said(difference.right)} on the right."
    )
