"""Which values of one side are some rows of a value of the other side.

A program that picks the rows it needs, such as the tokens of an expert or sequences without their padding,
shares no value with one that computes all rows and masks the others afterwards. Its rows are shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of

__all__ = ["rows_shared"]

# The sums of one row differ by less than this on the two sides, relative to the sums of its sizes. Chosen,
# not measured; another row would have to be as near in all three sums.
_CLOSE = 1e-8
# A row of one number has no marks of its own.
_LEAST_WIDTH = 2
# The entries of a value, and of all values together, which are held at once: 2 MiB and 128 MiB in float64.
# Chosen, not measured.
_MOST_ELEMENTS, _MOST_IN_ALL = 2**18, 2**24
# So many rows, spread over a value, tell where it comes from. Chosen, not measured.
_MOST_ROWS = 256


class _Table(NamedTuple):
    """The rows of all values of one phase and width, in the order of their sizes.

    Attributes:
        marks: the sums of |x|, x and x^2 of each row.
        owners: the value that each row belongs to.
        counts: value -> how many rows it has.
    """

    marks: Any
    owners: Any
    counts: Mapping[int, int]


def rows_shared(
    left: Side, right: Side, known_left: Mapping[int, list[int]], known_right: Mapping[int, list[int]]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return for each side the values that hold some rows of one of the other side, in both directions.

    A value that a step only picks from another one counts if that one has a counterpart.

    Args:
        left, right: the sides.
        known_left, known_right: what they share as a whole or in parts; of these values, none is the one with
            more rows.
    """
    known = known_left, known_right
    mine, theirs = _tables(left), _tables(right)
    found: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    pairs = [(i, j, 0) for key in mine.keys() & theirs.keys() for i, j in _within(mine[key], theirs[key])]
    pairs += [(j, i, 1) for key in mine.keys() & theirs.keys() for j, i in _within(theirs[key], mine[key])]
    for few, many, side in sorted(pairs, key=lambda p: p[p[2]]):
        other = 1 - side
        if many in known[other] or not _follows((left, right)[side], few, {*known[side], *found[side]}):
            continue
        found[side].setdefault(few, []).append(many)
        found[other].setdefault(many, []).append(few)
    return found


def _follows(side: Side, value: int, known: set[int]) -> bool:
    """Return whether a value was computed, or moved from one that has a counterpart."""
    if value >= len(side.trace.values):  # what a loop computes, put together
        return True
    producer = side.trace.values[value].producer
    step = None if producer is None else side.trace.steps[producer]
    return step is None or not quiet(step) or bool(known.intersection(step.inputs))


def _tables(side: Side) -> dict[tuple[str, int], _Table]:
    """Return the rows of what a side computes, by phase and width."""
    phases, room = dict[int, str](), _MOST_IN_ALL
    for step in side.trace.steps:
        for value in step.outputs:
            shape = side.shapes[value]
            size = int(np.prod(shape, dtype=int))
            if side.neutral(value) or len(shape) < 2 or shape[-1] < _LEAST_WIDTH:
                continue
            if step.phase != "update" and size <= min(_MOST_ELEMENTS, room):
                phases[value], room = step.phase, room - size
    marks: dict[tuple[str, int], list[tuple[int, Any]]] = {}
    for value, array in arrays_of(side, phases).items():
        width = side.shapes[value][-1]
        marks.setdefault((phases[value], width), []).append((value, _marks(array.reshape(-1, width))))
    return {key: _sorted(rows) for key, rows in marks.items()}


def _marks(rows: Any) -> Any:
    """Return the marks of the rows that are not zero."""
    with np.errstate(all="ignore"):
        marks = np.stack([np.abs(rows).sum(1), rows.sum(1), (rows * rows).sum(1)], axis=1)
    return marks[np.isfinite(marks).all(1) & (marks[:, 0] > 0)]


def _sorted(rows: list[tuple[int, Any]]) -> _Table:
    marks = np.concatenate([m for _, m in rows])
    owners = np.concatenate([np.full(len(m), value) for value, m in rows])
    order = np.argsort(marks[:, 0], kind="stable")
    return _Table(marks[order], owners[order], {value: len(m) for value, m in rows})


def _within(few: _Table, many: _Table) -> Iterator[tuple[int, int]]:
    """Yield the values all of whose rows are among those of a value of the other side with more rows, the
    fewest of all such values."""
    for value, count in few.counts.items():
        rows = few.marks[few.owners == value]
        owners: set[int] | None = None
        for row in rows[:: max(1, count // _MOST_ROWS)]:
            owners = _owners(row, many) if owners is None else owners & _owners(row, many)
            if not owners:
                break
        larger = {j: many.counts[j] for j in sorted(owners or ()) if many.counts[j] > count}
        yield from ((value, j) for j, n in larger.items() if n == min(larger.values()))


def _owners(row: Any, table: _Table) -> set[int]:
    """Return the values that have a row."""
    width = _CLOSE * row[0]
    low, high = np.searchsorted(table.marks[:, 0], (row[0] - width, row[0] + width))
    near = table.marks[low:high]
    same = (np.abs(near[:, 1] - row[1]) <= width) & (np.abs(near[:, 2] - row[2]) <= _CLOSE * row[2])
    return set(table.owners[low:high][same].tolist())
