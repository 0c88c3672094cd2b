"""Name the cause by giving a line the other side's indices, flags or constant array."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.by_value import of_masks
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.arrangement import chain_of
from stablenum.diagnosis.diff.places.frontier import Start, same_line
from stablenum.diagnosis.diff.sides.equality import SAME_ARRAY, SAME_MULTIPLE
from stablenum.diagnosis.diff.sides.sides import MOST_ENTRIES, Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_array"]

# Of the arrays that a line reads, so many are compared with those of the other line. Chosen, not measured.
_MOST_READ = 6
_HEALED = "With the left program's {} there, the two sides agree."


class _Read(NamedTuple):
    """An array that a line reads and that is no value of the comparison: indices, flags or a constant."""

    value: int
    array: Any


def by_array(scene: Scene) -> Iterator[Proposal]:
    """Propose the left line's indices, flags and constant arrays for those of the right line, of which both
    have as many, in other numbers or in another order."""
    starts = {name: (side, start, region) for name, side, start, region in scene.forward_starts()}
    if len(starts) < 2:
        return
    mine, theirs = (_read(*starts[name], scene.comparison.found.known(name)) for name in ("left", "right"))
    mine, theirs = (
        [r for r in some if not any(_equal(r.array, o.array) for o in others)]
        for some, others in ((mine, theirs), (theirs, mine))
    )
    for here, there in product(mine, theirs):
        if here.array.size == there.array.size and _sort(here.array) == _sort(there.array):
            yield from _proposals(here.array.reshape(there.array.shape), there)


def _read(side: Side, start: Start, region: tuple[Step, ...], shared: Collection[int]) -> list[_Read]:
    """Return the arrays that a line reads from outside it and that are whole numbers, flags or constants, or
    are given to this program alone."""
    line = (start.step, *same_line(start, region))
    made = {o for s in line for o in s.outputs}
    found = list[int]()
    for step in line:
        for value in (v for v in step.inputs if v not in made and np.prod(side.shapes[v], dtype=int) > 1):
            given = side.trace.values[chain_of(side.trace, value)[-1]].producer is None
            alone = given and not side.trained[value] and value not in shared
            if alone or not side.depends[value] or not side.prints[value].floating:
                found.append(value)
    kept = [v for v in dict.fromkeys(found) if np.prod(side.shapes[v], dtype=int) <= MOST_ENTRIES][
        :_MOST_READ
    ]
    return [_Read(v, a) for v, a in arrays_of(side, kept).items() if a.dtype.kind in "biuf"]


def _sort(array: Any) -> str:
    return {"b": "flags", "i": "indices", "u": "indices"}.get(array.dtype.kind, "constants")


def _equal(a: Any, b: Any) -> bool:
    if a.size != b.size or _sort(a) != _sort(b):
        return False
    x, y = np.ravel(a), np.ravel(b)
    if a.dtype == bool:
        return bool((x == y).all() or (x != y).all())
    size = float(np.abs(x).max(initial=0.0)) or 1.0
    return bool(np.abs(x * 1.0 - y).max(initial=0.0) <= SAME_ARRAY * size)


def _proposals(wanted: Any, there: _Read) -> Iterator[Proposal]:
    """Yield the proposal for flags as they are and, as one side may say which entries are kept and the other
    one which are not, the other way round."""
    sort = _sort(there.array)
    for array in (wanted, ~wanted) if sort == "flags" else (wanted,):
        code, sentence = _said(array, there.array, sort)
        yield Proposal(code, sentence, [(Edit("right", {there.value: array}),)], _HEALED.format(sort))


def _said(mine: Any, theirs: Any, sort: str) -> tuple[str, str]:
    """Return the code and what the right array is, compared with the left one."""
    if sort == "flags":
        reason = of_masks(mine, theirs, "set")
        return reason.code, reason.sentence
    gap = np.unique(theirs.astype(np.float64) - mine)
    if sort == "indices" and len(gap) == 1:
        return (
            "other_input",
            f"the right program's indices are those of the left one shifted by {int(gap[0]):+d}.",
        )
    for axis in range(mine.ndim):
        if np.array_equal(np.flip(mine, axis), theirs):
            return "entry_order", f"the right program's {sort} are those of the left one in reverse order."
    if np.array_equal(np.sort(mine, axis=None), np.sort(theirs, axis=None)):
        return "entry_order", f"the right program's {sort} are those of the left one in another order."
    if sort == "constants" and np.any(mine):
        factor = float((mine * theirs).sum() / (mine * mine).sum())
        if np.abs(theirs - factor * mine).max() <= SAME_MULTIPLE * np.abs(theirs).max():
            return "scale", f"the right program's constants are {factor:.6g} times those of the left one."
    count = int((mine != theirs).sum())
    return "other_input", f"the two sides have different {sort}, at {count} of {mine.size} places."
