"""What the core should do, said a second time: exact or float64 Python, sharing no code with it."""

from __future__ import annotations

import decimal
import math
import struct
from collections.abc import Sequence

FLOAT32_MAX = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]


def round_to_float32(x: float) -> float:
    """The nearest float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def global_norm(parts: Sequence[float]) -> float:
    """The L2 norm to 50 digits, rounded once; NaN before inf before numbers."""
    if any(math.isnan(part) for part in parts):
        return math.nan
    if any(math.isinf(part) for part in parts):
        return math.inf
    with decimal.localcontext(prec=50):
        return float(sum((decimal.Decimal(part) ** 2 for part in parts), decimal.Decimal(0)).sqrt())


def clip_coefficient(norm: float, max_norm: float) -> float:
    """torch.nn.utils.clip_grad_norm_'s factor."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_factors(norms: Sequence[float], rules: Sequence[tuple[str, float]]) -> list[float]:
    """One factor a tensor after ``rules`` (``("norm" | "global", max_norm)``) in order.

    A factor stops at the smallest normal float32: below it hardware may flush to zero.
    """
    factors = [1.0] * len(norms)
    for kind, max_norm in rules:
        now = [norm * factor for norm, factor in zip(norms, factors, strict=True)]
        if kind == "global":
            joint = clip_coefficient(global_norm(now), max_norm)
            factors = [factor * joint for factor in factors]
        else:
            factors = [f * clip_coefficient(n, max_norm) for f, n in zip(factors, now, strict=True)]
        factors = [max(factor, 2.0**-126) for factor in factors]
    return factors


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

    def step(self, event: str) -> float:
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
