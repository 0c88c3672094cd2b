"""What the script of one side is made from: its operations, the names of the values, remarks."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.differences import Location
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.places.locations import location_of
from stablenum.diagnosis.diff.places.slices import Slice
from stablenum.diagnosis.diff.report.scripts import Line, Script
from stablenum.diagnosis.diff.sides.kinds import primitive_of, quiet
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Part", "largest", "named", "script_of"]

_SAME = re.compile(r"\$\d+ = \$(\d+)")  # an operation that changes nothing in float64
_TAKEN = frozenset({"given", "jax", "jnp", "left", "np", "right", "run", "torch"})


@dataclass(slots=True)
class Part:
    """What one side's script is made from.

    Attributes:
        side: "left" or "right".
        of: what was evaluated.
        cut: the operations.
        code: step -> its code.
        arrays: the values that are read, and the last one.
    """

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

    @property
    def kept(self) -> list[int]:
        """The values that the script reads."""
        return [v for v in self.cut.reads if v not in self.inlined] if self.cut.steps else []


def largest(x: Any) -> float:
    """Return the largest finite magnitude."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


# --- names -------------------------------------------------------------------------------------------------


def named(comparison: Comparison, parts: Mapping[str, Part]) -> dict[str, dict[int, str]]:
    """Return the name of each value of each side; what both read has one name."""
    arrays, found = set(_TAKEN), dict[str, dict[int, str]]()
    for side, part in parts.items():
        names = found[side] = {}
        for value in part.kept:
            same = _same(comparison, parts, value) if side == "right" else None
            known = None if same is None else found["left"][same]
            names[value] = known if known and known not in names.values() else _new(part, value, arrays)
    for side, part in parts.items():
        _name_the_rest(part, found[side], set(arrays))
    return found


def _name_the_rest(part: Part, names: dict[int, str], taken: set[str]) -> None:
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


def _same(comparison: Comparison, parts: Mapping[str, Part], value: int) -> int | None:
    """Return the value of the left side that holds the same numbers in the same layout."""
    if "left" not in parts:
        return None
    left, right = parts["left"], parts["right"]
    mark = right.arrays[value]
    for other in left.kept:
        own = left.arrays[other]
        if (own.shape, own.dtype) != (mark.shape, mark.dtype):
            continue
        if other not in comparison.found.right.get(value, ()) and not np.array_equal(own, mark):
            continue
        allowed = comparison.left.tolerance[other] + comparison.right.tolerance[value]
        if np.allclose(own, mark, 0.0, allowed * largest(mark), equal_nan=True):
            return other
    return None


def _new(part: Part, value: int, taken: set[str], *, computed: bool = False) -> str:
    """Return a name that is not taken: what is read is named after the parameter or the function that it
    comes from, and what is computed after its operation."""
    base = re.sub(r"\W+", "_", _said(part, value, computed)).strip("_") or "value"
    base = f"_{base}" if base[0].isdigit() else f"{base}_" if keyword.iskeyword(base) else base
    numbered = (f"{base}_{i}" for i in range(2, len(taken) + 3))
    name = next(n for n in (base, *numbered) if n not in taken)
    taken.add(name)
    return name


def _said(part: Part, value: int, computed: bool) -> str:
    trace = part.of.trace
    step = _maker(part, value)
    if computed and step is not None:
        return primitive_of(step)
    while step is not None and quiet(step) and step.inputs:
        value = step.inputs[0]
        step = _maker(part, value)
    made = trace.values[value]
    return (made.name or made.role) if step is None else step.operation


def _maker(part: Part, value: int) -> Step | None:
    producer = part.of.trace.values[value].producer
    return None if producer is None else part.of.trace.steps[producer]


def _number(array: Any) -> str:
    """Return a single number as code."""
    number = np.asarray(array)
    if number.dtype.kind == "b" or (number.dtype.kind == "f" and np.isfinite(number)):
        return repr(number.item())
    said = str(number)
    return f"np.{number.dtype.name}({said if number.dtype.kind in 'iu' else repr(said)})"


# --- words -------------------------------------------------------------------------------------------------


def script_of(part: Part, names: Mapping[int, str], kept: Mapping[str, Any]) -> Script:
    """Return what a side's script says, where ``kept`` are the arrays that were not too large."""

    def at(step: Step) -> Location | None:
        return location_of(Start(step), part.of, step.phase)

    reads = {names[v]: _described(part, v, at) for v in part.kept}
    return Script(
        side=part.side,
        dialect=part.of.program.dialect,
        reads=reads,
        names=names,
        lines=[Line(code, at(s)) for s in part.cut.steps if not _SAME.fullmatch(code := part.code[s.index])],
        end=part.cut.end,
        remarks=_remarks(part, names, at),
        lacking=[name for name in reads if name not in kept],
    )


def _described(part: Part, value: int, at: Callable[[Step], Location | None]) -> str:
    array, made = part.arrays[value], part.of.trace.values[value]
    shape = f"{list(array.shape)}"
    if made.producer is None:
        return f"{shape}, {made.role} {made.name}".strip()
    step = part.of.trace.steps[made.producer]
    place = at(step)
    return f"{shape}, from {step.operation}" + ("" if place is None else f" in {place.where}")


def _remarks(part: Part, names: Mapping[int, str], at: Callable[[Step], Location | None]) -> list[str]:
    found = []
    for step in part.cut.unwritten:
        place = at(step)
        where = "" if place is None else f" ({place.where})"
        given = ", ".join(names[o] for o in step.outputs if o in part.cut.reads)
        found.append(f"{step.operation}{where} cannot be written as code: what it gave is read as {given}.")
    if part.cut.cut:
        given = ", ".join(names[v] for v in sorted(part.cut.cut) if v in names)
        found.append(
            f"More operations come before these; they are left out, and what they gave is read as {given}."
        )
    return found
