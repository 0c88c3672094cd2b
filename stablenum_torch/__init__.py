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
from stablenum_torch.checks import EpsTooSmallWarning
from stablenum_torch.narrow import KahanUpdate, MasterWeights, StochasticRounding
from stablenum_torch.optimizer import GuardedOptimizer, wrap

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
    "KahanUpdate",
    "LogMaxLossScale",
    "MasterWeights",
    "MeanStdSpikeGuard",
    "NonFiniteError",
    "Reason",
    "SpikeGuard",
    "StaticLossScale",
    "StatisticsNotLoadedWarning",
    "StochasticRounding",
    "UnderflowAwareLossScale",
    "ZClip",
    "losses",
    "numerics",
    "wrap",
]
