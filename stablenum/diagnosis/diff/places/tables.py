"""Tables that a program holds in float32.

A schedule or the angles of a rotation are often computed once and kept in float32: on one side only, or on
both, but rounded at different stages. That is no difference of the programs, and it is a million times what
rounding does in a float64 twin. How far it goes is measured: a side is evaluated again with each of its
float32 constants that the other side does not have moved by a unit in the last place, up or down by chance.
Values that depend on constants alone, and differ by no more than that, are taken for one: the right program
is given the left one's, so that everything that follows is compared as exactly as elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.flow import OTHER
from stablenum.diagnosis.diff.places.locations import location_of
from stablenum.diagnosis.diff.places.regions import Start
from stablenum.diagnosis.diff.sides.equality import SAME_ARRAY
from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint, distance
from stablenum.diagnosis.diff.sides.play import SEED, if_recorded
from stablenum.diagnosis.diff.sides.sides import MOST_ENTRIES, KnownArrays, Side, arrays_of, depending
from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.replay.trace import Value

__all__ = ["with_common_tables"]

# A unit in the last place of float32 just above a power of two: twice what rounding to the nearest does, as
# the numbers that were rounded may have been computed from such.
_UNIT = 2.0**-23
# Signs are drawn so many times, and what a value moves in all draws may be exceeded by this factor: a table
# that is computed in float32 throughout is off by some units, as its angles are rounded too. Chosen, not
# measured.
_DRAWS, _FACTOR = 2, 8.0
# Tables are no larger than this: 512 positions of 128 features. Chosen, not measured.
_MOST = 2**16
_NOTE = (
    "The two programs have the same table{} in float32, rounded at different stages: the right one is "
    "compared with the left one's."
)


def with_common_tables(comparison: Comparison) -> Comparison:
    """Return the comparison in which tables are one that differ by the rounding of constants to float32; the
    one that is given if there are none, or if the programs agree as they are."""
    if comparison.differing is None:
        return comparison
    own = {name: _own_constants(comparison, name) for name in OTHER}
    if not any(own.values()):
        return comparison
    left, right = (_tables(comparison, name, own[name]) for name in ("left", "right"))
    values = dict[int, Any]()
    for j, (array, moved) in right.items():
        given = (_in_place_of(array, x, _FACTOR * (moved + m)) for x, m in left.values() if moved + m)
        found = next((x for x in given if x is not None), None)
        if found is not None:
            values[j] = found
    if not values:
        return comparison
    common = comparison.with_values("right", values)
    common.notes = (*comparison.notes, _NOTE.format(_line_of(comparison.right, min(values))))
    common.but_for_constants = True
    return common


def _tables(comparison: Comparison, name: str, constants: Mapping[int, Any]) -> dict[int, tuple[Any, float]]:
    """Return what a side reads that depends on no data, each array with how far its constants move it."""
    side = comparison.side(name)
    values = list(_room(side, _last(side, comparison.found.known(name))))
    found, generator = arrays_of(side, values), np.random.default_rng(SEED)
    moved = dict.fromkeys(values, 0.0)
    for _ in range(_DRAWS if constants and values else 0):
        signs = {v: generator.integers(0, 2, x.shape) * 2 - 1 for v, x in constants.items()}
        given = {v: x * (1 + _UNIT * signs[v]) for v, x in constants.items()}
        moving = replace(side, replaced={**side.replaced, **given})
        others = if_recorded(partial(arrays_of, moving, values), KnownArrays())
        for v, x in others.items():
            moved[v] = max(moved[v], float(np.abs(x - found[v]).max(initial=0.0)))
    return {v: (x, moved[v]) for v, x in found.items()}


def _own_constants(comparison: Comparison, name: str) -> dict[int, Any]:
    """Return the arrays of float32 from outside that only one side has, but for parameters."""
    side, other = comparison.side(name), comparison.side(OTHER[name])
    # A number such as an epsilon may be there thousands of times.
    theirs = {other.prints[v.id] for v in other.trace.values if v.producer is None and v.role}
    known = comparison.found.known(name)
    wanted = [
        v.id
        for v in side.trace.values
        if v.producer is None
        and v.role in ("constant", "buffer", "input")
        and v.id not in known
        and _tells(side.prints[v.id])
        and side.prints[v.id] not in theirs
        and not any(distance(side.prints[v.id], t) <= SAME_ARRAY for t in theirs)
    ]
    return {v: x for v, x in arrays_of(side, _room(side, wanted)).items() if _is_rounded(x)}


def _tells(mark: Fingerprint) -> bool:
    return bool(mark.entries) and mark.floating and not mark.simple


def _last(side: Side, known: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """Yield the values of a forward pass that depend on no data and are read together with data, but for
    those that the other side has."""

    def is_data(value: Value) -> bool:
        # What a loss function of PyTorch reads without having been given it is an input, too.
        return value.role == "parameter" or (value.role == "input" and value.id in known)

    free = [not d for d in depending(side.trace, is_data)]
    read = dict.fromkeys(
        i
        for s in side.trace.steps
        if s.phase == "forward" and not all(free[o] for o in s.outputs)
        for i in s.inputs
    )
    yield from (i for i in sorted(read) if free[i] and i not in known and _tells(side.prints[i]))


def _room(side: Side, values: Iterable[int]) -> Iterator[int]:
    """Yield the values that are no larger than a table, as long as they take no more memory than that."""
    room = MOST_ENTRIES
    for value in values:
        size = int(np.prod(side.shapes[value], dtype=int))
        if size <= min(_MOST, room):
            room -= size
            yield value


def _is_rounded(array: Any) -> bool:
    if np.iscomplexobj(array):
        return False
    with np.errstate(all="ignore"):
        return bool((array.astype(np.float32).astype(np.float64) == array).all())


def _in_place_of(array: Any, other: Any, allowed: float) -> Any:
    """Return the numbers of another table in the place of those of an array, if none differs by more than is
    allowed; None if one does. Axes along which nothing changes do not count. Tables in another order, such as
    that of a rotation of neighbours and of halves, are compared in the order of their sizes."""
    if np.iscomplexobj(array) or np.iscomplexobj(other):
        return None
    lean, its = _without_repeats(array), _without_repeats(other)
    if its.size != lean.size:
        return None
    for way in layouts(its.shape, lean.shape, "other"):
        turned = its.transpose(way).reshape(lean.shape)
        if np.abs(turned - lean).max(initial=0.0) <= allowed:
            return np.broadcast_to(turned, array.shape).copy()
    ranked = np.empty(lean.size)
    ranked[np.argsort(lean, axis=None, kind="stable")] = np.sort(its, axis=None)
    ranked = ranked.reshape(lean.shape)
    if np.abs(ranked - lean).max(initial=0.0) > allowed:
        return None
    return np.broadcast_to(ranked, array.shape).copy()


def _without_repeats(array: Any) -> Any:
    """Return an array with each axis along which all entries are equal cut to a length of one."""
    for axis in range(array.ndim):
        first = array.take([0], axis) if array.shape[axis] > 1 else array
        array = first if array.shape[axis] > 1 and (array == first).all() else array
    return array


def _line_of(side: Side, value: int) -> str:
    """Return the line that makes a value, or that reads it first if it comes from outside."""
    producer = side.trace.values[value].producer
    reads = (s for s in side.trace.steps if value in s.inputs)
    step = next(reads, None) if producer is None else side.trace.steps[producer]
    place = None if step is None else location_of(Start(step), side, step.phase)
    return "" if place is None else f" ({place.where})"
