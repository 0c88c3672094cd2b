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
from stablenum_torch.auditing import audit
from stablenum_torch.checks import EpsTooSmallWarning
from stablenum_torch.compiled import NotCompiledWarning
from stablenum_torch.narrow import KahanUpdate, MasterWeights, Precision, StochasticRounding, precision
from stablenum_torch.optimizer import GuardedOptimizer, wrap
from stablenum_torch.ranging import range_report
from stablenum_torch.tracing.replaying import replay

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
