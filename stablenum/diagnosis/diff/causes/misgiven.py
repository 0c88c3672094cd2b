"""Find where the map that a caller gives is more likely at fault than the programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.by_weight import held_otherwise
from stablenum.diagnosis.diff.differences import MOST_NAMED
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.weights.carrying import carried
from stablenum.diagnosis.diff.weights.layouts import MOST_AXES
from stablenum.diagnosis.diff.weights.settling import values_shared
from stablenum.diagnosis.diff.weights.weights import UnmappedError

__all__ = ["misgiven", "other_numbers"]

_OTHER = "These parameters of the right program hold other numbers than their counterparts on the left: {}."
_ALL_OTHER = "All parameters of the right program hold other numbers than their counterparts on the left."
_NOTE = "The fault may lie in weights rather than in the programs: there, {}. As the match has {}, {}."


def other_numbers(comparison: Comparison) -> tuple[str, ...]:
    """Return a note on the parameters that hold other numbers than their counterparts, of programs that keep
    their own."""
    names = held_otherwise(comparison)
    if not names:
        return ()
    if len(names) == len(comparison.weights.origins):
        return (_ALL_OTHER,)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (_OTHER.format(", ".join(names[:MOST_NAMED]) + more),)


def misgiven(comparison: Comparison) -> tuple[str, ...]:
    """Return a note on the arrays that are transposed or exchanged, compared with what the match finds for
    the same parameters, if the programs share more values with that."""
    left, right = comparison.left, comparison.right
    given = right.weights or {}
    try:
        found = carried(left, right.program, "match")[1] or {}
    except UnmappedError:
        return ()
    said = {name: words for name in given if name in found and (words := _said(name, given[name], found))}
    if not said:
        return ()
    now, _ = values_shared(left, right.program, given)
    then, agree = values_shared(left, right.program, {**given, **{name: found[name] for name in said}})
    if then <= now and not agree:
        return ()
    shown = [f"{name} is {words}" for name, words in said.items()]
    more = f"; and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    what = "the forward passes agree" if agree else f"{then} values of the right one are shared, not {now}"
    them = "it" if len(said) == 1 else "them"
    return (_NOTE.format("; ".join(shown[:MOST_NAMED]) + more, them, what),)


def _said(name: str, given: Any, found: Mapping[str, Any]) -> str:
    """Return what an array is in the map that is found; "" for what it should be, and for another array."""
    if _same(given, found[name]):
        return ""
    if any(_same(given, x) for x in _turned(found[name])):
        return "transposed"
    for other, array in found.items():
        if array.size == given.size and any(_same(given, x) for x in (array, *_turned(array))):
            return f"what the match gives {other}"
    return ""


def _same(a: Any, b: Any) -> bool:
    return np.size(a) == np.size(b) and np.array_equal(np.ravel(a), np.ravel(b))


def _turned(x: Any) -> Iterator[Any]:
    """Yield an array with its axes in other orders, also with the two axes of a matrix that was reshaped."""
    if x.ndim <= MOST_AXES:
        orders = itertools.permutations(range(x.ndim))
        yield from (x.transpose(order) for order in orders if list(order) != sorted(order))
    for i in range(1, x.ndim):
        yield x.reshape(math.prod(x.shape[:i]), -1).T
