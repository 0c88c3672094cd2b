"""Find the parameters that only one of two programs trains.

The other one gives no gradient for them, so that there is no pair of gradients or updates to compare. What
one side leaves out is taken as zero, and what it does not update as unchanged. Two programs may well freeze
one parameter in different ways: one by giving no gradient, the other by leaving it out of the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.remedies import REMEDIES
from stablenum.diagnosis.diff.differences import MOST_NAMED, Cause, Difference
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.flow import OTHER
from stablenum.diagnosis.diff.places.frontier import Frontier, Start
from stablenum.diagnosis.diff.places.locations import location_of, result_name
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.diff.weights.origins import Source
from stablenum.diagnosis.diff.weights.parameter_uses import first_uses

__all__ = ["OneSided", "one_sided"]

# A gradient this much smaller than the largest one is a rounding error of zero, and so is such an update.
# Chosen, not measured.
_NOTHING = 1e-10


@dataclass(frozen=True, slots=True)
class OneSided:
    """Parameters that only one side trains.

    Attributes:
        difference: what is reported.
        place: where both sides use the first of them.
        trains: the side that trains them.
        array: the gradient of the first of them there, or its update if it has no gradient.
    """

    difference: Difference
    place: Frontier
    trains: str
    array: Any


@dataclass(frozen=True, slots=True)
class _Case:
    """A parameter that only one side trains; the attributes are those of its difference."""

    name: str
    origin: Source
    trains: str
    phase: str
    array: Any


def one_sided(comparison: Comparison) -> list[OneSided]:
    """Return the parameters that only one side trains, by side and by what trains them: a gradient, or an
    update without one, such as a decay."""
    cases = list(_cases(comparison))
    keys = dict.fromkeys((c.phase, c.trains) for c in cases)
    return [_one_sided(comparison, [c for c in cases if (c.phase, c.trains) == key]) for key in sorted(keys)]


def _cases(comparison: Comparison) -> Iterator[_Case]:
    mine, theirs = _Training(comparison.left), _Training(comparison.right)
    if not mine.gradients or not theirs.gradients:
        return
    optimized = bool(mine.updated) and bool(theirs.updated)
    for name, origin in comparison.weights.origins.items():
        if not (mine.has(*origin.names) and theirs.has(name)):
            continue
        lacks_left = [n for n in origin.names if n not in mine.gradients]
        lacks_right = name not in theirs.gradients
        if bool(lacks_left) == lacks_right:
            continue
        trains, side = ("right", theirs) if lacks_left else ("left", mine)
        names = [name] if lacks_left else list(origin.names)
        array = side.gradient(names)
        moved = max((side.moved(n) for n in names), key=_size) if optimized else None
        if optimized and not _size(moved):
            continue
        if _size(array):
            yield _Case(name, origin, trains, "backward", array)
        elif moved is not None:
            yield _Case(name, origin, trains, "update", moved)


class _Training:
    """What one side does to its parameters in the first step."""

    def __init__(self, side: Side) -> None:
        self._start = {**side.program.parameters(), **(side.weights or {})}
        first = [r for r in side.play.results if r.step == 1]
        self.gradients = {r.name: _array(side, r.value) for r in first if r.kind == "gradient"}
        self.updated = {r.name: _array(side, r.value) for r in first if r.kind == "updated"}
        self._prints = {r.name: side.prints[r.value] for r in first if r.kind == "updated"}
        self._largest = max(map(_size, self.gradients.values()), default=0.0)
        self._parameters = {v.name for v in side.trace.values if v.role == "parameter"}

    def has(self, *names: str) -> bool:
        """Return whether these are parameters, rather than running statistics."""
        return self._parameters.issuperset(names)

    def gradient(self, names: Sequence[str]) -> Any:
        """Return the largest gradient; zeros if all of them are rounding errors."""
        largest = max((self.gradients[n] for n in names), key=_size)
        return largest if _size(largest) > _NOTHING * self._largest else np.zeros_like(largest)

    def moved(self, name: str) -> Any:
        """Return how the first update changes a parameter."""
        before = np.asarray(self._start[name], float)
        if name not in self.updated:
            return np.zeros_like(before)
        if self.updated[name].size != before.size:  # its numbers are not recorded
            gap = distance(self._prints[name], fingerprint(before))
            return np.asarray([gap if gap > _NOTHING else 0.0])
        change = self.updated[name].reshape(before.shape) - before
        # What was 0 has moved by any change; differences below 1e-308 have no digits in float64.
        return change if _size(change) > _NOTHING * max(_size(before), 1e-300) else np.zeros_like(before)


def _array(side: Side, value: int) -> Any:
    """Return the array of a result; its largest entry alone if a recorded program knows no more."""
    mark = side.prints[value]
    return side.arrays.get(value, np.asarray([max(-mark.least, mark.greatest)]))


def _size(x: Any) -> float:
    return float(np.abs(x).max(initial=0.0))


def _one_sided(comparison: Comparison, cases: Sequence[_Case]) -> OneSided:
    steps = {
        "left": first_uses(comparison.left, {n for c in cases for n in c.origin.names}),
        "right": first_uses(comparison.right, {c.name for c in cases}),
    }
    order = {name: step.index for name, step in steps["right"].items()}
    cases = sorted(cases, key=lambda c: order.get(c.name, len(comparison.right.trace.steps)))
    first = cases[0]
    updates = first.phase == "update"
    used = {
        "left": next((steps["left"][n] for n in first.origin.names if n in steps["left"]), None),
        "right": steps["right"].get(first.name),
    }
    left, right = (
        None if step is None else Start(step, missing=updates and side != first.trains)
        for side, step in used.items()
    )
    named = {"left": ", ".join(first.origin.names), "right": first.name}
    difference = Difference(
        left=location_of(left, comparison.left, first.phase),
        right=location_of(right, comparison.right, first.phase),
        result=result_name("updated" if updates else "gradient", first.origin.names[0]),
        step=1,
        error=1.0,
        allowed=_NOTHING,
        causes=(_cause(first, [_names(c, OTHER[c.trains]) for c in cases], named),),
    )
    return OneSided(difference, Frontier(left, right, (), ()), first.trains, first.array)


def _names(case: _Case, side: str) -> str:
    return ", ".join(case.origin.names) if side == "left" else case.name


def _cause(first: _Case, frozen: Sequence[str], named: Mapping[str, str]) -> Cause:
    said = ", ".join(list(dict.fromkeys(frozen))[:MOST_NAMED])
    more = len(set(frozen)) - MOST_NAMED
    all_of_them = said if more <= 0 else f"{said} and {more} more"
    code = "stopped_gradient" if first.phase == "backward" else "decay_excluded"
    what = "gradient" if first.phase == "backward" else "update"
    evidence = (
        f"The {what} of {named[first.trains]} in the {first.trains} program has entries up to "
        f"{_size(first.array):.3g}; the {OTHER[first.trains]} one computes none."
    )
    return Cause(
        code=code,
        sentence=_SENTENCES[first.phase].format(
            frozen=OTHER[first.trains], trains=first.trains, names=all_of_them
        ),
        evidence=evidence,
        remedy=REMEDIES[code] if first.phase == "update" else _REMEDY,
        confirmed=False,
    )


_SENTENCES = {
    "backward": "the {frozen} program gives no gradient for {names}, as if frozen; the {trains} one trains "
    "it.",
    "update": "the {frozen} program leaves {names} as it is, without a gradient; in the {trains} one the "
    "optimizer changes it, although its gradient is zero.",
}
_REMEDY = (
    "Train it on both sides or on neither: requires_grad and freeze= in torch, a filter, stop_gradient or a "
    "mask of the optimizer in JAX."
)
