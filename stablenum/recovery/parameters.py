"""Parameters, and moments of theirs, that no ordinary step makes, although they are finite.

A second moment is an average or a sum of squared gradients, so between two looks it can grow by no more than
the sum of the squared gradient norms in between. One that is larger by many orders, as after a bit has
flipped, makes its parameter stand still.

One that is too small makes its parameter jump. By the inequality of Cauchy and Schwarz, two moments of the
same gradients have ``|m| <= (1 - b1) / sqrt((1 - b2) (1 - b1**2 / b2)) sqrt(v)``: 7.3 for the usual (0.9,
0.999), and below 100 for all that are in use.

A parameter whose norm more than doubles between two looks, by far more than it ever changed before, has been
overwritten, or the learning rate is wrong by orders. A normalization behind it can keep that out of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from stablenum.guard.readout import StepRecord

__all__ = ["Measures", "ParameterWatch"]

# Coupled weight decay and gradients that were transformed on the way are not in the norm of the guard.
_SLACK = 1e6
_LARGEST_RATIO = 100.0
_DOUBLED, _FAR_MORE = 2.0, 10.0
_ENOUGH_CHANGES = 2  # a parameter that begins at 0, and a rate that warms up, grow much at first


class Measures(NamedTuple):
    """What is measured of a parameter.

    Attributes:
        norm: its Euclidean norm. Infinite if a square overflows.
        lowest: the lowest of its moments that are never negative in a sound state; 0 if there are none.
        second: the largest second moment; 0 if there is none.
        ratio: the largest abs(m) / sqrt(v), of elements whose v is well above the smallest normal number of
            its format; 0 if there are none, or there is no first moment.
    """

    norm: float
    lowest: float = 0.0
    second: float = 0.0
    ratio: float = 0.0


class ParameterWatch:
    """Compares what is measured of the parameters with the last look."""

    def __init__(self) -> None:
        self._before: dict[str, Measures] = {}
        self._changes: dict[str, tuple[int, float]] = {}  # how often a norm changed, and by how much at most
        self._squares = 0.0  # of the norms of the gradients since the last look

    def add(self, row: StepRecord) -> None:
        """Take in an applied step."""
        norm = row["grad_norm"]
        if math.isfinite(norm):
            self._squares += norm * norm

    def look(self, measures: Mapping[str, Measures]) -> dict[str, list[str]]:
        """Take in what is measured now, and return the parameters with something wrong.

        Args:
            measures: of each parameter, by name. What was not there at the last look is judged by its own
                moments alone.

        Returns:
            The names by what is wrong: ``negative`` second moments; ``unexplained`` ones, which are larger or
            smaller than gradients make them; parameters that ``jumped``.
        """
        pairs = {name: (self._before.get(name, now), now) for name, now in measures.items()}
        unexplained = [name for name, (before, now) in pairs.items() if self._unexplained(before, now)]
        jumped = [name for name, (before, now) in pairs.items() if self._jumped(name, before.norm, now.norm)]
        for name in pairs.keys() - jumped:
            change = abs(pairs[name][1].norm - pairs[name][0].norm)
            if 0.0 < change < math.inf:
                self._know(name, 1, change)
        self._before, self._squares = dict(measures), 0.0
        negative = [name for name, now in measures.items() if now.lowest < 0.0]
        return {"negative": negative, "unexplained": unexplained, "jumped": jumped}

    def _unexplained(self, before: Measures, now: Measures) -> bool:
        # What was not there cannot be judged: the newest gradients are not yet known.
        grew = before.second > 0.0 and now.second > _SLACK * (before.second + self._squares)
        return grew or now.ratio > _LARGEST_RATIO

    def _jumped(self, name: str, before: float, now: float) -> bool:
        times, largest = self._changes.get(name, (0, 0.0))
        return times >= _ENOUGH_CHANGES and now > _DOUBLED * before and now - before > _FAR_MORE * largest

    def _know(self, name: str, more: int, change: float) -> None:
        times, largest = self._changes.get(name, (0, 0.0))
        self._changes[name] = times + more, max(largest, change)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which :meth:`load_state_dict` takes."""
        return {
            "before": {name: list(m) for name, m in self._before.items() if all(map(math.isfinite, m))},
            "changes": {name: list(known) for name, known in self._changes.items()},
            "squares": min(self._squares, 1e300),
        }

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        How much a parameter ever changed is not forgotten by a run that goes back.
        """
        self._before = {name: Measures(*measured) for name, measured in plain["before"].items()}
        for name, (times, most) in plain["changes"].items():
            self._know(name, max(0, times - self._changes.get(name, (0, 0.0))[0]), most)
        self._squares = plain["squares"]
