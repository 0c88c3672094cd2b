"""What each rule adds to ``decide``, called eagerly: microseconds per step for 108 parameters.

On a CPU the PyTorch adapter decides in NumPy. On an accelerator it uses eager torch, whose cost here is that
of launching kernels, because the number of small operations is the same on every device. Under
``torch.compile`` and in JAX the rules are compiled with the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat.numpy
import array_api_compat.torch
import numpy as np
import torch

from benchmarks.timing import interleaved
from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    DynamicLossScale,
    GuardConfig,
    LogMaxLossScale,
    MeanStdSpikeGuard,
    Observation,
    SpikeGuard,
    UnderflowAwareLossScale,
    ZClip,
    decide,
    init_guard,
)
from stablenum.typing import Units

__all__ = ["run"]

PARAMETERS, UNITS = 108, 64
CONFIGS = {
    "no rule": GuardConfig(),
    "ClipByGlobalNorm": GuardConfig(clip=ClipByGlobalNorm(1.0)),
    "ClipByNorm": GuardConfig(clip=ClipByNorm(1.0)),
    "AdaptiveGradClip": GuardConfig(clip=AdaptiveGradClip()),
    "AutoClip": GuardConfig(clip=AutoClip()),
    "ZClip": GuardConfig(clip=ZClip()),
    "AdaGC": GuardConfig(clip=AdaGC()),
    "DynamicLossScale": GuardConfig(loss_scale=DynamicLossScale()),
    "LogMaxLossScale": GuardConfig(loss_scale=LogMaxLossScale()),
    "UnderflowAwareLossScale": GuardConfig(loss_scale=UnderflowAwareLossScale()),
    "SpikeGuard": GuardConfig(spike=SpikeGuard()),
    "MeanStdSpikeGuard": GuardConfig(spike=MeanStdSpikeGuard()),
}


def run(rounds: int = 200) -> dict[str, dict[str, float]]:
    """For each rule, the median microseconds of ``decide`` in NumPy and in eager torch, with their
    spreads."""
    report: dict[str, dict[str, float]] = {name: {} for name in CONFIGS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for label, xp in (("numpy", array_api_compat.numpy), ("torch", array_api_compat.torch)):
            times = interleaved({name: _step(c, xp) for name, c in CONFIGS.items()}, rounds=rounds, warmup=20)
            for name, time in times.items():
                report[name] |= {
                    f"{label}_us": round(time.median * 1e3, 1),
                    f"{label}_spread": round(time.spread, 3),
                }
    finally:
        torch.set_num_threads(threads)
    return report


def _step(config: GuardConfig, xp: Any) -> Callable[[], None]:
    """A function that makes the next decision, always on the same observation."""
    rng = np.random.default_rng(0)

    def array(values: Any) -> Any:
        return xp.asarray(np.asarray(values, np.float32))

    units = Units(
        norms=tuple(array(rng.lognormal(size=UNITS)) for _ in range(PARAMETERS)),
        weights=tuple(array(rng.lognormal(size=UNITS)) for _ in range(PARAMETERS)),
    )
    seen = Observation(
        norms=array(rng.lognormal(size=PARAMETERS)),
        loss=array(2.0),
        units=units if config.unit_rule is not None else None,
        amax=array(1.0),
        tiny=array(0.0),
    )
    state = init_guard(config, PARAMETERS, xp=xp)

    def step() -> None:
        nonlocal state
        with np.errstate(all="ignore"):  # as the adapters do
            _, state = decide(config, state, seen, xp=xp)

    return step
