"""stablenum for PyTorch: :func:`wrap` guards any ``torch.optim.Optimizer``."""

from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    DelayedScaling,
    DynamicLossScale,
    EscalatePrecision,
    GuardConfig,
    LogMaxLossScale,
    MeanStdSpikeGuard,
    NonFiniteError,
    Policy,
    PolicyRule,
    Reason,
    SpikeGuard,
    StaticLossScale,
    StatisticsNotLoadedWarning,
    UnderflowAwareLossScale,
    ZClip,
)
from stablenum_torch import losses, numerics
from stablenum_torch._devices.compiled_decide import NotCompiledWarning
from stablenum_torch._diagnosis.audit import audit
from stablenum_torch._diagnosis.ranges import range_report
from stablenum_torch._diagnosis.replay.replay import replay
from stablenum_torch._precision import KahanUpdate, MasterWeights, Precision, StochasticRounding, precision
from stablenum_torch._step.checks import EpsTooSmallWarning
from stablenum_torch._step.optimizer import GuardedOptimizer, wrap

__all__ = [
    "AdaGC",
    "AdaptiveGradClip",
    "AutoClip",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipUpdateRMS",
    "DelayedScaling",
    "DynamicLossScale",
    "EpsTooSmallWarning",
    "EscalatePrecision",
    "GuardConfig",
    "GuardedOptimizer",
    "KahanUpdate",
    "LogMaxLossScale",
    "MasterWeights",
    "MeanStdSpikeGuard",
    "NonFiniteError",
    "NotCompiledWarning",
    "Policy",
    "PolicyRule",
    "Precision",
    "Reason",
    "SpikeGuard",
    "StaticLossScale",
    "StatisticsNotLoadedWarning",
    "StochasticRounding",
    "UnderflowAwareLossScale",
    "ZClip",
    "audit",
    "losses",
    "numerics",
    "precision",
    "range_report",
    "replay",
    "wrap",
]
