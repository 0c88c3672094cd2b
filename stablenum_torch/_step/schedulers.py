"""Schedulers that stand still at a skipped step."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from stablenum._support.mixins import Mixin, mix_in
from stablenum.errors import bad_type

__all__ = ["hold", "remember"]

S = TypeVar("S")

# The guarded optimizer of an inner one. It is not an attribute of the inner one, which might be pickled.
_GUARDED: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class _Held(Mixin):
    """Methods in front of those of a scheduler's own class: ``step`` does nothing after a skipped step.

    A scheduler saves all its attributes, so nothing is added to them: the guard is found by the optimizer.
    """

    optimizer: Any

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if _guarded(self.optimizer).step_was_skipped:
            return None
        return super().step(*args, **kwargs)  # type: ignore[misc]


def remember(guarded: Any) -> None:
    """Remember the guarded optimizer of the one inside, for which a scheduler may be made."""
    _GUARDED[guarded.inner] = weakref.ref(guarded)


def _guarded(optimizer: Any) -> Any:
    """Return the guarded optimizer of a scheduler's optimizer, which may be the one inside.

    Raises:
        RuntimeError: no guard knows the optimizer.
    """
    if hasattr(optimizer, "step_was_skipped"):
        return optimizer
    found = _GUARDED.get(optimizer, lambda: None)()
    if found is None:
        raise RuntimeError(
            "A held scheduler must have the optimizer of a guard; got one whose guard is gone, as after a "
            "copy of the inner optimizer. Make it for the guarded optimizer, or call opt.hold again."
        )
    return found


def hold(guarded: Any, scheduler: S) -> S:
    """Change a scheduler's class so that it stands still at a skipped step: ``GuardedOptimizer.hold``."""
    if not callable(getattr(scheduler, "step", None)) or isinstance(scheduler, ReduceLROnPlateau):
        raise bad_type("scheduler", "a learning-rate scheduler that is stepped after each step", scheduler)
    if isinstance(scheduler, _Held):
        return scheduler
    of = getattr(scheduler, "optimizer", None)
    if of is not guarded and of is not guarded.inner:
        got = "one without an optimizer" if of is None else f"one of another optimizer, {type(of).__name__}"
        raise ValueError(f"scheduler must be made for this optimizer; got {got}.")
    return mix_in(_Held, scheduler)
