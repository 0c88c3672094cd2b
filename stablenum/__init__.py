"""stablenum: numerical stability for training neural networks, for PyTorch and JAX.

This package is the core: every policy, written once over array namespaces. The adapters
``stablenum_torch`` and ``stablenum_jax`` measure gradients and apply its decisions. Importing it
loads no array library.
"""

from stablenum.clipping import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    Units,
    ZClip,
)
from stablenum.config import GuardConfig
from stablenum.delayed_scaling import DelayedScaling, DelayedScalingState
from stablenum.errors import NonFiniteError
from stablenum.escalation import EscalatePrecision
from stablenum.guard import Decision, GuardState, Observation, decide, init_guard
from stablenum.loss_scale import (
    DynamicLossScale,
    LogMaxLossScale,
    StaticLossScale,
    UnderflowAwareLossScale,
)
from stablenum.policy import Policy, PolicyRule
from stablenum.spikes import MeanStdSpikeGuard, SpikeGuard
from stablenum.statedict import StatisticsNotLoadedWarning
from stablenum.status import Reason

__all__ = [
    "AdaGC",
    "AdaptiveGradClip",
    "AutoClip",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipUpdateRMS",
    "Decision",
    "DelayedScaling",
    "DelayedScalingState",
    "DynamicLossScale",
    "EscalatePrecision",
    "GuardConfig",
    "GuardState",
    "LogMaxLossScale",
    "MeanStdSpikeGuard",
    "NonFiniteError",
    "Observation",
    "Policy",
    "PolicyRule",
    "Reason",
    "SpikeGuard",
    "StaticLossScale",
    "StatisticsNotLoadedWarning",
    "UnderflowAwareLossScale",
    "Units",
    "ZClip",
    "decide",
    "init_guard",
]

__version__ = "0.1.0"
