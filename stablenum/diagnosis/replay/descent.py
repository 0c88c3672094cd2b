"""The losses of a run, to find an objective that has no lower bound: one of the wrong sign, for example."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Descent"]

# A loss has run away downwards if it is below 0 and this many times as large as it was, or as is usual.
_THAN_AT_FIRST = 1000.0
_THAN_USUAL = 10.0
_MOST_LOSSES = 512


@dataclass(slots=True)
class Descent:
    """The losses, separately for each place that minimises one.

    Example:
        >>> descent = Descent()
        >>> for step, loss in enumerate([-1.5, -4.0, -60.0, -9e3, -7e8]):
        ...     descent.note("train.py:12", step, loss)
        >>> descent.runaway()
        'the objective fell from -1.5 in step 0 to -7e+08 in step 4, and has no lower bound'
    """

    _losses: dict[Hashable, deque[tuple[int, float]]] = field(default_factory=dict)
    _first: dict[Hashable, tuple[int, float]] = field(default_factory=dict)

    def note(self, place: Hashable, step: int, loss: float) -> None:
        """Note a loss that a place minimises; one that is not finite is left out."""
        if math.isfinite(loss):
            self._first.setdefault(place, (step, loss))
            self._losses.setdefault(place, deque(maxlen=_MOST_LOSSES)).append((step, loss))

    def runaway(self) -> str:
        """Describe a loss that has run away below 0; "" if none has."""
        for place, losses in self._losses.items():
            step, last = losses[-1]
            begin, first = self._first[place]
            usual = median(abs(loss) for _, loss in losses)
            if last < 0.0 and abs(last) > max(_THAN_AT_FIRST * max(1.0, abs(first)), _THAN_USUAL * usual):
                fell = f"fell from {first:.3g} in step {begin} to {last:.3g} in step {step}"
                return f"the objective {fell}, and has no lower bound"
        return ""
