"""Tables that one side holds in float32 and that the other one computes.

A schedule or the angles of a rotation are often computed once, in float64 or on another machine, and kept in
float32. A program that computes them as it runs has them exactly in a float64 twin. The rounding of a table
is no difference of the programs, and it is a million times what rounding does in float64. So a table that is
the rounding of what the other side computes is replaced by that. If both sides hold the table, one may have
been computed in float32: two tables are taken for one if they differ by a few units in the last place of
their largest entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.flow import OTHER
from stablenum.diagnosis.diff.places.locations import location_of
from stablenum.diagnosis.diff.places.regions import Start
from stablenum.diagnosis.diff.sides.sides import MOST_ENTRIES, Side, arrays_of, depending
from stablenum.diagnosis.replay.trace import Value

__all__ = ["with_exact_tables"]

_ROUNDING = 2.0**-24  # of float32: half a unit in the last place
_UNITS = 8  # a sine or a root of a product that was rounded is off by some
# A table has at least so many entries, since one or two may be as near by accident, and at most 512 positions
# of 128 features. Chosen, not measured.
_LEAST, _MOST = 3, 2**16
_NOTE = "The {} program holds in float32 what the {} one computes{}: compared as if it were exact."
_ALIKE = (
    "A table of the {} program and one of the {} one{} differ by float32's rounding: compared as if they "
    "were one table."
)


def with_exact_tables(comparison: Comparison) -> Comparison:
    """Return the comparison in which tables of float32 are what the other side computes; the one that is
    given if there are none, or if the programs agree as they are."""
    if comparison.differing is None:
        return comparison
    notes = comparison.notes
    for name in ("left", "right"):
        for note, alike in ((_NOTE, _rounds_to), (_ALIKE, _rounds_alike)):
            values, line = _exact(comparison, name, alike)
            if values:
                comparison = comparison.with_values(name, values)
                notes = (*notes, note.format(name, OTHER[name], line))
    comparison.notes = notes
    return comparison


def _exact(
    comparison: Comparison, name: str, alike: Callable[[Any, Any], bool]
) -> tuple[Mapping[int, Any], str]:
    """Return the other side's numbers for the tables of a side that are like them, and the line at which the
    first one is made."""
    side, other = comparison.side(name), comparison.side(OTHER[name])
    wanted = list(_room(side, (v for v in _telling(comparison, name) if not side.trained[v])))
    free = _without_data(other)
    made = list(_room(other, (v for v in _telling(comparison, OTHER[name]) if free[v])))
    if not wanted or not made:
        return {}, ""
    computed = {v: np.ravel(a) for v, a in arrays_of(other, made).items()}
    found, line = dict[int, Any](), ""
    for value, array in arrays_of(side, wanted).items():
        if _follows(side, value, found) or not _is_rounded(array):
            continue
        source = next((v for v, a in computed.items() if alike(a, np.ravel(array))), None)
        if source is not None:
            found[value] = _in_order(computed[source], array)
            line = line or _line_of(other, source)
    return found, line


def _telling(comparison: Comparison, name: str) -> Iterator[int]:
    """Yield the numbers of a side's forward pass, and of what it was given, that the other side does not
    have."""
    side, known = comparison.side(name), comparison.found.known(name)
    for value in side.trace.values:
        producer = None if value.producer is None else side.trace.steps[value.producer]
        mark = side.prints[value.id]
        if producer is not None and producer.phase != "forward":
            continue
        if value.id not in known and mark.floating and not mark.simple and mark.entries >= _LEAST:
            yield value.id


def _room(side: Side, values: Iterator[int]) -> Iterator[int]:
    """Yield the values that are no larger than a table, as long as they take no more memory than that."""
    room = MOST_ENTRIES
    for value in values:
        size = int(np.prod(side.shapes[value], dtype=int))
        if size <= min(_MOST, room):
            room -= size
            yield value


def _without_data(side: Side) -> list[bool]:
    """Return whether each value depends on no parameter and on no numbers that the program was given."""

    def is_data(value: Value) -> bool:
        return value.role == "parameter" or (value.role == "input" and side.prints[value.id].floating)

    return [not d for d in depending(side.trace, is_data)]


def _follows(side: Side, value: int, found: Mapping[int, Any]) -> bool:
    """Return whether a value is made of a table that is known."""
    todo, seen = [value], set[int]()
    while todo and found:
        one = todo.pop()
        if one in found:
            return True
        producer = side.trace.values[one].producer
        if producer is not None and producer not in seen:
            seen.add(producer)
            todo += side.trace.steps[producer].inputs
    return False


def _is_rounded(array: Any) -> bool:
    if np.iscomplexobj(array):
        return False
    with np.errstate(all="ignore"):
        return bool((array.astype(np.float32).astype(np.float64) == array).all())


def _rounds_to(exact: Any, rounded: Any) -> bool:
    """Return whether numbers are the roundings of others, in whatever order."""
    if exact.size != rounded.size:
        return False
    a, b = np.sort(exact), np.sort(rounded)
    return bool((np.abs(a - b) <= _ROUNDING * np.abs(a)).all()) and not np.array_equal(a, b)


def _rounds_alike(one: Any, other: Any) -> bool:
    """Return whether two tables of float32, in whatever order, are the same but for its rounding."""
    if one.size != other.size or not _is_rounded(one):
        return False
    a, b = np.sort(one), np.sort(other)
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= _UNITS * _ROUNDING * np.abs(a).max()
    return bool(near.all()) and not np.array_equal(a, b)


def _in_order(exact: Any, array: Any) -> Any:
    """Return the exact numbers in the order of their roundings, which is their own if it fits."""
    as_they_lie = exact.reshape(array.shape)
    if np.allclose(as_they_lie, array, rtol=0.0, atol=_UNITS * _ROUNDING * np.abs(array).max()):
        return as_they_lie
    found = np.empty(array.size, np.float64)
    found[np.argsort(np.ravel(array), kind="stable")] = np.sort(exact)
    return found.reshape(array.shape)


def _line_of(side: Side, value: int) -> str:
    producer = side.trace.values[value].producer
    step = None if producer is None else side.trace.steps[producer]
    place = None if step is None else location_of(Start(step), side, step.phase)
    return "" if place is None else f" ({place.where})"
