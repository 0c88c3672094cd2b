"""The state of a guard, captured without a wait, and put back in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from stablenum.arrays import map_leaves
from stablenum.guard.decide import GuardState
from stablenum.guard.statedict import state_to_dict
from stablenum_torch._devices.state import moved_to
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["capture_guard", "plain_guard", "restore_guard"]


def capture_guard(opt: GuardedOptimizer, copied: Callable[[Tensor], Tensor]) -> GuardState:
    """Return copies of the guard's tensors."""
    return map_leaves(copied, opt.guard_state)


def plain_guard(opt: GuardedOptimizer, kept: GuardState) -> dict[str, Any]:
    """Return copies as ``opt.guard_state_dict()`` returns the state: as values for JSON."""
    return state_to_dict(kept, opt._guard.parameters.names_if_known())


def restore_guard(opt: GuardedOptimizer, kept: GuardState | dict[str, Any]) -> None:
    """Put a state back, in either form."""
    if isinstance(kept, dict):
        opt.load_guard_state_dict(kept)
    elif _alike(kept, opt.guard_state):
        opt._guard.load(moved_to(kept, opt.guard_state.step.device))
    else:  # other rules, as while a clip threshold is lower
        opt.load_guard_state_dict(plain_guard(opt, kept))


def _alike(a: Any, b: Any) -> bool:
    """Return whether two states have the same rules and shapes."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
    if type(a) is not type(b):
        return False
    return not isinstance(a, tuple) or (len(a) == len(b) and all(map(_alike, a, b)))
