"""Loss-scale rules as if-statements over plain numbers."""

from __future__ import annotations

import math

from tests.oracles.basics import round_to_float32


class LossScaleOracle:
    """The dynamic loss scale, written as if-statements.

    ``refill="growth"`` is Megatron-LM's and DeepSpeed's hysteresis, ``"good_step"`` apex's.
    """

    def __init__(
        self,
        *,
        init: float,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        hysteresis: int = 1,
        refill: str = "good_step",
        floor: float = 1.0,
        ceiling: float = 2.0**24,
    ) -> None:
        self.scale, self.growth, self.backoff, self.interval = init, growth, backoff, interval
        self.tolerance = self.left = hysteresis
        self.refill, self.floor, self.ceiling = refill, floor, ceiling
        self.tracker = 0

    def step(self, event: str, amax: float = 1.0, tiny: float = 0.0) -> float:
        """The scale after ``"good"``, ``"overflow"`` or ``"bad_loss"``."""
        if event == "overflow":
            self.tracker = 0
            self.left -= 1
            if self.left <= 0:
                self.left = 0
                self.scale = max(self.floor, round_to_float32(self.scale * self.backoff))
        elif event == "good":
            self.tracker += 1
            grown = self.tracker >= self.interval
            if grown:
                self.tracker = 0
                self.scale = min(self.ceiling, round_to_float32(self.scale * self.growth))
            if grown or self.refill == "good_step":
                self.left = self.tolerance
        return self.scale


class LogMaxOracle:
    """``LogMaxScaler`` of OpenSeq2Seq (automatic_loss_scaler.py), with its statistics as weighted sums.

    In the source: x = log2(amax); mu from a debiased mean of decay ``mean_decay``; sigma from debiased means
    of x and x^2 of decay ``std_decay``; S = 2 ** (log2_max - (mu + std_factor sigma)), clipped. Ours differs:
    steps that overflowed or have no gradient are left out; S is rounded down to a power of two (after
    subtracting 2^-10 from the exponent); an overflow halves S, which may rise again with the 100th good
    step; x is limited to the value that gives the smallest scale, and from the 101st on to 10 from mu.
    """

    robust = True

    def __init__(
        self,
        *,
        init: float,
        log2_max: float = 16.0,
        std_factor: float = 3.09,
        mean_decay: float = 0.99,
        std_decay: float = 0.999,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
    ) -> None:
        self.scale, self.log2_max, self.std_factor = init, log2_max, std_factor
        self.mean_decay, self.std_decay, self.floor, self.ceiling = mean_decay, std_decay, floor, ceiling
        self.fast, self.slow, self.hold = (0.0, 0.0), (0.0, 0.0, 0.0), 0
        self.exponents: list[float] = []  # before rounding down

    def step(self, event: str, amax: float, tiny: float = 0.0) -> float:
        """The scale after a step whose largest unscaled element was ``amax``."""
        if event == "overflow":
            self.scale, self.hold = max(self.floor, self.scale / 2), 100
        if event != "good" or not 0 < amax < math.inf:
            return self.scale
        x, d, e = math.log2(amax), self.mean_decay, self.std_decay
        if len(self.exponents) >= 100 and self.robust:
            mu = self.fast[1] / self.fast[0]
            x = min(max(x, mu - 10), mu + 10)
        x = min(x, self.log2_max - math.log2(self.floor)) if self.robust else x
        self.fast = (d * self.fast[0] + 1, d * self.fast[1] + x)
        self.slow = tuple(e * old + x**k for k, old in enumerate(self.slow))
        mu = self.fast[1] / self.fast[0]
        sigma = math.sqrt(max(0.0, self.slow[2] / self.slow[0] - (self.slow[1] / self.slow[0]) ** 2))
        self.exponents.append(self.log2_max - (mu + self.std_factor * sigma) - 2.0**-10)
        proposed = min(max(2.0 ** math.floor(self.exponents[-1]), self.floor), self.ceiling)
        self.hold = max(self.hold - 1, 0)
        self.scale = min(proposed, self.scale) if self.hold else proposed
        return self.scale


class NaiveLogMaxOracle(LogMaxOracle):
    """The source without our differences: an overflow enters as 2^16, and a zero as log2(0)."""

    robust = False

    def step(self, event: str, amax: float, tiny: float = 0.0) -> float:
        if amax == 0:
            self.scale = math.nan  # log2(0), and -inf permanently
        if math.isnan(self.scale):
            return self.scale
        # In the source, an overflow enters as log2(2^16) of the *unscaled* gradient.
        return super().step("good", 2.0**16 if event == "overflow" else amax)


class UnderflowAwareOracle:
    """Our simple form of Zhao et al. 2019: double while too much is lost and there is headroom.

    Also double after ``recovery`` good steps below the highest scale at which a step was good. After an
    overflow, underflow raises the scale with the 100th good step at the earliest; zero gradients are ignored.
    """

    def __init__(
        self,
        *,
        init: float,
        max_tiny: float = 1e-3,
        headroom: float = 2.0**15,
        recovery: int = 2000,
        floor: float = 1.0,
        ceiling: float = 2.0**24,
    ) -> None:
        self.scale, self.max_tiny, self.headroom = init, max_tiny, headroom
        self.floor, self.ceiling, self.recovery = floor, ceiling, recovery
        self.since, self.highest, self.hold = 0, 0.0, 0

    def step(self, event: str, amax: float, tiny: float) -> float:
        """The scale after a step whose largest unscaled element was ``amax``; ``tiny``: the lost fraction."""
        if event == "overflow":
            self.scale, self.since, self.hold = max(self.floor, self.scale / 2), 0, 100
        elif event == "good" and amax > 0:
            self.since += 1
            self.hold = max(self.hold - 1, 0)
            lost = tiny > self.max_tiny and amax * self.scale < self.headroom and self.hold == 0
            lowered = self.scale < self.highest and self.since >= self.recovery
            self.highest = max(self.highest, self.scale)
            if lost or lowered:
                self.scale, self.since = min(self.ceiling, self.scale * 2), 0
        return self.scale
