"""The whole guard in float64: finiteness, spike rule, clip rules in order, loss scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.oracles.basics import clip_coefficient, global_norm
from tests.oracles.clipping import Gradient


@dataclass(frozen=True)
class Outcome:
    """The expected decision on a step.

    ``multipliers``: one per unit, on the raw gradient; ``coefficient``: the smallest without unscaling.
    """

    apply: bool
    reason: str
    grad_norm: float
    coefficient: float
    multipliers: list[list[float]]


class GuardOracle:
    """The guard. Its rules are the oracles of this package; each is optional."""

    def __init__(self, *, clip: Sequence[Any] = (), scale: Any = None, spike: Any = None) -> None:
        self.clip, self.scale_rule, self.spike = clip, scale, spike
        self.scale = 1.0 if scale is None else scale.scale

    def step(self, raw: Gradient, loss: float = 1.0, amax: float = 1.0, tiny: float = 0.0) -> Outcome:
        """Decide on the ``raw`` gradient (still scaled); ``amax``: its largest element."""
        units = [[unit / self.scale for unit in tensor] for tensor in raw]
        grad_norm = global_norm([global_norm(tensor) for tensor in units])
        loss_ok, finite = math.isfinite(loss), math.isfinite(loss) and math.isfinite(grad_norm)
        typical = math.inf if self.spike is None else self.spike.typical_norm()
        spikes = set() if self.spike is None else self.spike.judge(loss, grad_norm, finite)
        skipped = bool(spikes) and self.spike.action == "skip"
        applied = finite and not skipped

        factors = [[1.0] * len(tensor) for tensor in units]
        if spikes and not skipped:
            factors = _times(factors, clip_coefficient(grad_norm, typical))
        for rule in self.clip:
            left = [[f * u for f, u in zip(*pair, strict=True)] for pair in zip(factors, units, strict=True)]
            asked = rule.factors(left, applied)
            factors = [
                [f * a for f, a in zip(*pair, strict=True)] for pair in zip(factors, asked, strict=True)
            ]
        smallest = min((f for tensor in factors for f in tensor), default=1.0)
        outcome = Outcome(
            apply=applied,
            reason=self._reason(loss_ok, grad_norm, spikes, skipped, smallest),
            grad_norm=grad_norm,
            coefficient=smallest if applied else 1.0,
            multipliers=_times(factors, 1 / self.scale) if applied else [[1.0] * len(t) for t in units],
        )
        if self.scale_rule is not None:
            event = "good" if finite else "overflow" if loss_ok else "bad_loss"
            self.scale = self.scale_rule.step(event, amax / self.scale, tiny)
        return outcome

    @staticmethod
    def _reason(loss_ok: bool, norm: float, spikes: set[str], skipped: bool, smallest: float) -> str:
        if not loss_ok:
            return "NONFINITE_LOSS"
        if math.isnan(norm):
            return "NAN_GRADIENT"
        if math.isinf(norm):
            return "INF_GRADIENT"
        if skipped:
            return "SPIKE_LOSS" if "loss" in spikes else "SPIKE_GRAD_NORM"
        return "SPIKE_CLIPPED" if spikes else "CLIPPED" if smallest < 1 else "OK"


def _times(factors: list[list[float]], by: float) -> list[list[float]]:
    return [[factor * by for factor in tensor] for tensor in factors]
