"""``diff``: compare two programs."""

from __future__ import annotations

from typing import Any

import numpy as np

from stablenum.diagnosis.diff.frontier import Frontier, frontier
from stablenum.diagnosis.diff.matching import Matching, matched
from stablenum.diagnosis.diff.parameter_uses import uses_of
from stablenum.diagnosis.diff.play import Program
from stablenum.diagnosis.diff.sides import Side, measured
from stablenum.diagnosis.diff.weights import WeightMap, guessed


def compared(left: Program, right: Program) -> Any:
    a = measured(left)
    b0 = measured(right, noise=False)
    weights = guessed(uses_of(a), uses_of(b0))
    carried = weights.of(left.parameters())
    b = measured(right, weights=carried)
    found = matched(a, b)
    return a, b, found, weights, differing(a, b, weights)


def differing(a: Side, b: Side, weights: WeightMap) -> list[tuple[str, str, int, int, float]]:
    """Return the results that differ: kind, right name, the two values, and the relative difference."""
    ours = {(k, n): v for k, n, v in a.play.results}
    found = []
    for kind, name, value in b.play.results:
        theirs = b.arrays[value]
        if kind in ("loss", "output"):
            mine = next((v for (k, n), v in ours.items() if k == kind), None)
            if mine is None: continue
            other, size = a.arrays[mine].reshape(theirs.shape), None
        else:
            origin = weights.origins[name]
            mine = ours.get((kind, origin.names[0]))
            if mine is None: continue
            arrays = {n: a.arrays[ours[kind, n]] for n in origin.names}
            other = origin.of(arrays)
        scale = np.abs(other).max() or 1.0
        error = float(np.abs(other - theirs).max() / scale)
        tol = a.tolerance[mine] + b.tolerance[value]
        if error > 10*tol:
            found.append((kind, name, mine, value, error))
    return found
