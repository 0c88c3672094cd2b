"""Clip rules in float64, straight from their papers.

A gradient is a list of tensors, a tensor the list of its units' norms (one unit where units do not
matter). ``factors(gradient, applied)`` gives one factor per unit, and updates the statistics if the step is
``applied``. ``naive=True`` leaves out our protection against bad values: it is the authors' code, which fails
on them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from tests.oracles.basics import clip_coefficient, global_norm

Gradient = Sequence[Sequence[float]]
Factors = list[list[float]]


def _norms(gradient: Gradient) -> list[float]:
    return [global_norm(units) for units in gradient]


def _one_a_tensor(gradient: Gradient, factors: Sequence[float]) -> Factors:
    return [[factor] * len(units) for factor, units in zip(factors, gradient, strict=True)]


class GlobalNormOracle:
    """torch.nn.utils.clip_grad_norm_."""

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def factors(self, gradient: Gradient, applied: bool = True) -> Factors:
        total = global_norm(_norms(gradient))
        return _one_a_tensor(gradient, [clip_coefficient(total, self.max_norm)] * len(gradient))


class TensorNormOracle(GlobalNormOracle):
    """The same for each tensor."""

    def factors(self, gradient: Gradient, applied: bool = True) -> Factors:
        return _one_a_tensor(gradient, [clip_coefficient(n, self.max_norm) for n in _norms(gradient)])


class AdaptiveGradClipOracle:
    """Brock et al. 2021, eq. 3, with the floors of optax.adaptive_grad_clip.

    ``weights``: the norm of each unit's weights; None for a tensor that is excluded.
    """

    def __init__(
        self, weights: Sequence[Sequence[float] | None], clipping: float = 0.01, eps: float = 1e-3
    ) -> None:
        self.weights, self.clipping, self.eps = weights, clipping, eps

    def _factor(self, g: float, w: float) -> float:
        limit = self.clipping * max(w, self.eps)
        return limit / max(g, 1e-6) if g >= limit else 1.0

    def factors(self, gradient: Gradient, applied: bool = True) -> Factors:
        return [
            [1.0] * len(units) if w is None else [self._factor(*pair) for pair in zip(units, w, strict=True)]
            for units, w in zip(gradient, self.weights, strict=True)
        ]


class AutoClipOracle:
    """Seetharaman et al. 2020, algorithm 1: the percentile of the history, this norm included.

    Ours differs: the history has ``window`` norms; zero norms and those of skipped steps are left out.
    """

    def __init__(self, quantile: float = 0.1, window: int = 1000, naive: bool = False) -> None:
        self.percent, self.window, self.naive, self.history = 100 * quantile, window, naive, []

    def factors(self, gradient: Gradient, applied: bool = True) -> Factors:
        total = global_norm(_norms(gradient))
        if self.naive or (applied and total > 0):
            self.history = [*self.history, total][-self.window :]
        with np.errstate(invalid="ignore"):
            threshold = float(np.percentile(self.history, self.percent)) if self.history else math.inf
        factor = min(1.0, threshold / total) if total else 1.0
        if math.isnan(threshold):
            factor = math.nan  # torch's clamp keeps NaN
        return _one_a_tensor(gradient, [factor] * len(gradient))


class ZClipOracle:
    """The authors' ZClip (github.com/bluorion-com/ZClip), mode "zscore", option "adaptive_scaling".

    Ours differs: zero norms and those of skipped steps are left out, and so are norms of the warm-up above
    100 times their median; the spread is at least a hundredth of the mean.
    """

    def __init__(
        self,
        alpha: float = 0.97,
        z_threshold: float = 2.5,
        max_norm: float | None = 1.0,
        warmup_steps: int = 25,
        naive: bool = False,
    ) -> None:
        self.alpha, self.z0, self.max_norm, self.warmup_steps = alpha, z_threshold, max_norm, warmup_steps
        self.naive, self.buffer = naive, []
        self.mean: float | None = None
        self.var = 0.0

    def _start(self) -> None:
        norms, self.buffer = self.buffer, []
        if not self.naive:
            middle = statistics.median(norms)
            norms = [n for n in norms if n <= 100 * middle]
        self.mean = sum(norms) / len(norms)
        self.var = sum((n - self.mean) ** 2 for n in norms) / len(norms)

    def _clipped_norm(self, norm: float) -> float | None:
        std = max(math.sqrt(self.var), 0.0 if self.naive else self.mean / 100)
        z = (norm - self.mean) / (std + 1e-6)
        return self.mean + self.z0 * std / (z / self.z0) if z > self.z0 else None

    def factors(self, gradient: Gradient, applied: bool = True) -> Factors:
        norm = global_norm(_norms(gradient))
        learns = self.naive or (applied and norm > 0)
        target = None
        if self.mean is not None:
            target = self._clipped_norm(norm)
            fed = norm if target is None else target
            if learns:
                self.mean = self.alpha * self.mean + (1 - self.alpha) * fed
                self.var = self.alpha * self.var + (1 - self.alpha) * (fed - self.mean) ** 2
        elif learns:
            self.buffer.append(norm)
            if len(self.buffer) >= self.warmup_steps:
                self._start()
        held = min(x for x in (target, self.max_norm, math.inf) if x is not None)
        return _one_a_tensor(gradient, [min(1.0, held / norm) if norm else 1.0] * len(gradient))


class AdaGCOracle:
    """Wang et al. 2025, algorithm 1, for each tensor.

    Ours differs: zero gradients of a tensor, those that are as good as zero beside others, and skipped steps
    are left out; the warm-up counts each tensor's own observations; of the three smallest norms of the
    warm-up, those below a third of the third are left out; ``warmup_steps`` observations in a row above
    100 gamma start a new warm-up.
    """

    def __init__(
        self,
        n_tensors: int,
        clip_ratio: float = 1.05,
        decay: float = 0.98,
        max_norm: float = 1.0,
        warmup_steps: int = 100,
        naive: bool = False,
    ) -> None:
        self.clip_ratio, self.decay, self.max_norm = clip_ratio, decay, max_norm
        self.warmup_steps, self.naive = warmup_steps, naive
        self.gamma: list[float | None] = [None] * n_tensors
        self.seen: list[list[float]] = [[] for _ in range(n_tensors)]
        self.far = [0] * n_tensors

    def factors(self, gradient: Gradient, applied: bool = True) -> Factors:
        norms = _norms(gradient)
        joint = clip_coefficient(global_norm(norms), self.max_norm)
        factors = []
        for i, (norm, gamma) in enumerate(zip(norms, self.gamma, strict=True)):
            factor = joint if gamma is None else min(1.0, self.clip_ratio * gamma / norm) if norm else 1.0
            factors.append(factor)
            tiny = norm < 2.0**-47 <= global_norm(norms)
            if self.naive or (applied and norm > 0 and not tiny):
                self._learn(i, norm, factor * norm)
        return _one_a_tensor(gradient, factors)

    def _learn(self, i: int, norm: float, clipped: float) -> None:
        gamma = self.gamma[i]
        if gamma is None:
            self.seen[i].append(clipped)
            if len(self.seen[i]) == self.warmup_steps:
                lowest = sorted(self.seen[i])[:3]
                sane = [x for x in lowest if self.naive or 3 * x >= lowest[-1]]
                self.gamma[i], self.seen[i] = min(sane), []
            return
        self.gamma[i] = self.decay * gamma + (1 - self.decay) * clipped
        self.far[i] = self.far[i] + 1 if norm > 100 * gamma else 0
        if self.far[i] >= self.warmup_steps and not self.naive:
            self.gamma[i], self.far[i] = None, 0


def clip_update_factor(rms: float, lr: float, max_rms: float) -> float:
    """Shazeer & Stern 2018, section 6: U / max(1, RMS(U) / d), with the learning rate in U."""
    return 1 / max(1.0, rms / (max_rms * lr)) if math.isfinite(rms) else 1.0
