"""Results that are not finite in either program: nothing can be compared there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.places.locations import location_of, result_name
from stablenum.diagnosis.diff.sides.sides import Side, first_with

__all__ = ["not_finite"]

_TEXT = (
    "the {} is {} in both programs, so that nothing can be compared there. {} appears in the left program "
    "first in {}, in the right program first in {}. Give both a batch and weights whose results are finite; "
    "`stablenum explain` finds what makes them non-finite."
)


def not_finite(comparison: Comparison) -> str | None:
    """Return which result says nothing because both programs give NaN there, or no finite number at all.

    Infinities beside finite numbers, such as masked scores, are compared like these.
    """
    for pair in (p for g in comparison.groups for p in g.pairs):
        arrays = comparison.left.arrays.get(pair.left.value), comparison.right.arrays.get(pair.right.value)
        if any(
            array is None for array in arrays
        ):  # of a recorded program: its fingerprint tells of NaN alone
            continue
        for word, bad, first in (("NaN", _has_nan, _has_nan), ("infinite", _has_no_number, _has_infinity)):
            if all(map(bad, arrays)):
                name = result_name(pair.right.kind, pair.right.name)
                places = [_first(side, first) for side in (comparison.left, comparison.right)]
                return _TEXT.format(name, word, "NaN" if word == "NaN" else "An infinity", *places)
    return None


def _first(side: Side, holds: Callable[[Any], bool]) -> str:
    """Return where a side first has such a value."""
    index = first_with(side, holds)
    if index is None:
        return "an operation that is not recorded"
    value = side.trace.values[index]
    if value.producer is None:
        what = {"input": "argument", "": "value"}.get(value.role, value.role)
        return f"its {what} {value.name} {list(side.shapes[index])}"
    step = side.trace.steps[value.producer]
    place = location_of(Start(step), side, step.phase)
    assert place is not None
    return f"{place.operation} ({place.where}, {step.phase})"


def _floating(x: Any) -> bool:
    return bool(x.dtype.kind in "fc" and x.size)


def _has_nan(x: Any) -> bool:
    return _floating(x) and bool(np.isnan(x).any())


def _has_infinity(x: Any) -> bool:
    return _floating(x) and bool(np.isinf(x).any())


def _has_no_number(x: Any) -> bool:
    return _floating(x) and not np.isfinite(x).any()
