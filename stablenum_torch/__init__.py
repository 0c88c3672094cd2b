"""stablenum for PyTorch: :func:`wrap` guards any ``torch.optim.Optimizer``."""

from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    DynamicLossScale,
    GuardConfig,
    LogMaxLossScale,
    MeanStdSpikeGuard,
    NonFiniteError,
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
from stablenum_torch.optimizer import GuardedOptimizer, wrap
from stablenum_torch.tracing.replaying import replay

__all__ = [
    "AdaGC",
    "AdaptiveGradClip",
    "AutoClip",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipUpdateRMS",
    "DynamicLossScale",
    "EpsTooSmallWarning",
    "GuardConfig",
    "GuardedOptimizer",
    "LogMaxLossScale",
    "MeanStdSpikeGuard",
    "NonFiniteError",
    "Reason",
    "SpikeGuard",
    "StaticLossScale",
    "StatisticsNotLoadedWarning",
    "UnderflowAwareLossScale",
    "ZClip",
    "audit",
    "losses",
    "numerics",
    "replay",
    "wrap",
]
