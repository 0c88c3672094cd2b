"""The recorder: the last 128 steps, written on the device and read on request.

The rows are stored in two small arrays in the guard's state. Each step shifts the arrays by one row. This
needs no index, works in every framework and inside a scan, and moves only a few kilobytes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from stablenum.formats import NO_LOSS
from stablenum.guard.reasons import APPLIED, Reason

__all__ = [
    "CAPACITY",
    "Recorder",
    "Row",
    "init_recorder",
    "last_row",
    "read_rows",
    "record",
    "record_fault",
    "recorded_loss",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

CAPACITY = 128

# A row holds NO_LOSS for a loss that was not given. A loss that is this number, as one below float32's range
# becomes, is held as the next number above.
_LOWEST_LOSS = NO_LOSS + 2.0**104


class Recorder(NamedTuple):
    """The rows, oldest first.

    Attributes:
        floats: (128, 4) float32: loss (``NO_LOSS`` if not given), grad_norm, loss_scale, clip_coefficient.
        ints: (128, 4) int32: step, reason, worst, precision_level. A row that is not yet written has step -1.
    """

    floats: Array
    ints: Array


class Row(NamedTuple):
    """One recorded step, on the host.

    Attributes:
        step: the number of steps that the guard had seen before this one.
        loss: the unscaled loss; NaN if it was not given.
        grad_norm: the L2 norm of the unscaled gradients before clipping.
        loss_scale: the loss scale of this step.
        clip_coefficient: the smallest factor that clipping applied; 1 for no clipping.
        reason: see :class:`stablenum.Reason`.
        worst: the index of the first parameter with a non-finite norm, otherwise of the one with the largest
            norm; -1 if there are no parameters.
        precision_level: how many formats wider than its policy the step computed; 0 without escalation.
    """

    step: int
    loss: float
    grad_norm: float
    loss_scale: float
    clip_coefficient: float
    reason: Reason
    worst: int
    precision_level: int = 0

    @property
    def applied(self) -> bool:
        """Whether the step was applied."""
        return self.reason in APPLIED


def init_recorder(*, xp: Namespace, device: Any = None) -> Recorder:
    """Return a recorder without rows."""
    return Recorder(
        floats=xp.zeros((CAPACITY, 4), dtype=xp.float32, device=device),
        ints=xp.full((CAPACITY, 4), -1, dtype=xp.int32, device=device),
    )


def recorded_loss(loss: Array | None, like: Array, *, xp: Namespace) -> Array:
    """Return what a row holds for a loss: () float32, as ``like`` is."""
    if loss is None:
        return xp.full_like(like, NO_LOSS)
    return xp.where(loss == NO_LOSS, xp.full_like(like, _LOWEST_LOSS), loss)


def record_fault(recorder: Recorder, reason: Array, worst: Array, *, xp: Namespace) -> Recorder:
    """Return the recorder with the reason and the worst parameter of the last step replaced.

    Args:
        recorder: the recorder after the step.
        reason: () int32; 0 for no fault, which replaces nothing.
        worst: () int32, the index of the parameter at fault; -1 if it is none in particular.
        xp: the array namespace.
    """
    last = recorder.ints[-1, :]
    worst = xp.where(worst < 0, last[2], worst)
    row = xp.where(reason == 0, last, xp.stack([last[0], reason, worst, last[3]]))
    return Recorder(recorder.floats, xp.concat([recorder.ints[:-1, :], row[None, :]]))


def record(recorder: Recorder, floats: list[Array], ints: list[Array], *, xp: Namespace) -> Recorder:
    """Return the recorder with a new row added and the oldest row dropped.

    Args:
        recorder: the rows before.
        floats: the 4 () float32 values of the row.
        ints: the 4 () int32 values of the row.
        xp: the array namespace.
    """
    return Recorder(
        floats=xp.concat([recorder.floats[1:], xp.stack(floats)[None, :]]),
        ints=xp.concat([recorder.ints[1:], xp.stack(ints)[None, :]]),
    )


def read_rows(recorder: Recorder) -> list[Row]:
    """Return the recorded steps, oldest first. The call makes the host wait for the device."""
    rows = zip(recorder.floats.tolist(), recorder.ints.tolist(), strict=True)
    return [_row(floats, ints) for floats, ints in rows if ints[0] >= 0]


def last_row(recorder: Recorder) -> Row | None:
    """Return the last recorded step, None if there is none. The call makes the host wait for the device."""
    floats, ints = recorder.floats.tolist()[-1], recorder.ints.tolist()[-1]
    return _row(floats, ints) if ints[0] >= 0 else None


def _row(floats: list[float], ints: list[int]) -> Row:
    (loss, grad_norm, scale, clip), (step, reason, worst, level) = floats, ints
    loss = math.nan if loss == NO_LOSS else loss
    return Row(step, loss, grad_norm, scale, clip, Reason(reason), worst, level)
