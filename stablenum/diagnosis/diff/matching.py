"""Which values two programs share, by fingerprints alone: no names, no order, no layout."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

from stablenum.diagnosis.diff.fingerprints import distance
from stablenum.diagnosis.diff.sides import Side

__all__ = ["Matching", "matched"]

_ORDER = ("forward", "backward", "update")


@dataclass(slots=True)
class Matching:
    """The values that both sides have.

    Attributes:
        left: value of the left side -> values of the right side that are equal to it.
        right: the inverse.
    """

    left: dict[int, list[int]] = field(default_factory=dict)
    right: dict[int, list[int]] = field(default_factory=dict)


def matched(left: Side, right: Side) -> Matching:
    """Return the values of the two sides that have the same fingerprint, up to rounding."""
    found, phases = Matching(), (_phases(left), _phases(right))
    rows = sorted(
        (math.log(p.absolute), i) for i, p in enumerate(left.prints) if p.entries and not left.neutral(i)
    )
    sizes = [size for size, _ in rows]
    for j, mark in enumerate(right.prints):
        if not mark.entries or right.neutral(j):
            continue
        width = right.tolerance[j] + 1e-3
        size = math.log(mark.absolute)
        low, high = bisect.bisect_left(sizes, size - width), bisect.bisect_right(sizes, size + width)
        for _, i in rows[low:high]:
            if distance(left.prints[i], mark) <= left.tolerance[i] + right.tolerance[j]:
                # What a later phase computes again says nothing of an earlier one.
                if phases[1][j] <= phases[0][i]:
                    found.left.setdefault(i, []).append(j)
                if phases[0][i] <= phases[1][j]:
                    found.right.setdefault(j, []).append(i)
    return found


def _phases(side: Side) -> list[int]:
    """Return the phase of each value as a number."""
    found = [0] * len(side.trace.values)
    for step in side.trace.steps:
        for output in step.outputs:
            found[output] = _ORDER.index(step.phase)
    return found
