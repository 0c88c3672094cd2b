"""Oracles: what the core should compute, in exact or float64 Python that shares no code with it."""

from tests.oracles.basics import (
    FLOAT32_MAX,
    clip_coefficient,
    clip_factors,
    global_norm,
    round_to_float32,
)
from tests.oracles.clipping import (
    AdaGCOracle,
    AdaptiveGradClipOracle,
    AutoClipOracle,
    GlobalNormOracle,
    TensorNormOracle,
    ZClipOracle,
    clip_update_factor,
)
from tests.oracles.guard import GuardOracle, Outcome
from tests.oracles.loss_scale import LogMaxOracle, LossScaleOracle, NaiveLogMaxOracle, UnderflowAwareOracle
from tests.oracles.spikes import MeanStdSpikeOracle, SpikeGuardOracle

__all__ = [
    "FLOAT32_MAX",
    "AdaGCOracle",
    "AdaptiveGradClipOracle",
    "AutoClipOracle",
    "GlobalNormOracle",
    "GuardOracle",
    "LogMaxOracle",
    "LossScaleOracle",
    "MeanStdSpikeOracle",
    "NaiveLogMaxOracle",
    "Outcome",
    "SpikeGuardOracle",
    "TensorNormOracle",
    "UnderflowAwareOracle",
    "ZClipOracle",
    "clip_coefficient",
    "clip_factors",
    "clip_update_factor",
    "global_norm",
    "round_to_float32",
]
