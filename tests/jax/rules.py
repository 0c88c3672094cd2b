"""Every rule as a setting, with windows short enough to fill in a test, and the stream for testing them."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax

import stablenum

SPIKES = {"window": 32, "min_samples": 16}
RULES: dict[str, dict[str, Any]] = {
    "AdaptiveGradClip": {"clip": stablenum.AdaptiveGradClip(clipping=0.3)},
    "AdaptiveGradClip without some": {"clip": stablenum.AdaptiveGradClip(clipping=0.3, exclude="*w*")},
    "AutoClip": {"clip": stablenum.AutoClip(quantile=0.5, window=20)},
    "ZClip": {"clip": stablenum.ZClip(z_threshold=1.0, max_norm=None, warmup_steps=8)},
    "AdaGC": {"clip": stablenum.AdaGC(warmup_steps=8, max_norm=5.0)},
    "ClipUpdateRMS": {"clip": stablenum.ClipUpdateRMS(0.9)},
    "LogMaxLossScale": {"loss_scale": stablenum.LogMaxLossScale()},
    "UnderflowAwareLossScale": {"loss_scale": stablenum.UnderflowAwareLossScale(init_scale=4.0)},
    "hysteresis": {"loss_scale": stablenum.DynamicLossScale(hysteresis=2, growth_interval=7)},
    "SpikeGuard skip": {"spike": stablenum.SpikeGuard(**SPIKES)},
    "SpikeGuard clip": {"spike": stablenum.SpikeGuard(**SPIKES, action="clip")},
    "MeanStdSpikeGuard": {"spike": stablenum.MeanStdSpikeGuard(**SPIKES)},
    "all": {
        "clip": (
            stablenum.AdaptiveGradClip(clipping=0.3),
            stablenum.AdaGC(warmup_steps=8),
            5.0,
            stablenum.ClipUpdateRMS(0.9),
        ),
        "loss_scale": stablenum.LogMaxLossScale(),
        "spike": stablenum.SpikeGuard(**SPIKES),
    },
}
LEARNING_RATE = 1e-3
SHAPES = {"bias": (4,), "conv": (2, 3, 4, 5), "gain": (), "heads": (4, 2, 3), "w": (6, 4)}


def injected(optimizer: Any = optax.sgd, learning_rate: float = LEARNING_RATE) -> Any:
    """An optimizer whose state holds its learning rate, as ``ClipUpdateRMS`` requires."""
    return optax.inject_hyperparams(optimizer)(learning_rate=learning_rate)


def start() -> dict[str, Any]:
    """Parameters of every rank."""
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def stream(n: int) -> list[tuple[dict[str, Any], float]]:
    """Gradients and losses that include a NaN, an inf, zeros and two spikes; many elements are tiny."""
    rng, steps = np.random.default_rng(11), []
    for i in range(n):
        grads = {
            name: np.asarray(rng.standard_normal(shape) * 10 ** rng.uniform(-0.3, 0.3), np.float32)
            for name, shape in SHAPES.items()
        }
        grads["w"] = np.where(rng.uniform(size=SHAPES["w"]) < 0.3, np.float32(1e-9), grads["w"])
        loss = 2.0 + 0.1 * float(rng.standard_normal())
        if i == n // 3:
            grads["conv"][0, 1, 2, 3] = np.nan
        if i == n // 3 + 3:
            grads["bias"][1] = np.inf
        if i == n // 2:
            grads = {name: np.zeros_like(g) for name, g in grads.items()}
        if i == 2 * n // 3:
            grads = {name: g * np.float32(1e4) for name, g in grads.items()}
        if i == 2 * n // 3 + 5:
            loss = 50.0
        steps.append((grads, loss))
    return steps
