"""Reproduce the first difference: the operations of each side from shared values to one that differs."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.comparison import Comparison
from stablenum.diagnosis.diff.differences import Difference, Location
from stablenum.diagnosis.diff.frontier import Frontier, Start, last_of_line
from stablenum.diagnosis.diff.kinds import quiet
from stablenum.diagnosis.diff.layouts import layouts
from stablenum.diagnosis.diff.locations import location_of
from stablenum.diagnosis.diff.patches import Patch, candidates
from stablenum.diagnosis.diff.repro import Repro
from stablenum.diagnosis.diff.scripts import Line, Script, comparing_script, side_script
from stablenum.diagnosis.diff.sides import Side, arrays_of
from stablenum.diagnosis.diff.slices import Slice, given_at, sliced
from stablenum.diagnosis.replay.trace import Step

__all__ = ["reproduction"]

_MOST_BYTES = 32 * 2**20
_SAME = re.compile(r"\$\d+ = \$(\d+)")  # an operation that changes nothing in float64
_TAKEN = frozenset({"given", "jax", "jnp", "left", "np", "right", "run", "torch"})


@dataclass(slots=True)
class _Part:
    """What one side's script is made from."""

    side: str
    of: Side
    cut: Slice
    code: Mapping[int, str]
    arrays: Mapping[int, Any]

    @property
    def inlined(self) -> set[int]:
        """The single numbers that are written into the code."""
        values = self.of.trace.values
        return {
            v
            for v in self.cut.reads
            if self.of.program.dialect.numbers
            and values[v].role == "constant"
            and not np.ndim(self.arrays[v])
        }


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
    names = _named(comparison, parts)
    arrays = {names[side][v]: part.arrays[v] for side, part in parts.items() for v in _kept(part)}
    arrays |= {side: part.arrays[part.cut.end] for side, part in parts.items()}
    kept = _small(arrays)
    sides = {
        side: _script(parts[side], names[side], kept) if side in parts and parts[side].cut.steps else None
        for side in ("left", "right")
    }
    texts = {f"{side}.py": side_script(script) for side, script in sides.items() if script is not None}
    ways = {side: _way(script, known=side in parts, kept=side in kept) for side, script in sides.items()}
    texts["compare.py"] = comparing_script(_title(difference), ways, _turned(parts))
    return Repro(texts, kept)


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
        if not np.allclose(pair.mine, pair.theirs, 0.0, allowed * _largest(pair.theirs), equal_nan=True):
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
) -> _Part:
    whole = sliced(side.trace, end, given_at(side, start, shared, since))
    options: dict[str, Any] = {"weights": side.weights, "replace": side.replaced, "steps": side.steps}
    asked = [s.index for s in whole.steps]
    code = side.program.play(lambda index, data: None, code=asked, **options).code
    cut = whole.without(side.trace, code)
    return _Part(name, side, cut, code, arrays_of(side, {*cut.reads, end}))


def _kept(part: _Part) -> list[int]:
    return [v for v in part.cut.reads if v not in part.inlined] if part.cut.steps else []


def _small(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays, the smallest first, as long as they take no more memory than a report may."""
    found, used = dict[str, Any](), 0
    for name, array in sorted(arrays.items(), key=lambda item: item[1].nbytes):
        used += array.nbytes
        if used <= _MOST_BYTES:
            found[name] = array
    return found


def _turned(parts: Mapping[str, _Part]) -> str:
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
    x, y = np.asarray(a[both], float), np.asarray(b[both], float)
    size = float(np.square(x).sum() + np.square(y).sum())
    return float(np.square(x - y).sum()) / size if size else 0.0


def _largest(x: Any) -> float:
    """Return the largest finite magnitude."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


# --- names -------------------------------------------------------------------------------------------------


def _named(comparison: Comparison, parts: Mapping[str, _Part]) -> dict[str, dict[int, str]]:
    """Return the name of each value of each side; what both read has one name."""
    arrays, found = set(_TAKEN), dict[str, dict[int, str]]()
    for side, part in parts.items():
        names = found[side] = {}
        for value in _kept(part):
            same = _same(comparison, parts, value) if side == "right" else None
            known = None if same is None else found["left"][same]
            names[value] = known if known and known not in names.values() else _new(part, value, arrays)
    for side, part in parts.items():
        _name_the_rest(part, found[side], set(arrays))
    return found


def _name_the_rest(part: _Part, names: dict[int, str], taken: set[str]) -> None:
    for value in part.inlined:
        names[value] = _number(part.arrays[value])
    for step in part.cut.steps:
        same = _SAME.fullmatch(part.code[step.index])
        for value in step.outputs:
            if same is not None:
                names[value] = names[int(same[1])]
            elif value not in names:
                names[value] = _new(part, value, taken, computed=True)
    names.setdefault(part.cut.end, part.side)


def _same(comparison: Comparison, parts: Mapping[str, _Part], value: int) -> int | None:
    """Return the value of the left side that holds the same numbers in the same layout."""
    if "left" not in parts:
        return None
    left, right = parts["left"], parts["right"]
    mark = right.arrays[value]
    for other in _kept(left):
        own = left.arrays[other]
        if (own.shape, own.dtype) != (mark.shape, mark.dtype):
            continue
        if other not in comparison.found.right.get(value, ()) and not np.array_equal(own, mark):
            continue
        allowed = comparison.left.tolerance[other] + comparison.right.tolerance[value]
        if np.allclose(own, mark, 0.0, allowed * _largest(mark), equal_nan=True):
            return other
    return None


def _new(part: _Part, value: int, taken: set[str], *, computed: bool = False) -> str:
    """Return a name that is not taken: what is read is named after the parameter or the function that it
    comes from, and what is computed after its operation."""
    base = re.sub(r"\W+", "_", _said(part, value, computed)).strip("_") or "value"
    base = f"_{base}" if base[0].isdigit() else f"{base}_" if keyword.iskeyword(base) else base
    numbered = (f"{base}_{i}" for i in range(2, len(taken) + 3))
    name = next(n for n in (base, *numbered) if n not in taken)
    taken.add(name)
    return name


def _said(part: _Part, value: int, computed: bool) -> str:
    trace = part.of.trace
    step = _maker(part, value)
    if computed and step is not None:
        return step.primitive.removeprefix("aten.").split(".")[0]
    while step is not None and quiet(step) and step.inputs:
        value = step.inputs[0]
        step = _maker(part, value)
    made = trace.values[value]
    return (made.name or made.role) if step is None else step.operation


def _maker(part: _Part, value: int) -> Step | None:
    producer = part.of.trace.values[value].producer
    return None if producer is None else part.of.trace.steps[producer]


def _number(array: Any) -> str:
    number = np.asarray(array)
    if number.dtype.kind in "fb":
        return (
            repr(number.item())
            if number.dtype.kind == "b" or np.isfinite(number)
            else f"np.float64('{number}')"
        )
    return f"np.{number.dtype.name}({number.item()!r})"


# --- words -------------------------------------------------------------------------------------------------


def _script(part: _Part, names: Mapping[int, str], kept: Mapping[str, Any]) -> Script:
    def at(step: Step) -> Location | None:
        return location_of(Start(step), part.of, step.phase)

    reads = {names[v]: _described(part, v, at) for v in _kept(part)}
    return Script(
        side=part.side,
        dialect=part.of.program.dialect,
        reads=reads,
        names=names,
        lines=[
            Line(part.code[s.index], at(s)) for s in part.cut.steps if not _SAME.fullmatch(part.code[s.index])
        ],
        end=part.cut.end,
        remarks=_remarks(part, names, at),
        lacking=[name for name in reads if name not in kept],
    )


def _described(part: _Part, value: int, at: Callable[[Step], Location | None]) -> str:
    array, made = part.arrays[value], part.of.trace.values[value]
    shape = f"{list(array.shape)}"
    if made.producer is None:
        return f"{shape}, {made.role} {made.name}".strip()
    step = part.of.trace.steps[made.producer]
    place = at(step)
    return f"{shape}, from {step.operation}" + ("" if place is None else f" in {place.where}")


def _remarks(part: _Part, names: Mapping[int, str], at: Callable[[Step], Location | None]) -> list[str]:
    found = []
    for step in part.cut.unwritten:
        place = at(step)
        where = "" if place is None else f" ({place.where})"
        given = ", ".join(names[o] for o in step.outputs if o in part.cut.reads)
        found.append(f"{step.operation}{where} cannot be written as code: what it gave is read as {given}.")
    if part.cut.cut:
        given = ", ".join(names[v] for v in sorted(part.cut.cut) if v in names)
        found.append(f"The operations before these many are left out: what they gave is read as {given}.")
    return found


def _title(difference: Difference) -> str:
    def said(place: Location | None) -> str:
        if place is None:
            return "nothing"
        return f"{place.operation or 'no such operation after'} ({place.where})"

    return (
        f"The first difference: {said(difference.left)} on the left, {said(difference.right)} on the right."
    )
