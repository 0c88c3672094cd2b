"""stablenum for PyTorch: :func:`wrap` guards any ``torch.optim.Optimizer``."""

from stablenum import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DynamicLossScale,
    GuardConfig,
    NonFiniteError,
    Reason,
    StaticLossScale,
)
from stablenum_torch.checks import EpsTooSmallWarning
from stablenum_torch.optimizer import GuardedOptimizer, wrap

__all__ = [
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "DynamicLossScale",
    "EpsTooSmallWarning",
    "GuardConfig",
    "GuardedOptimizer",
    "NonFiniteError",
    "Reason",
    "StaticLossScale",
    "wrap",
]
