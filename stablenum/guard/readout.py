"""Reading a guard's state on the host, which waits for the device.

This works for every framework, because the only method of a leaf that it calls is ``.tolist()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict, cast

from stablenum.guard.decide import GuardState
from stablenum.guard.reasons import Reason
from stablenum.guard.recorder import Row, read_rows

__all__ = ["Metrics", "StepRecord", "Worst", "history", "metrics"]


class Worst(NamedTuple):
    """The first parameter with a non-finite gradient norm, otherwise the one with the largest norm.

    ``index`` is -1 and ``name`` None if there is no parameter; ``name`` is None if names are not known.
    """

    index: int  # type: ignore[assignment]  # shadows tuple.index on purpose
    name: str | None


class StepRecord(TypedDict):
    """One recorded step in plain values, an entry of ``history``.

    Attributes:
        step: the step's number, from 0.
        loss: the unscaled loss; NaN if it was not given.
        grad_norm: the joint norm of the unscaled gradients before clipping; NaN or inf if one is not finite.
        loss_scale: the scale that the step ran with; 1.0 without scaling.
        clip_coefficient: what clipping multiplied the gradients by; 1.0 where nothing was clipped.
        reason: why the step was applied or skipped.
        applied: whether it was applied.
        worst: the parameter with the first non-finite gradient norm, else with the largest one.
        precision_level: how many formats wider than the first the step computed in.
    """

    step: int
    loss: float
    grad_norm: float
    loss_scale: float
    clip_coefficient: float
    reason: Reason
    applied: bool
    worst: Worst
    precision_level: int


class Metrics(StepRecord):
    """The last step and the counters of skips: what ``opt.last`` and ``stablenum_jax.metrics`` return.

    Attributes:
        skipped_total: steps skipped so far.
        skipped_in_a_row: steps skipped since the last one that was applied.
    """

    skipped_total: int
    skipped_in_a_row: int


def _record(row: Row, names: Sequence[str] | None) -> StepRecord:
    known = names is not None and 0 <= row.worst < len(names)
    worst = Worst(row.worst, names[row.worst] if names is not None and known else None)
    return cast("StepRecord", row._asdict() | {"applied": row.applied, "worst": worst})


def history(state: GuardState, names: Sequence[str] | None = None) -> list[StepRecord]:
    """Return the recorded steps (at most 128), oldest first, as dicts of plain values.

    Keys: step, loss (NaN if not given), grad_norm, loss_scale, clip_coefficient, reason,
    applied, worst, precision_level.

    Example:
        >>> import numpy as np
        >>> from stablenum import GuardConfig, init_guard
        >>> history(init_guard(GuardConfig(), 1, xp=np))
        []
    """
    return [_record(row, names) for row in read_rows(state.recorder)]


def metrics(state: GuardState, names: Sequence[str] | None = None) -> Metrics:
    """Return the last step as a dict of plain values: its row of :func:`history` and the counters of skips.

    Before the first step ``applied`` is False, ``reason`` NO_STEP_YET and ``grad_norm`` NaN.

    Example:
        >>> import numpy as np
        >>> from stablenum import GuardConfig, init_guard
        >>> metrics(init_guard(GuardConfig(), 1, xp=np))["reason"].name
        'NO_STEP_YET'
    """
    rows = read_rows(state.recorder)
    nan = float("nan")
    row = (
        rows[-1] if rows else Row(-1, nan, nan, state.loss_scale.scale.tolist(), 1.0, Reason.NO_STEP_YET, -1)
    )
    return {
        **_record(row, names),
        "skipped_total": state.skipped_total.tolist(),
        "skipped_in_a_row": state.skipped_in_a_row.tolist(),
    }
