"""Spike rules by Python's ``statistics``."""

from __future__ import annotations

import math
import statistics


class SpikeGuardOracle:
    """Median and 1.4826 MAD (Rousseeuw & Croux 1993) over the last applied values, with a minimum spread.

    ``judge`` returns the names of the signals that are spikes, and updates the windows.
    """

    def __init__(
        self,
        *,
        window: int = 128,
        threshold: float = 6.0,
        min_samples: int = 64,
        watch: tuple[str, ...] = ("loss", "grad_norm"),
        action: str = "skip",
        min_spread: float = 0.01,
        max_in_a_row: int = 8,
    ) -> None:
        self.window, self.threshold, self.min_samples = window, threshold, min_samples
        self.watch, self.action = watch, action
        self.min_spread, self.max_in_a_row = min_spread, max_in_a_row
        self.past: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self.debt = 0

    def limit(self, values: list[float]) -> float:
        middle = statistics.median(values)
        mad = statistics.median(abs(value - middle) for value in values)
        return middle + self.threshold * max(1.4826 * mad, self.min_spread * abs(middle))

    def _standing_out(self, values: dict[str, float]) -> set[str]:
        return {
            name
            for name in self.watch
            if len(self.past[name]) >= self.min_samples and values[name] > self.limit(self.past[name])
        }

    def _remember(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value) and value != 0:
                self.past[name] = [*self.past[name], value][-self.window :]

    def judge(self, loss: float, grad_norm: float, finite: bool) -> set[str]:
        if not finite:
            return set()
        values = {"loss": loss, "grad_norm": grad_norm}
        out = self._standing_out(values)
        if out and self.action == "skip":
            if self.debt < 4 * self.max_in_a_row:
                self.debt += 4
                return out
            self.past, out = {"loss": [], "grad_norm": []}, set()  # a new level
            self.debt = 0
        self.debt = max(self.debt - 1, 0)
        self._remember(values)
        return out

    def typical_norm(self) -> float:
        return statistics.median(self.past["grad_norm"]) if self.past["grad_norm"] else math.inf


class MeanStdSpikeOracle(SpikeGuardOracle):
    """OLMo-core's SkipStepOptimizer: mean + threshold sd (n - 1) of the last values, also of skipped steps.

    ``naive``: non-finite values enter too, as in OLMo-core.
    """

    def __init__(self, *, naive: bool = False, **settings: object) -> None:
        super().__init__(**settings)
        self.naive = naive

    def limit(self, values: list[float]) -> float:
        if not all(map(math.isfinite, values)):
            return math.nan  # as torch's mean and std give
        return statistics.fmean(values) + self.threshold * statistics.stdev(values)

    def judge(self, loss: float, grad_norm: float, finite: bool) -> set[str]:
        if not finite and not self.naive:
            return set()
        values = {"loss": loss, "grad_norm": grad_norm}
        out = self._standing_out(values)
        self._remember(values)
        return out

    def _remember(self, values: dict[str, float]) -> None:
        if not self.naive:
            super()._remember(values)
            return
        self.past = {name: [*self.past[name], value][-self.window :] for name, value in values.items()}
