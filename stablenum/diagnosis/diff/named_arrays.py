"""Compare a program with named arrays that another one has written, at what both sides have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.differences import Difference, Location
from stablenum.diagnosis.diff.places.locations import lines_of, location_of_value
from stablenum.diagnosis.diff.places.patches import laid_out
from stablenum.diagnosis.diff.report.report import DiffReport
from stablenum.diagnosis.diff.sides.bounds import unit_of
from stablenum.diagnosis.diff.sides.capturing import captured
from stablenum.diagnosis.diff.sides.dump import Dump
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.diff.sides.recorded import RecordedProgram, shown_path
from stablenum.diagnosis.diff.sides.recording import recorded
from stablenum.diagnosis.diff.sides.sides import Side, again, arrays_of, measured
from stablenum.diagnosis.diff.weights.layouts import laid_back, layouts

__all__ = ["compared_with_dump"]

# The arrays of the program that are kept: 256 MiB. Chosen, not measured.
_MOST_BYTES = 2**28
# So many values that are nearest in their sums are compared entry by entry. Chosen, not measured.
_MOST_CANDIDATES = 8
# Two arrays have something to do with each other if their sums differ by less than this part: those of
# unrelated ones differ by about their size. Chosen, not measured.
_RELATED = 0.25
# Arrays with fewer entries meet others by chance. Chosen, not measured.
_LEAST_ENTRIES = 4
_SAME = "the same where both have values"


@dataclass(frozen=True, slots=True)
class _Match:
    """An array of the dump and the value of the program that is nearest to it.

    Attributes:
        name: of the array.
        value: the value; None if nothing is near.
        error: the largest difference of an entry, relative to the largest entry.
        limit: how much of it rounding explains.
    """

    name: str
    value: int | None = None
    error: float = math.inf
    limit: float = 0.0

    @property
    def same(self) -> bool:
        """Whether rounding explains all of the difference."""
        return self.value is not None and self.error <= self.limit


def compared_with_dump(left: Program | Dump, right: Program | Dump, steps: int) -> DiffReport:
    """Return the report of a comparison of which at least one side is a dump.

    Each array is looked for among the values of the program in float64, by contents: sums first, then entry
    by entry in any layout. It is the same if it is off by no more than rounding in its format explains.

    Raises:
        ValueError: both sides are dumps, or nothing of the dump is in the program.
    """
    if isinstance(left, Dump) and not isinstance(right, Dump):
        return _report(left, right, "left", steps)
    if isinstance(right, Dump) and not isinstance(left, Dump):
        return _report(right, left, "right", steps)
    raise ValueError(
        "one of the two sides must be a program with its operations: named arrays alone have no lines. Use "
        "numpy.testing.assert_allclose for two sets of arrays."
    )


def _recording(program: Program, dump_at: str, steps: int) -> RecordedProgram:
    if isinstance(program, RecordedProgram):
        program.record(steps)
        return program
    live = program.fresh()
    recorded(live, "right" if dump_at == "left" else "left", steps)
    return captured(live, steps, _MOST_BYTES)


def _report(dump: Dump, live: Program, dump_at: str, steps: int) -> DiffReport:
    program = _recording(live, dump_at, steps)
    side = program.side()
    sizes = _by_size(side)
    matches = [_matched(name, array, program, side, sizes) for name, array in dump.arrays.items()]
    matches = _with_results(dump, program, side, matches)
    if all(m.value is None for m in matches):
        raise ValueError(
            f"none of the {len(matches)} arrays of {shown_path(dump.path)} is near a value of the program: "
            "dump what both compute, with the same weights and the same inputs."
        )
    first = next((m for m in matches if m.value is not None and not m.same), None)
    found = () if first is None else (_difference(dump, side, matches, first, dump_at),)
    told = sum(m.same for m in matches), len(matches)
    telling = len([v for v in range(len(side.prints)) if not side.neutral(v)])
    counts = (told, (told[0], telling))
    return DiffReport(
        verdict="different" if found else _SAME,
        differences=found,
        weights={},
        matched=counts if dump_at == "left" else (counts[1], counts[0]),
        notes=tuple(_notes(side, matches, _contributions(dump, live, matches, steps))),
    )


def _by_size(side: Side) -> Mapping[int, list[int]]:
    """Return the values that hold floating-point numbers, by how many."""
    found: dict[int, list[int]] = {}
    for value, mark in enumerate(side.prints):
        if mark.entries and mark.floating:
            found.setdefault(math.prod(side.shapes[value]), []).append(value)
    return found


def _matched(
    name: str, array: Any, program: RecordedProgram, side: Side, sizes: Mapping[int, Sequence[int]]
) -> _Match:
    """Return the value that is nearest to an array; of several that are equal, the first one."""
    array = np.asarray(array)
    if array.dtype.kind != "f" or array.size < _LEAST_ENTRIES:
        return _Match(name)
    mark, unit = fingerprint(array), unit_of(array.dtype.name)
    if not np.isfinite(array).all():
        return _matched_in_part(name, array, program, sizes.get(array.size, ()))
    gaps = sorted((distance(mark, side.prints[v]), v) for v in sizes.get(array.size, ()))
    related = [(gap, v) for gap, v in gaps[:_MOST_CANDIDATES] if gap < _RELATED]
    if not related:
        return _Match(name)
    wide = array.astype(np.float64)
    tried = [(_gap(program.arrays.get(v), wide, gap), v) for gap, v in related]
    rows = [(e, v, _limit(program, v, unit)) for e, v in tried]
    near = [row for row in rows if row[0] <= row[2]] or [min(rows, key=itemgetter(0, 1))]
    error, value, limit = min(near, key=itemgetter(1))
    return _Match(name, value, error, limit)


def _with_results(
    dump: Dump, program: RecordedProgram, side: Side, matches: Sequence[_Match]
) -> list[_Match]:
    """Return the matches, in which an array that is near to nothing belongs to the program's loss or output
    of its size that no other array belongs to."""
    ends = [r.value for r in side.play.results if r.kind in ("loss", "output")]
    free = [v for v in ends if all(m.value != v for m in matches)]
    found = list[_Match]()
    for m in matches:
        array = np.asarray(dump.arrays[m.name])
        same_size = [v for v in free if math.prod(side.shapes[v]) == array.size and array.dtype.kind == "f"]
        if m.value is None and same_size:
            value = same_size[0]
            free.remove(value)
            unit = unit_of(array.dtype.name)
            error = _gap(program.arrays.get(value), array.astype(np.float64), math.inf)
            found.append(_Match(m.name, value, error, _limit(program, value, unit)))
        else:
            found.append(m)
    return found


def _contributions(
    dump: Dump, live: Program, matches: Sequence[_Match], steps: int
) -> tuple[str, Mapping[str, float]]:
    """Return the last array that has a counterpart, and how much of its gap comes from what is computed
    between each array and the one before it.

    The arrays up to there are put in the places of the program's values: what is off in the last one then
    comes from what follows. Of a recorded program this is not known.
    """
    known = [m for m in matches if m.value is not None and math.isfinite(m.error)]
    if isinstance(live, RecordedProgram) or len(known) < 2 or known[-1].same:
        return "", {}
    last, found = known[-1], dict[str, float]()
    side = measured(live.fresh(), noise=False, steps=steps)
    target = np.asarray(dump.arrays[last.name]).astype(np.float64)
    before, values = last.error, dict[int, Any]()
    for m in known[:-1]:
        assert m.value is not None
        own = arrays_of(side, [m.value])[m.value]
        new = _laid_back(np.asarray(dump.arrays[m.name]).astype(np.float64), own)
        if new is None:
            continue
        values[m.value] = new
        changed = again(side, values)
        assert last.value is not None
        gap = _gap(arrays_of(changed, [last.value])[last.value], target, math.inf)
        found[m.name], before = before - gap, gap
    return last.name, {**found, last.name: before}


def _laid_back(array: Any, own: Any) -> Any:
    """Return an array in the layout of the value that it was found to be; None if no layout leads there."""
    ways = layouts(tuple(own.shape), tuple(array.shape), "other")
    turned = [laid_back(array, own.shape, w) for w in ways]
    return min(turned, key=lambda x: float(np.abs(x - own).max(initial=0.0)), default=None)


def _matched_in_part(name: str, array: Any, program: RecordedProgram, values: Sequence[int]) -> _Match:
    """Return the value whose numbers an array has where it is finite: it differs elsewhere, unless the value
    is not finite there, too."""
    finite, best, least = np.isfinite(array), _Match(name), _RELATED
    rest = np.where(finite, array, 0).astype(np.float64)
    for value in values:
        own = program.arrays.get(value)
        turned = None if own is None else laid_out(np.nan_to_num(own, posinf=0, neginf=0), rest)
        if turned is None:
            continue
        error = _gap(np.where(finite, turned, 0), rest, math.inf)
        if error < least:
            same = _gap(own, array.astype(np.float64), math.inf) < math.inf
            best = _Match(name, value, error if same else math.inf, program.limits[value])
            least = error
    return best


def _limit(program: RecordedProgram, value: int, unit: float) -> float:
    """Return how far rounding may take a value that was computed in the format of an array."""
    own = unit_of(program.forms.get(value, "float32")) or unit
    return program.limits[value] * max(unit / own, 1.0)


def _gap(own: Any, array: Any, otherwise: float) -> float:
    """Return the largest difference of an entry of two arrays in any layout, relative to the largest entry;
    the difference of their sums if the entries of one are not recorded."""
    if own is None:
        return otherwise
    turned = laid_out(np.asarray(own, np.float64), array)
    if turned is None:
        return otherwise
    finite = np.isfinite(turned) & np.isfinite(array)
    if not np.array_equal(turned[~finite], array[~finite], equal_nan=True):
        return math.inf
    size = float(np.abs(turned[finite]).max(initial=0.0)) or 1.0
    return float(np.abs(turned[finite] - array[finite]).max(initial=0.0)) / size


def _difference(dump: Dump, side: Side, matches: Sequence[_Match], first: _Match, dump_at: str) -> Difference:
    assert first.value is not None
    here = location_of_value(side, first.value)
    phase = "forward" if here is None else here.phase
    array = Location(where=shown_path(dump.path), operation=first.name, module="", phase=phase)
    lines = _lines_since(side, matches, first)
    return Difference(
        left=array if dump_at == "left" else here,
        right=here if dump_at == "left" else array,
        result=first.name,
        step=1,
        error=first.error,
        allowed=first.limit,
        within=((), lines) if dump_at == "left" else (lines, ()),
    )


def _lines_since(side: Side, matches: Sequence[_Match], first: _Match) -> tuple[str, ...]:
    """Return the lines between the last array that is the same and the first one that is not."""
    before = [m.value for m in matches[: matches.index(first)] if m.same and m.value is not None]
    begin = max((_step_of(side, v) for v in before), default=-1)
    end = _step_of(side, first.value)
    between = [s for s in side.trace.steps[begin + 1 : end + 1] if s.place is not None]
    return lines_of(s.place for s in between if s.place is not None)


def _step_of(side: Side, value: int | None) -> int:
    producer = None if value is None else side.trace.values[value].producer
    return -1 if producer is None else producer


def _notes(
    side: Side, matches: Iterable[_Match], contributions: tuple[str, Mapping[str, float]]
) -> Iterable[str]:
    """Yield a line for each array: where its counterpart is, how far the two are apart, and what is added to
    the gap of the last one on the way to it."""
    target, added = contributions
    for m in matches:
        if m.value is None:
            yield f"{m.name}: no value of the program is near to it. It is wrong, or in other parts there."
            continue
        at = location_of_value(side, m.value)
        where = side.trace.values[m.value].name if at is None else f"{at.operation} ({at.where})"
        what = "the same as" if m.same else "differs from"
        more = f"; adds {added[m.name]:.1e} to the gap of {target}" if m.name in added else ""
        yield f"{m.name}: {what} {where}, by {m.error:.1e} where rounding explains {m.limit:.1e}{more}."
