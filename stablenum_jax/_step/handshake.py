"""What a driver tells the guard inside an optax transformation, which neither of them can see through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias

import jax

import stablenum
from stablenum_jax._step.measure import AxisName
from stablenum_jax._step.observe import Watched

__all__ = ["Capture", "Deferred", "Direct", "GuardReached", "current_mode", "in_mode"]

Array: TypeAlias = jax.Array


class Capture(NamedTuple):
    """The guard shall raise :class:`GuardReached` instead of doing anything."""


class Direct(NamedTuple):
    """The driver has decided: the guard shall only multiply."""

    decision: stablenum.Decision


class Deferred(NamedTuple):
    """The guard shall measure and decide for itself; a driver around it will undo a refused step.

    Attributes:
        unscaled: the driver has divided the gradients by the loss scale already.
        loss: the unscaled loss of the step, if the driver knows it.
    """

    unscaled: bool
    loss: Array | None


Mode: TypeAlias = Capture | Direct | Deferred | None
_MODE: ContextVar[Mode] = ContextVar("stablenum_jax_mode", default=None)


def current_mode() -> Mode:
    """What a driver further out has told the guard to do; None if there is no driver."""
    return _MODE.get()


@contextmanager
def in_mode(mode: Mode) -> Iterator[None]:
    """Run the body with the guard told so."""
    token = _MODE.set(mode)
    try:
        yield
    finally:
        _MODE.reset(token)


class GuardReached(BaseException):
    """Ends the capture. A BaseException, so that no transformation on the way swallows it."""

    def __init__(self, config: stablenum.GuardConfig, axis_name: AxisName | None, watched: Watched) -> None:
        super().__init__()
        self.config, self.axis_name, self.watched = config, axis_name, watched
