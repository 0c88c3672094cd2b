"""Modules that were renamed before 0.1.0, so that pickles written until then still load.

A pickle names a class by its module. The names below are those under which classes of states and settings
were pickled; importing one gives the classes from where they are now. Public classes carry the name of the
public module, so no pickle written since depends on a file's name.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]

_RENAMED = {
    "stablenum.clipping": "stablenum.rules.clipping",
    "stablenum.clipping.adagc": "stablenum.rules.clipping.adagc",
    "stablenum.clipping.adaptive": "stablenum.rules.clipping.adaptive",
    "stablenum.clipping.autoclip": "stablenum.rules.clipping.autoclip",
    "stablenum.clipping.by_norm": "stablenum.rules.clipping.by_norm",
    "stablenum.clipping.by_value": "stablenum.rules.clipping.by_value",
    "stablenum.clipping.update_rms": "stablenum.rules.clipping.update_rms",
    "stablenum.clipping.zclip": "stablenum.rules.clipping.zclip",
    "stablenum.config": "stablenum.guard.config",
    "stablenum.delayed_scaling": "stablenum.precision.delayed_scaling",
    "stablenum.escalation": "stablenum.rules.escalation",
    "stablenum.loss_scale": "stablenum.rules.loss_scale",
    "stablenum.loss_scale.dynamic": "stablenum.rules.loss_scale.dynamic",
    "stablenum.loss_scale.log_max": "stablenum.rules.loss_scale.log_max",
    "stablenum.loss_scale.state": "stablenum.rules.loss_scale.state",
    "stablenum.loss_scale.static": "stablenum.rules.loss_scale.static",
    "stablenum.loss_scale.underflow": "stablenum.rules.loss_scale.underflow",
    "stablenum.policy": "stablenum.precision.policy",
    "stablenum.recorder": "stablenum.guard.recorder",
    "stablenum.spikes": "stablenum.rules.spikes",
    "stablenum.status": "stablenum.guard.reasons",
    "stablenum.windows": "stablenum.rules.windows",
    "stablenum_jax.compensated": "stablenum_jax._precision.compensated",
    "stablenum_jax.fp8": "stablenum_jax._precision.fp8",
    "stablenum_jax.scaling": "stablenum_jax._precision.jmp_loss_scale",
    "stablenum_jax.state": "stablenum_jax._trees.state",
    "stablenum_torch.optimizer": "stablenum_torch._step.optimizer",
}


class _Renamed(Loader, MetaPathFinder):
    """Finds a renamed module when no other finder did."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in _RENAMED else None

    def exec_module(self, module: ModuleType) -> None:
        there = importlib.import_module(_RENAMED[module.__name__])
        module.__getattr__ = functools.partial(getattr, there)  # type: ignore[method-assign]


def install() -> None:
    """Make the old names importable; nothing is loaded until one of them is imported."""
    if not any(isinstance(finder, _Renamed) for finder in sys.meta_path):
        sys.meta_path.append(_Renamed())
