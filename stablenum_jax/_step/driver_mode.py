"""The mode in which a driver, the code around an optax transformation, runs the guard inside it.

The driver is :mod:`stablenum_jax._step.decide_and_update`. The transformations between the driver and the
guard are opaque to both, so the mode is passed in a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias

import jax

import stablenum
from stablenum_jax._step.measure.over_axes import AxisName
from stablenum_jax._step.observe import Watched

__all__ = ["Capture", "Deferred", "Direct", "GuardReached", "Passing", "current_mode", "in_mode"]

Array: TypeAlias = jax.Array


class Capture(NamedTuple):
    """The guard does nothing but raise :class:`GuardReached`."""


class Passing(NamedTuple):
    """The guard returns the gradients as they are, because the program of the update is only looked at."""


class Direct(NamedTuple):
    """The guard only multiplies, because the driver has decided."""

    decision: stablenum.Decision


class Deferred(NamedTuple):
    """The guard measures and decides; the driver undoes a step that the guard skips.

    Attributes:
        unscaled: whether the driver has already divided the gradients by the loss scale.
        loss: the unscaled loss of the step, if the driver knows it.
    """

    unscaled: bool
    loss: Array | None


Mode: TypeAlias = Capture | Passing | Direct | Deferred | None
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
    """Ends the capture. It is a BaseException, so that no transformation in between swallows it."""

    def __init__(
        self, config: stablenum.GuardConfig, axis_name: AxisName | None, watched: Watched, *, log_skips: bool
    ) -> None:
        super().__init__()
        self.config, self.axis_name, self.watched, self.log_skips = config, axis_name, watched, log_skips
