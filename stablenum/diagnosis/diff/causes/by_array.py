"""Name the cause by giving a line the other side's indices, flags, constants or single numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.by_value import masked, of_masks, same_entries
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.arrangement import chain_of
from stablenum.diagnosis.diff.places.flow import size
from stablenum.diagnosis.diff.places.frontier import Start, same_line
from stablenum.diagnosis.diff.sides.equality import SAME_ARRAY, SAME_MULTIPLE
from stablenum.diagnosis.diff.sides.kinds import called
from stablenum.diagnosis.diff.sides.sides import MOST_ENTRIES, Side, arrays_of

__all__ = ["by_array"]

# Of the arrays that a line reads, so many are compared with those of the other line. Chosen, not measured.
_MOST_READ = 6
_SORTS = {"b": "flags", "i": "indices", "u": "indices", "f": "numbers"}


class _Read(NamedTuple):
    """An array that a line reads and that the other side does not have.

    Attributes:
        value, array: the value, and what it holds.
        told: what it is.
    """

    value: int
    array: Any
    told: str

    @property
    def sort(self) -> str:
        """Whether it holds flags, indices or other numbers."""
        return _SORTS[self.array.dtype.kind]


def by_array(scene: Scene) -> Iterator[Proposal]:
    """Propose the left line's arrays for those of the right line, of which both have as many: indices, flags
    and constants, and single numbers of a parameter, buffer or argument."""
    starts = {name: (side, start, region) for name, side, start, region in scene.forward_starts()}
    if len(starts) < 2:
        return
    mine, theirs = (
        list(_read(*starts[name], scene.comparison.found.known(name))) for name in ("left", "right")
    )
    for here, there in product(mine, theirs):
        alike = here.array.size == there.array.size and here.sort == there.sort
        if alike and not any(_equal(here.array, r.array) for r in theirs):
            array = here.array.reshape(there.array.shape)
            name = called(starts["left"][1].step)
            yield from _proposals(here._replace(array=array), there, name)


def _read(side: Side, start: Start, region: tuple[Any, ...], shared: Collection[int]) -> Iterator[_Read]:
    """Yield the arrays that a line reads from outside it and that are whole numbers, flags or constants, or
    are given to this program alone, such as the number that a parameter of one entry holds."""
    line = (start.step, *same_line(start, region))
    made, found = {o for s in line for o in s.outputs}, list[int]()
    for value in (v for s in line for v in s.inputs if v not in made):
        single, floating = size(side, value) == 1, side.prints[value].floating
        if single and floating:
            found += _origins(side, value, shared)
        elif not single and (not floating or not side.depends[value] or _is_alone(side, value, shared)):
            found.append(value)
    kept = [v for v in dict.fromkeys(found) if size(side, v) <= MOST_ENTRIES][:_MOST_READ]
    for value, array in arrays_of(side, kept).items():
        if array.dtype.kind in _SORTS:
            yield _Read(value, array, _told(side, value, array))


def _is_alone(side: Side, value: int, shared: Collection[int]) -> bool:
    """Return whether a value that is not trained is given to this side alone."""
    given = side.trace.values[chain_of(side.trace, value)[-1]].producer is None
    return given and not side.trained[value] and value not in shared


def _origins(side: Side, value: int, shared: Collection[int]) -> list[int]:
    """Return the single numbers of parameters, buffers and arguments from which one is computed, and that the
    other side does not have."""
    found, todo = list[int](), [value]
    while todo:
        value = todo.pop(0)
        known = side.trace.values[value]
        if value in shared or size(side, value) != 1 or not side.prints[value].floating:
            continue
        if known.producer is not None:
            todo += side.trace.steps[known.producer].inputs
        elif known.role in ("parameter", "buffer", "input"):
            found.append(value)
    return found


def _told(side: Side, value: int, array: Any) -> str:
    known = side.trace.values[value]
    number = f" = {float(np.reshape(array, -1)[0]):.6g}" if array.size == 1 else ""
    return f"{known.role} {known.name}".strip() + number


def _equal(a: Any, b: Any) -> bool:
    """Return whether two arrays hold the same; flags also if they are inverted."""
    if a.size != b.size or (a.dtype.kind != b.dtype.kind and "f" in (a.dtype.kind, b.dtype.kind)):
        return False
    x, y = np.ravel(a), np.ravel(b)
    if a.dtype.kind != "f":
        return np.array_equal(x, y) or (a.dtype.kind == "b" and np.array_equal(x, ~y))
    finite = np.isfinite(x)
    apart = np.abs(x[finite] - y[finite]).max(initial=0.0)
    same = np.array_equal(x[~finite], y[~finite], equal_nan=True)
    return bool(same and apart <= SAME_ARRAY * (np.abs(x[finite]).max(initial=0.0) or 1.0))


def _proposals(here: _Read, there: _Read, name: str) -> Iterator[Proposal]:
    """Yield the proposal for flags as they are and, as one side may say which entries are kept and the other
    one which are not, the other way round."""
    for array in (here.array, ~here.array) if there.sort == "flags" else (here.array,):
        code, sentence = _said(array, there.array, there.sort)
        if array.size == 1:
            code = "other_input"
            sentence = f"{name} reads {here.told} in the left program, and {there.told} in the right one."
        edit = Edit("right", {there.value: array})
        yield Proposal(code, sentence, [(edit,)], f"With the left program's {there.sort} there")


def _said(mine: Any, theirs: Any, sort: str) -> tuple[str, str]:
    """Return the code and what the right array is, compared with the left one."""
    flags = (mine, theirs) if sort == "flags" else (masked(mine), masked(theirs))
    if (flags[0] != flags[1]).any():
        reason = of_masks(*flags, "set" if sort == "flags" else "masked")
        count = int((flags[0] != flags[1]).sum())
        named = f"the two sides' flags differ at {count} of {mine.size} places."
        return reason.code, named if sort == "flags" else reason.sentence
    kept = ~flags[0]  # flags that do not differ are equal, and not looked at
    gap = np.unique(theirs[kept].astype(np.float64) - mine[kept])
    of_left = f"the right program's {sort} are those of the left one"
    if sort == "indices" and len(gap) == 1:
        return "other_input", f"{of_left} shifted by {int(gap[0]):+d}."
    if any(np.array_equal(np.flip(mine, axis), theirs) for axis in range(mine.ndim)):
        return "entry_order", f"{of_left} in reverse order."
    if kept.all() and same_entries(mine, theirs):
        return "entry_order", f"{of_left} in another order."
    if sort == "numbers" and kept.any() and np.any(mine[kept]):
        x, y = mine[kept], theirs[kept]
        factor = float((x * y).sum() / (x * x).sum())
        if np.abs(y - factor * x).max() <= SAME_MULTIPLE * np.abs(y).max():
            return "scale", f"the right program's numbers are {factor:.6g} times those of the left one."
    count = int((mine != theirs).sum())
    return "other_input", f"the two sides read different {sort}, at {count} of {mine.size} places."
