"""stablenum for PyTorch: :func:`wrap` guards any ``torch.optim.Optimizer``."""

from typing import TYPE_CHECKING, Any

try:
    import torch  # noqa: F401  whether it is there
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise  # it is there, and lacks something itself
    raise ModuleNotFoundError("stablenum_torch needs PyTorch: pip install torch", name=error.name) from error

from stablenum import __version__ as __version__
from stablenum._support.public_names import imported_later, present
from stablenum_torch import losses, numerics
from stablenum_torch import typing as typing
from stablenum_torch._devices.compiled_decide import NotCompiledWarning
from stablenum_torch._precision import KahanUpdate, MasterWeights, StochasticRounding, precision
from stablenum_torch._step.checks import EpsTooSmallWarning
from stablenum_torch._step.optimizer import GuardedOptimizer, wrap

if TYPE_CHECKING:
    from stablenum.diagnosis.report.report import Report
    from stablenum_torch._diagnosis.audit import audit, repair
    from stablenum_torch._diagnosis.checkup.few_steps import checkup
    from stablenum_torch._diagnosis.diff.program import program
    from stablenum_torch._diagnosis.ranges import range_report
    from stablenum_torch._diagnosis.replay.replay import replay
    from stablenum_torch._precision.blocks import dequantize, quantize
    from stablenum_torch._recovery.checkpoints import Checkpoints
    from stablenum_torch._recovery.recovery import Recovery

__all__ = [
    "Checkpoints",
    "EpsTooSmallWarning",
    "GuardedOptimizer",
    "KahanUpdate",
    "MasterWeights",
    "NotCompiledWarning",
    "Recovery",
    "StochasticRounding",
    "audit",
    "checkup",
    "dequantize",
    "losses",
    "numerics",
    "precision",
    "program",
    "quantize",
    "range_report",
    "repair",
    "replay",
    "wrap",
]


def _explain_step(*args: Any) -> "Report":
    # The replay is loaded when a user asks why a step was skipped.
    from stablenum_torch._diagnosis.explain import explain_step

    return explain_step(*args)


GuardedOptimizer._explain_step = _explain_step
__dir__ = present(globals())
if not TYPE_CHECKING:
    __getattr__ = imported_later(
        globals(),
        {
            "Checkpoints": "stablenum_torch._recovery.checkpoints",
            "Recovery": "stablenum_torch._recovery.recovery",
            "audit": "stablenum_torch._diagnosis.audit",
            "checkup": "stablenum_torch._diagnosis.checkup.few_steps",
            "dequantize": "stablenum_torch._precision.blocks",
            "program": "stablenum_torch._diagnosis.diff.program",
            "quantize": "stablenum_torch._precision.blocks",
            "range_report": "stablenum_torch._diagnosis.ranges",
            "repair": "stablenum_torch._diagnosis.audit",
            "replay": "stablenum_torch._diagnosis.replay.replay",
        },
    )
