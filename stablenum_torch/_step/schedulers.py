"""Schedulers that stand still at a skipped step."""

from __future__ import annotations

import functools
import weakref
from typing import Any, TypeVar

from torch.optim.lr_scheduler import ReduceLROnPlateau

from stablenum.errors import bad_type

__all__ = ["hold"]

S = TypeVar("S")

_GUARD = "_stablenum_guard"  # on the inner optimizer: a reference to the guarded one


class _Held:
    """What comes before a scheduler's own class: its ``step`` does nothing after a skipped step.

    A scheduler saves all its attributes, so nothing is added to them: the guard is found by the optimizer.
    """

    optimizer: Any

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if _guarded(self.optimizer).step_was_skipped:
            return None
        return super().step(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _made, (type(self).__mro__[2],), self.__dict__


@functools.cache
def _held(cls: type) -> type:
    """Return the class of held schedulers of a class."""
    return type(f"Held{cls.__name__}", (_Held, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _made(cls: type) -> Any:
    """Return a held scheduler without attributes, for copies and pickles."""
    return object.__new__(_held(cls))


def _guarded(optimizer: Any) -> Any:
    """Return the guarded optimizer of a scheduler's optimizer, which may be the one inside.

    Raises:
        RuntimeError: the optimizer is a copy, which no guard knows.
    """
    if hasattr(optimizer, "step_was_skipped"):
        return optimizer
    found = getattr(optimizer, _GUARD, lambda: None)()
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
    if of is guarded.inner:
        setattr(guarded.inner, _GUARD, weakref.ref(guarded))
    scheduler.__class__ = _held(type(scheduler))  # type: ignore[arg-type]
    return scheduler
