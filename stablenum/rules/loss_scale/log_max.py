"""A loss scale set from statistics of the gradients: as high as their spread allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.arrays import at_least, at_most
from stablenum.formats import FLOAT32_TINY
from stablenum.rules.loss_scale.state import LossScaleState, check_scale_range, next_hold, scale_state

__all__ = ["LogMaxLossScale", "LogMaxStatistics"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# A single step a thousand times too large would affect the standard deviation for thousands of steps.
# Therefore, after ``_KNOWN_AFTER`` observations, each further one counts as at most ``_FAR`` (in log2) away
# from the mean.
_FAR, _KNOWN_AFTER = 10.0, 100


class LogMaxStatistics(NamedTuple):
    """Moving statistics of x = log2(largest unscaled gradient element).

    Attributes:
        mean, weight: () float32, the fast mean and the total weight of its observations.
        slow_mean, variance, slow_weight: () float32, the slow mean, the variance about it, and their weight.
        hold: () int32, the number of good steps with the last of which the scale may rise again.
    """

    mean: Array
    weight: Array
    slow_mean: Array
    variance: Array
    slow_weight: Array
    hold: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMaxLossScale:
    """Set the scale as high as the largest gradient element allows without overflow in float16.

    With x = log2(amax of the unscaled gradients), m its moving mean (decay ``mean_decay``) and s its
    moving standard deviation (decay ``std_decay``), both corrected for bias at the start:
    ``S = 2 ** floor(log2_max - (m + std_factor * s))``, kept within [``min_scale``, ``max_scale``]. If x is
    normally distributed, 3.09 standard deviations leave one overflow in a thousand steps.

    The rule is ``LogMaxScaler`` of OpenSeq2Seq (Kuchaiev et al. 2018, arXiv 1805.10387), with four
    differences. A step that overflowed, or whose gradients are all zero, never enters the statistics (in
    OpenSeq2Seq, one overflow keeps S at 1 for thousands of steps, and one zero makes S NaN permanently). S is
    a power of two, which costs no precision and is the same number in every framework. An overflow halves S,
    which rises again after 100 good steps at the earliest (with the hundredth, as ``growth_interval`` counts
    in a dynamic scale), so S follows a lasting increase of the gradients. An outlying x is limited to the x
    at which S reaches ``min_scale`` and, after 100 good steps, to m +- 10.

    The rule needs the largest gradient element, which takes one more reduction over the gradients.

    Args:
        init_scale: S until the first good step.
        log2_max: log2 of the bound that the largest scaled element should stay below, 16 for float16.
        std_factor: the margin below that bound, in standard deviations.
        mean_decay: the decay of the mean, between 0 and 1; 0.99 averages over about 100 steps.
        std_decay: the decay of the standard deviation, between 0 and 1.
        min_scale: the smallest S.
        max_scale: the largest S.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> LogMaxLossScale().log2_max
        16.0
    """

    init_scale: float = 2.0**16
    log2_max: float = 16.0
    std_factor: float = 3.09
    mean_decay: float = 0.99
    std_decay: float = 0.999
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    needs: ClassVar[frozenset[str]] = frozenset({"amax"})

    def __post_init__(self) -> None:
        check_scale_range(self)
        check_field(self, "log2_max", at_least=-100.0, at_most=100.0)
        check_field(self, "std_factor", at_least=0.0, at_most=100.0)
        check_field(self, "mean_decay", above=0.0, below=1.0)
        check_field(self, "std_decay", above=0.0, below=1.0)

    def init(self, *, xp: Namespace, device: Any = None) -> LossScaleState:
        """Return the state before the first step."""

        zeros = [xp.asarray(0.0, dtype=xp.float32, device=device) for _ in range(5)]
        hold = xp.asarray(0, dtype=xp.int32, device=device)
        statistics = LogMaxStatistics._make([*zeros, hold])
        return scale_state(self.init_scale, 0, statistics, xp=xp, device=device)

    def update(
        self,
        state: LossScaleState,
        *,
        overflow: Array,
        good: Array,
        amax: Array,
        xp: Namespace,
    ) -> LossScaleState:
        """Return the state after one step.

        Args:
            state: the state before.
            overflow: () bool, whether the scaled gradients were not finite.
            good: () bool, whether everything was finite.
            amax: () float32, the largest magnitude among the scaled gradients' elements.
            xp: the array namespace.
        """
        scale, steps = state.scale, state.good_steps
        # Hardware may treat a number below the smallest normal number as 0, whose logarithm is -inf.
        seen = good & xp.isfinite(amax) & (amax >= FLOAT32_TINY)
        x = xp.log2(xp.where(seen, amax, xp.ones_like(amax))) - xp.log2(scale)
        statistics = self._observe(state.statistics, x, seen=seen, overflow=overflow, xp=xp)
        proposed = self._proposal(statistics, xp=xp)
        proposed = xp.where(statistics.hold > 0, xp.minimum(proposed, scale), proposed)
        halved = at_least(scale * 0.5, self.min_scale, xp=xp)
        return LossScaleState(
            scale=xp.where(overflow, halved, xp.where(seen, proposed, scale)),
            good_steps=xp.where(overflow, xp.zeros_like(steps), xp.where(good, steps + 1, steps)),
            hysteresis_left=state.hysteresis_left,
            statistics=statistics,
        )

    def _observe(
        self, old: LogMaxStatistics, x: Array, *, seen: Array, overflow: Array, xp: Namespace
    ) -> LogMaxStatistics:
        """Return the statistics updated with ``x``, by West's incremental formula for a weighted variance.

        The formula in OpenSeq2Seq, the mean of x^2 minus the square of the mean, loses all digits in float32.
        """
        # The weight of n observations is 1 - decay^n. The bound is halfway between two values of n, so that
        # rounding cannot change the outcome.
        known = old.slow_weight >= 1.0 - self.std_decay ** (_KNOWN_AFTER - 0.5)
        near = xp.maximum(xp.minimum(x, old.mean + _FAR), old.mean - _FAR)
        # Any x above this would give a scale below ``min_scale``.
        top = self.log2_max - math.log2(self.min_scale)
        x = at_most(xp.where(known, near, x), top, xp=xp)
        mean, weight = _moved(old.mean, old.weight, x, self.mean_decay)
        slow_mean, slow_weight = _moved(old.slow_mean, old.slow_weight, x, self.std_decay)
        share = (1.0 - self.std_decay) / slow_weight
        off = x - old.slow_mean
        variance = (1.0 - share) * (old.variance + share * off * off)
        new = (mean, weight, slow_mean, variance, slow_weight)
        kept = [xp.where(seen, b, a) for a, b in zip(old[:-1], new, strict=True)]
        hold = next_hold(old.hold, overflow=overflow, good=seen, xp=xp)
        return LogMaxStatistics(*[*kept, hold])

    def _proposal(self, statistics: LogMaxStatistics, *, xp: Namespace) -> Array:
        """Return the scale that follows from the statistics."""
        top = statistics.mean + self.std_factor * xp.sqrt(at_least(statistics.variance, 0.0, xp=xp))
        # 2**-10 is subtracted for two reasons: rounding must not decide between two scales where gradients
        # are powers of two, and 2**16 itself is beyond float16's range.
        power = xp.floor(self.log2_max - top - 2.0**-10)
        return at_most(at_least(_power_of_two(power, xp=xp), self.min_scale, xp=xp), self.max_scale, xp=xp)


def _moved(mean: Array, weight: Array, x: Array, decay: float) -> tuple[Array, Array]:
    """Return a moving mean corrected for bias, and its weight: the first observation counts in full."""
    weight = decay * weight + (1.0 - decay)
    return mean + (1.0 - decay) / weight * (x - mean), weight


def _power_of_two(power: Array, *, xp: Namespace) -> Array:
    """Return ``2 ** power`` for a whole number from -100 to 100, exact in every framework.

    The power functions of the frameworks are sometimes off by an ulp, and loss scales must agree bit for bit.
    """
    up, down, left = xp.ones_like(power), xp.ones_like(power), xp.abs(power)
    # One factor per binary digit of the exponent; products of powers of two are exact.
    for part in (64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0):
        has = left >= part
        left = xp.where(has, left - part, left)
        up = xp.where(has, up * 2.0**part, up)
        down = xp.where(has, down * 2.0**-part, down)
    return xp.where(power < 0, down, up)
