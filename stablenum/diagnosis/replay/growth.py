"""How large parameters were at the start of each step, to find the step in which they exploded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Growth"]

# Sizes that have grown by less, in all, or that are smaller in the end, are no explosion.
_EXPLOSION = 1000.0
_LARGE = 100.0
# What began at 0 has exploded only if something else has grown by this factor.
_COMPANY = 10.0
# A run of steps in each of which the size grew by less has ended.
_A_STEP = 1.1
# A value that is larger than usual by this factor is named.
_UNUSUAL = 30.0
_MOST_STEPS = 512


@dataclass(frozen=True, slots=True)
class _Start:
    step: int
    sizes: Mapping[str, float]
    gradient: float | None
    rate: float | None


@dataclass(slots=True)
class Growth:
    """The largest magnitudes at the start of each step.

    Attributes:
        unit: what steps are called, "step" or "call".

    Example:
        >>> growth = Growth()
        >>> for step, size in enumerate([0.5, 0.6, 0.5, 4e9]):
        ...     growth.note(step, {"weight": size})
        >>> growth.explosion()
        'weight grew from 0.5 to 4e+09 in step 2'
    """

    unit: str = "step"
    _starts: deque[_Start] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))

    def note(
        self,
        step: int,
        sizes: Mapping[str, float],
        *,
        gradient: float | None = None,
        rate: float | None = None,
    ) -> None:
        """Note the sizes of the parameters at the start of a step, from 0.

        Args:
            step: the number of the step.
            sizes: name -> largest magnitude.
            gradient: the largest magnitude among the gradients with which this step updates them.
            rate: the learning rate.
        """
        if self._starts and self._starts[-1].step == step:
            self._starts.pop()
        self._starts.append(_Start(step, sizes, gradient, rate))

    def explosion(self, counts: Callable[[str], bool] = lambda name: True) -> str:
        """Describe the step in which a parameter began to explode, and what it was updated with; "" if none
        did.

        Args:
            counts: whether a name is that of a parameter.
        """
        names = self._starts[-1].sizes if self._starts else ()
        runs = [(self._began(name), name) for name in names if counts(name)]
        grown = [(self._factor(i, name), i, name) for i, name in runs if self._factor(i, name) >= _EXPLOSION]
        grown = [g for g in grown if self._starts[g[1]].sizes[g[2]] or self._others_grew()]
        if not grown:
            return ""
        _, begin, name = max(grown, key=lambda g: g[0])
        first, last = self._starts[begin], self._starts[-1]
        if last.sizes[name] < _LARGE:
            return ""
        several = last.step - first.step > 1
        when = f"{self.unit}s {first.step} to {last.step - 1}" if several else f"{self.unit} {first.step}"
        grew = f"{name} grew from {first.sizes[name]:.3g} to {last.sizes[name]:.3g} in {when}"
        return "; ".join([grew, *self._why(begin, name)])

    def _began(self, name: str) -> int:
        """Return the position of the last step before the size grew from step to step up to now."""
        i = len(self._starts) - 1
        while i > 0 and _grew(self._starts[i - 1].sizes.get(name), self._starts[i].sizes[name]):
            i -= 1
        return i

    def _factor(self, begin: int, name: str) -> float:
        before, now = self._starts[begin].sizes[name], self._starts[-1].sizes[name]
        # A bias may begin at 0: it is compared with a size of 1.
        return now / (before or 1.0) if math.isfinite(now) else 0.0

    def _others_grew(self) -> bool:
        """Return whether anything that did not begin at 0 has grown, too, if there is anything else: an
        optimizer's moments begin at 0 and become as large as the gradients' squares."""
        first, last = self._starts[0].sizes, self._starts[-1].sizes
        others = [last[name] / first[name] for name in last if first.get(name)]
        return not others or max(others) >= _COMPANY

    def _why(self, begin: int, name: str) -> list[str]:
        """Return with what the parameters were updated in the step, and what was unusual in it."""
        first, earlier = self._starts[begin], list(self._starts)[:begin]
        found = []
        if first.gradient is not None:
            rate = "" if first.rate is None else f", at a learning rate of {first.rate:g}"
            rate += ", which is negative" if (first.rate or 0.0) < 0.0 else ""
            usual = _times([s.gradient for s in earlier if s.gradient is not None], first.gradient)
            found.append(f"the largest gradient of that {self.unit} was {first.gradient:.3g}{usual}{rate}")
        for other, size in first.sizes.items():
            usual = _times([s.sizes[other] for s in earlier if other in s.sizes], size)
            if other != name and usual:
                found.append(f"{other} reached {size:.3g}{usual}")
        return found[:3]


def _grew(before: float | None, now: float) -> bool:
    return before is not None and math.isfinite(now) and now > _A_STEP * before


def _times(usual: list[float], now: float) -> str:
    """Return how many times its usual value a number is, in words; "" if it is not unusual."""
    ordinary = median(usual) if usual else 0.0
    return f" ({now / ordinary:.2g} times the usual)" if ordinary > 0 and now > _UNUSUAL * ordinary else ""
