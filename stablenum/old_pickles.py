"""The old names of modules that were renamed before 0.1.0, so that pickles written before then still load.

A pickle names a class by its module. The names below are those under which the classes of states, settings,
results and optimizers were pickled; importing one of them gives the classes from their present modules.
Public classes are now pickled under the name of the public package. Private classes, such as the states of
rules, are still pickled under the name of their file: when such a file moves, its old name is added here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["install"]

_RENAMED = {
    "stablenum.clipping": "stablenum.rules.clipping",
    "stablenum.clipping.adagc": "stablenum.rules.clipping.adagc",
    "stablenum.clipping.adaptive": "stablenum.rules.clipping.adaptive",
    "stablenum.clipping.autoclip": "stablenum.rules.clipping.autoclip",
    "stablenum.clipping.by_norm": "stablenum.rules.clipping.by_norm",
    "stablenum.clipping.by_value": "stablenum.rules.clipping.by_value",
    "stablenum.clipping.chain": "stablenum.rules.clipping.chain",
    "stablenum.clipping.update_rms": "stablenum.rules.clipping.update_rms",
    "stablenum.clipping.zclip": "stablenum.rules.clipping.zclip",
    "stablenum.config": "stablenum.guard.config",
    "stablenum.delayed_scaling": "stablenum.precision.delayed_scaling",
    "stablenum.diagnosis.audit.laws": "stablenum.diagnosis.audit.update_formulas",
    "stablenum.diagnosis.audit.risks": "stablenum.diagnosis.audit.risk_rules",
    "stablenum.diagnosis.audit.telemetry": "stablenum.diagnosis.audit.measured",
    "stablenum.diagnosis.causes": "stablenum.diagnosis.replay.causes",
    "stablenum.diagnosis.findings": "stablenum.diagnosis.replay.findings",
    "stablenum.diagnosis.judge": "stablenum.diagnosis.replay.judge",
    "stablenum.diagnosis.values": "stablenum.diagnosis.replay.values",
    "stablenum.escalation": "stablenum.rules.escalation",
    "stablenum.loss_scale": "stablenum.rules.loss_scale",
    "stablenum.loss_scale.dynamic": "stablenum.rules.loss_scale.dynamic",
    "stablenum.loss_scale.log_max": "stablenum.rules.loss_scale.log_max",
    "stablenum.loss_scale.state": "stablenum.rules.loss_scale.state",
    "stablenum.loss_scale.static": "stablenum.rules.loss_scale.static",
    "stablenum.loss_scale.underflow": "stablenum.rules.loss_scale.underflow",
    "stablenum.policy": "stablenum.precision.policy",
    "stablenum.ranges": "stablenum.diagnosis.ranges",
    "stablenum.ranges.report": "stablenum.diagnosis.ranges.report",
    "stablenum.ranges.rows": "stablenum.diagnosis.ranges.rows",
    "stablenum.ranges.verdicts": "stablenum.diagnosis.ranges.verdicts",
    "stablenum.readout": "stablenum.guard.readout",
    "stablenum.recorder": "stablenum.guard.recorder",
    "stablenum.reference_optim": "stablenum.reference.optimizers",
    "stablenum.spikes": "stablenum.rules.spikes",
    "stablenum.statedict": "stablenum.guard.statedict",
    "stablenum.status": "stablenum.guard.reasons",
    "stablenum.windows": "stablenum.rules.windows",
    "stablenum_jax.compensated": "stablenum_jax._precision.compensated",
    "stablenum_jax.fp8": "stablenum_jax._precision.fp8",
    "stablenum_jax.placement": "stablenum_jax._step.warnings",
    "stablenum_jax.scaling": "stablenum_jax._precision.jmp_loss_scale",
    "stablenum_jax.state": "stablenum_jax._trees.state",
    "stablenum_torch.checks": "stablenum_torch._step.checks",
    "stablenum_torch.compiled": "stablenum_torch._devices.compiled_decide",
    "stablenum_torch.narrow": "stablenum_torch._precision",
    "stablenum_torch.narrow.compensated": "stablenum_torch._precision.compensated",
    "stablenum_torch.narrow.eight_bits": "stablenum_torch._precision.fp8",
    "stablenum_torch.narrow.islands": "stablenum_torch._precision.model",
    "stablenum_torch.narrow.masters": "stablenum_torch._precision.master_weights",
    "stablenum_torch.narrow.twins": "stablenum_torch._precision.float32_copies",
    "stablenum_torch.optimizer": "stablenum_torch._step.optimizer",
}
# Maps the old names of renamed classes to the present ones.
_RENAMED_CLASSES = {"Law": "UpdateFormula", "Precision": "PolicyHandle"}


class _Renamed(Loader, MetaPathFinder):
    """Finds a renamed module after all other finders have failed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in _RENAMED else None

    def exec_module(self, module: ModuleType) -> None:
        there = importlib.import_module(_RENAMED[module.__name__])

        def find(name: str) -> Any:
            # Names such as __file__ are not forwarded: tools that inspect modules must not mistake this
            # module for the other.
            if name.startswith("__") or not hasattr(there, now := _RENAMED_CLASSES.get(name, name)):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(there, now)

        module.__getattr__ = find  # type: ignore[method-assign]


def install() -> None:
    """Make the old names importable. Nothing is loaded until one of them is imported."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.append(_Renamed())
