"""How the code around an optax transformation instructs the guard inside it.

The transformations between the two are opaque to both, so the instruction is a context variable. The code
around them, :mod:`stablenum_jax._step.decide_and_update`, is called the driver here.
"""

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
    """Raise :class:`GuardReached` instead of doing anything."""


class Direct(NamedTuple):
    """Multiply only: the driver has decided."""

    decision: stablenum.Decision


class Deferred(NamedTuple):
    """Measure and decide; the driver undoes a step that the guard skips.

    Attributes:
        unscaled: the driver has already divided the gradients by the loss scale.
        loss: the unscaled loss of the step, if the driver knows it.
    """

    unscaled: bool
    loss: Array | None


Mode: TypeAlias = Capture | Direct | Deferred | None
_MODE: ContextVar[Mode] = ContextVar("stablenum_jax_mode", default=None)


def current_mode() -> Mode:
    """Return the mode that the driver has set; None if there is no driver."""
    return _MODE.get()


@contextmanager
def in_mode(mode: Mode) -> Iterator[None]:
    """Run the body in this mode."""
    token = _MODE.set(mode)
    try:
        yield
    finally:
        _MODE.reset(token)


class GuardReached(BaseException):
    """Ends the capture. A BaseException, so that no transformation in between swallows it."""

    def __init__(self, config: stablenum.GuardConfig, axis_name: AxisName | None, watched: Watched) -> None:
        super().__init__()
        self.config, self.axis_name, self.watched = config, axis_name, watched
