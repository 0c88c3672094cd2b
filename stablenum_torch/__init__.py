"""stablenum for PyTorch: :func:`wrap` guards any ``torch.optim.Optimizer``."""

from stablenum.public_names import present
from stablenum_torch import losses, numerics
from stablenum_torch._devices.compiled_decide import NotCompiledWarning
from stablenum_torch._diagnosis.audit import audit, repair
from stablenum_torch._diagnosis.ranges import range_report
from stablenum_torch._diagnosis.replay.replay import replay
from stablenum_torch._precision import KahanUpdate, MasterWeights, PolicyHandle, StochasticRounding, precision
from stablenum_torch._step.checks import EpsTooSmallWarning
from stablenum_torch._step.optimizer import GuardedOptimizer, wrap

__all__ = [
    "EpsTooSmallWarning",
    "GuardedOptimizer",
    "KahanUpdate",
    "MasterWeights",
    "NotCompiledWarning",
    "PolicyHandle",
    "StochasticRounding",
    "audit",
    "losses",
    "numerics",
    "precision",
    "range_report",
    "repair",
    "replay",
    "wrap",
]

__dir__ = present(globals())
