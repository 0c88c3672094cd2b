"""The usual height of a signal, and whether it has been far above it for a while."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["Level"]

_NORMAL = 1.4826  # the standard deviation of a normal distribution divided by its median absolute deviation
_LEAST_SPREAD = 0.01  # of the median
# Of the first values: the loss of a training that knows its data by heart may multiply and still be tiny.
_LEAST_OF_FIRST = 0.01
_LARGEST_EXPONENT = 100.0  # no number overflows


class Level:
    """The usual height of a signal, and its last values.

    A value that leaves the last ones enters the window they are compared with, unless it was too high.

    Args:
        window: how many values are usual, at most. There is no verdict before there are half as many.
        steps: of how many last values the median is judged.
        threshold: how many robust standard deviations above the usual median are too high; of the logarithms
            if all usual values are positive.
        least_ratio: a value below so many times the usual median is not too high; 0 for no such bound.
    """

    def __init__(self, window: int, steps: int, threshold: float, least_ratio: float = 0.0) -> None:
        self._threshold, self._least_ratio = threshold, least_ratio
        self._enough = max(window // 2, 1)
        self.usual: deque[float] = deque(maxlen=window)
        self._last: deque[tuple[int, float]] = deque(maxlen=steps)
        self._first: float | None = None  # the median of the first values

    def add(self, step: int, value: float) -> None:
        """Take in the value of an applied step; a loss that was not given is NaN, and left out."""
        if not math.isfinite(value):
            return
        if len(self._last) == self._last.maxlen:
            limit, (_, oldest) = self._limit(), self._last[0]
            if limit is None or oldest <= limit:
                self.usual.append(oldest)
        self._last.append((step, value))
        if self._first is None and len(self._last) == self._last.maxlen:
            self._first = self._middle()

    def high_since(self) -> int | None:
        """Return the first of the last steps that was too high, if the median of all is; None otherwise."""
        limit = self._limit()
        if limit is None or len(self._last) != self._last.maxlen or self._middle() <= limit:
            return None
        return next(step for step, value in self._last if value > limit)

    def described(self, name: str) -> str:
        """Return a clause about a signal that is too high."""
        return (
            f"the median {name} of {len(self._last)} steps is {self._middle():.4g}, "
            f"far above {statistics.median(self.usual):.4g}, the median of the steps before"
        )

    def _middle(self) -> float:
        return statistics.median(value for _, value in self._last)

    def _limit(self) -> float | None:
        """Return the height above which a value is too high; None before there are enough values."""
        if self._first is None or len(self.usual) < self._enough:
            return None
        middle = statistics.median(self.usual)
        least = max(_LEAST_SPREAD * abs(middle), _LEAST_OF_FIRST * abs(self._first))
        return max(self._usual_rise(middle), middle + self._threshold * least, self._least_ratio * middle)

    def _usual_rise(self, middle: float) -> float:
        """Return what is as many robust standard deviations above the median as the threshold says.

        Positive values are compared by their logarithms: a small loss often rises and falls by a factor.
        """
        if min(self.usual) <= 0.0:
            return middle + self._threshold * _deviation(self.usual, middle)
        spread = _deviation([math.log(x) for x in self.usual], math.log(middle))
        return middle * math.exp(min(self._threshold * spread, _LARGEST_EXPONENT))

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which :meth:`load_state_dict` takes."""
        return {"usual": list(self.usual), "last": [list(pair) for pair in self._last], "first": self._first}

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.usual.clear()
        self.usual.extend(plain["usual"])
        self._last.clear()
        self._last.extend((step, value) for step, value in plain["last"])
        self._first = plain["first"]


def _deviation(values: Collection[float], middle: float) -> float:
    return _NORMAL * statistics.median(abs(x - middle) for x in values)
