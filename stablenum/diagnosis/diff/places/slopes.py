"""The slope of a loss in one direction of all parameters, by its gradients and by finite differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.play import ReplacedError
from stablenum.diagnosis.diff.sides.sides import arrays_of

__all__ = ["SAME_SLOPE", "Direction", "direction_of"]

# Central differences in float64: the error is about the square of the step, and 1e-16 over the step.
_STEP = 1e-6
# Two slopes of which one was measured agree if they differ by less than this part: the rounding of a loss,
# 1e-16 of it, becomes 1e-10 of it in a slope, which may be small beside the loss.
SAME_SLOPE = 1e-5


@dataclass(frozen=True, slots=True)
class Direction:
    """A direction of the parameters that both sides train, the same on both.

    Attributes:
        comparison: the two programs.
        group: the gradients.
        along: for each side, the direction by the parameter's name.
    """

    comparison: Comparison
    group: Group
    along: Mapping[str, Mapping[str, Any]]

    def given(self, name: str) -> float:
        """Return the slope that the gradients of a side give."""
        side = self.comparison.side(name)
        return sum(
            float((side.arrays[r.value] * self.along[name][r.name]).sum())
            for r in side.play.results
            if (r.kind, r.step) == ("gradient", self.group.step) and r.name in self.along[name]
        )

    def measured(self, name: str) -> float:
        """Return the slope of the loss of a side by finite differences."""
        up, down = (self._loss(name, self._moved(name, sign)) for sign in (1, -1))
        return (up - down) / (2 * _STEP)

    def through(self, name: str, places: Sequence[Sequence[int]]) -> Iterator[float]:
        """Yield for each of some places the part of the slope of a side that passes through its values."""
        wanted = {v for values in places for v in values}
        moved = [self._arrays(name, sign, wanted) for sign in (1, -1)]
        for values in places:
            yield self._slope(name, values, moved)

    def through_alone(
        self, name: str, places: Sequence[Sequence[int]], held: Iterable[int]
    ) -> Iterator[float]:
        """Yield the same without what reaches the values of a place through others, which are held."""
        fixed = arrays_of(self.comparison.side(name), held)
        for values in places:
            others = {v: x for v, x in fixed.items() if v not in values}
            yield self._slope(name, values, [self._arrays(name, sign, values, others) for sign in (1, -1)])

    def _slope(self, name: str, values: Sequence[int], moved: Sequence[Mapping[int, Any]]) -> float:
        up, down = (self._loss(name, {v: arrays[v] for v in values}) for arrays in moved)
        return (up - down) / (2 * _STEP)

    @property
    def _losses(self) -> Group:
        return next(g for g in self.comparison.groups if (g.kind, g.step) == ("loss", self.group.step))

    def _loss(self, name: str, values: Mapping[int, Any]) -> float:
        after = self.comparison.with_values(name, values, until=self._losses).side(name)
        return sum(float(after.arrays[getattr(p, name).value]) for p in self._losses.pairs)

    def _arrays(
        self, name: str, sign: int, wanted: Iterable[int], held: Mapping[int, Any] = MappingProxyType({})
    ) -> dict[int, Any]:
        """Return values of a side whose parameters are moved; as they are if its operations do not fit."""
        side = self.comparison.side(name)
        given = {**side.replaced, **held, **self._moved(name, sign)}
        try:
            return arrays_of(replace(side, replaced=given), wanted)
        except ReplacedError:
            return arrays_of(side, wanted)

    def _moved(self, name: str, sign: int) -> dict[int, Any]:
        side, along = self.comparison.side(name), self.along[name]
        of = {v.id: v.name for v in side.trace.values if v.role == "parameter" and v.name in along}
        return {v: x + sign * _STEP * along[of[v]].reshape(x.shape) for v, x in arrays_of(side, of).items()}


def direction_of(comparison: Comparison, group: Group) -> Direction | None:
    """Return a direction of the parameters whose gradients are compared; None if there is no such, or if the
    loss is not a single number.

    Args:
        comparison: the two programs.
        group: the gradients.
    """
    losses = [g for g in comparison.groups if (g.kind, g.step) == ("loss", group.step)]
    if group.kind != "gradient" or group.step != 1 or not losses:
        return None
    origins = {p.right.name: comparison.weights.origins[p.right.name] for p in group.pairs}
    generator, left = np.random.default_rng(0), dict[str, Any]()
    trained = {n for o in origins.values() for n in o.names}
    for name, array in comparison.left.program.parameters().items():
        size = generator.normal(size=np.shape(array))
        left[name] = size if name in trained else np.zeros(np.shape(array))
    right = {name: np.asarray(o.of(left)) for name, o in origins.items()}
    shapes = {p.right.name: comparison.right.arrays[p.right.value].shape for p in group.pairs}
    return Direction(
        comparison,
        group,
        {
            "left": {n: left[n] for n in trained},
            "right": {n: x.reshape(shapes[n]) for n, x in right.items()},
        },
    )
