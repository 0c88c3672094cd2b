"""stablenum: numerical stability for training neural networks, for PyTorch and JAX.

This package is the core. It holds every decision rule, written once over array namespaces. The adapters
``stablenum_torch`` and ``stablenum_jax`` measure gradients and apply the core's decisions. Importing this
package loads no array library.
"""

from typing import TYPE_CHECKING

from stablenum import typing as typing
from stablenum._support.public_names import imported_later, present
from stablenum.errors import (
    CheckpointError,
    NonFiniteError,
    PoisonedStateError,
    ProgramError,
    RecoveryStopped,
    ReplicasPartedError,
)
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import Decision, GuardState, Observation, decide, init_guard
from stablenum.guard.reasons import Reason
from stablenum.guard.statedict import StatisticsNotLoadedWarning
from stablenum.precision.delayed_scaling import DelayedScaling
from stablenum.precision.policy import Policy, PolicyRule
from stablenum.recovery.ledger import RecoveryEvent
from stablenum.recovery.settings import RecoveryPolicy
from stablenum.rules.clipping import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    ZClip,
)
from stablenum.rules.escalation import EscalatePrecision
from stablenum.rules.loss_scale import (
    DynamicLossScale,
    LogMaxLossScale,
    StaticLossScale,
    UnderflowAwareLossScale,
)
from stablenum.rules.spikes import MeanStdSpikeGuard, SpikeGuard

if TYPE_CHECKING:
    from stablenum.diagnosis.diff.compare import diff
    from stablenum.diagnosis.diff.lockfile.asserting import assert_same
    from stablenum.diagnosis.diff.lockfile.loading import load_program
    from stablenum.diagnosis.diff.lockfile.saving import save_program
    from stablenum.diagnosis.diff.report.report import DiffReport

__all__ = [
    "AdaGC",
    "AdaptiveGradClip",
    "AutoClip",
    "CheckpointError",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "ClipUpdateRMS",
    "Decision",
    "DelayedScaling",
    "DiffReport",
    "DynamicLossScale",
    "EscalatePrecision",
    "GuardConfig",
    "GuardState",
    "LogMaxLossScale",
    "MeanStdSpikeGuard",
    "NonFiniteError",
    "Observation",
    "PoisonedStateError",
    "Policy",
    "PolicyRule",
    "ProgramError",
    "Reason",
    "RecoveryEvent",
    "RecoveryPolicy",
    "RecoveryStopped",
    "ReplicasPartedError",
    "SpikeGuard",
    "StaticLossScale",
    "StatisticsNotLoadedWarning",
    "UnderflowAwareLossScale",
    "ZClip",
    "assert_same",
    "decide",
    "diff",
    "init_guard",
    "load_program",
    "save_program",
]

__version__ = "0.1.0"

__dir__ = present(globals())
if not TYPE_CHECKING:
    __getattr__ = imported_later(
        globals(),
        {
            "DiffReport": "stablenum.diagnosis.diff.report.report",
            "assert_same": "stablenum.diagnosis.diff.lockfile.asserting",
            "diff": "stablenum.diagnosis.diff.compare",
            "load_program": "stablenum.diagnosis.diff.lockfile.loading",
            "save_program": "stablenum.diagnosis.diff.lockfile.saving",
        },
    )
