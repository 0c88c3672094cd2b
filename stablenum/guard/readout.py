"""Reading a guard's state on the host, which makes the host wait for the device.

The functions work for every framework, because ``.tolist()`` is the only method of an array that they call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict, cast

from stablenum.errors import bad_type
from stablenum.guard.decide import GuardState
from stablenum.guard.ranks import parameter_of, rank_of
from stablenum.guard.reasons import Reason
from stablenum.guard.recorder import Row, last_row, read_rows

__all__ = ["Metrics", "Names", "StepRecord", "Worst", "history", "loss_was_given", "metrics", "scalars"]


# The parameters' names; or, where ranks hold different parameters, what returns a rank's number and its
# parameters' names for its position among the ranks that decide together (None: this process decides alone).
_OfRank: TypeAlias = "tuple[int | None, Sequence[str] | None]"
Names: TypeAlias = "Sequence[str] | Callable[[int | None], _OfRank]"


class Worst(NamedTuple):
    """The first parameter with a non-finite gradient norm, otherwise the one with the largest norm.

    If there is no parameter, ``index`` is -1 and ``name`` is None. If names are not known, ``name`` is None.
    """

    index: int  # type: ignore[assignment]  # shadows tuple.index on purpose
    name: str | None


class StepRecord(TypedDict):
    """One recorded step in plain values, an entry of ``history``.

    Attributes:
        step: the step's number, from 0.
        loss: the unscaled loss; NaN if it was not given.
        grad_norm: the joint norm of the unscaled gradients before clipping; NaN or inf if a gradient is not
            finite.
        loss_scale: the loss scale of the step; 1.0 without scaling.
        clip_coefficient: the smallest factor that clipping applied; 1.0 if nothing was clipped.
        reason: why the step was applied or skipped.
        applied: whether the step was applied.
        worst: the parameter with the first non-finite gradient norm, otherwise with the largest norm.
        precision_level: how many formats wider than its policy the step computed.
        worst_rank: the rank (PyTorch) or the position on the mesh (JAX) that ``worst`` belongs to, where
            several decide together: the first whose loss is not finite, unless none has a finite one;
            otherwise the first whose gradient is not; otherwise the one with the largest part of the
            gradient. None where one process decides alone, or all have the same bad gradient.
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
    worst_rank: int | None


class Metrics(StepRecord):
    """The last step and the counters of skips: what ``opt.last`` and ``stablenum_jax.metrics`` return.

    Attributes:
        skipped_total: the number of steps skipped so far.
        skipped_in_a_row: the number of steps skipped since the last one that was applied.
    """

    skipped_total: int
    skipped_in_a_row: int


class _Fields(dict[str, Any]):
    """A record whose entries are also attributes: ``last.reason`` is ``last["reason"]``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a step has no {name!r}; it has {', '.join(self)}.") from None


def _record(row: Row, names: Names | None) -> StepRecord:
    rank, index = rank_of(row.worst), parameter_of(row.worst)
    if callable(names):
        rank, of_rank = names(rank)
    else:
        of_rank = names
    known = of_rank is not None and 0 <= index < len(of_rank)
    worst = Worst(index, of_rank[index] if of_rank is not None and known else None)
    found = {"applied": row.applied, "worst": worst, "worst_rank": rank}
    return cast("StepRecord", _Fields(row._asdict() | found))


def history(state: GuardState, names: Names | None = None) -> list[StepRecord]:
    """Return the recorded steps (at most 128), oldest first, as dicts of plain values.

    Keys: step, loss (NaN if not given), grad_norm, loss_scale, clip_coefficient, reason,
    applied, worst, precision_level, worst_rank.

    Example:
        >>> import numpy as np
        >>> from stablenum import GuardConfig, init_guard
        >>> history(init_guard(GuardConfig(), 1, xp=np))
        []
    """
    return [_record(row, names) for row in read_rows(state.recorder)]


def metrics(state: GuardState, names: Names | None = None) -> Metrics:
    """Return the last step as a dict of plain values: its entry in :func:`history`, and the skip counters.
    They are attributes, too: ``last.reason`` is ``last["reason"]``.

    Before the first step, ``applied`` is False, ``reason`` is NO_STEP_YET and ``grad_norm`` is NaN.

    Example:
        >>> import numpy as np
        >>> from stablenum import GuardConfig, init_guard
        >>> metrics(init_guard(GuardConfig(), 1, xp=np))["reason"].name
        'NO_STEP_YET'
    """
    row, nan = last_row(state.recorder), float("nan")
    if row is None:
        row = Row(-1, nan, nan, state.loss_scale.scale.tolist(), 1.0, Reason.NO_STEP_YET, -1)
    skips = {name: getattr(state, name).tolist() for name in ("skipped_total", "skipped_in_a_row")}
    return cast("Metrics", _Fields(_record(row, names), **skips))


def loss_was_given(row: Mapping[str, Any]) -> bool:
    """Return whether a step knew its loss: one that is NaN is the step's reason, whatever else is bad."""
    return not math.isnan(row["loss"]) or row["reason"] == Reason.NONFINITE_LOSS


_SCALARS = (
    "loss",
    "grad_norm",
    "loss_scale",
    "clip_coefficient",
    "applied",
    "reason",
    "skipped_total",
    "skipped_in_a_row",
    "worst_rank",
)


def scalars(last: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a step's :func:`metrics`, for a logger.

    A loss that was not given is left out. A loss that is NaN stays, because the step was skipped for it.
    ``worst_rank`` is left out where it is None: one process decides alone, or no rank is at fault.

    Args:
        last: what :func:`metrics` returns.
        prefix: put in front of each key.

    Raises:
        TypeError: ``prefix`` is not a string.

    Example:
        >>> import numpy as np
        >>> from stablenum import GuardConfig, init_guard
        >>> scalars(metrics(init_guard(GuardConfig(), 1, xp=np)), "guard/")["guard/skipped_total"]
        0
    """
    if not isinstance(prefix, str):
        raise bad_type("prefix", "a string", prefix)
    missing = set() if loss_was_given(last) else {"loss"}
    missing |= {"worst_rank"} if last["worst_rank"] is None else set()
    # + 0: not a bool or enum
    return {prefix + key: last[key] + 0 for key in _SCALARS if key not in missing}
