"""Whether a backend did what NumPy did: the trace of a run, and the first place where two differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stablenum.compare.spec import Tolerance
from stablenum.formats import FLOAT32_TINY
from stablenum.status import Reason

__all__ = ["Comparison", "Disagreement", "StepRow", "Trace", "compare_traces", "relative_difference"]

Array: TypeAlias = "np.ndarray[Any, Any]"


class StepRow(NamedTuple):
    """What the guard said of one step. ``worst`` is the parameter's index."""

    applied: bool
    reason: Reason
    worst: int
    loss_scale: float
    grad_norm: float
    clip_coefficient: float
    loss: float


@dataclass(slots=True, kw_only=True)
class Trace:
    """One run of one scenario on one backend.

    Attributes:
        backend: its name.
        rows: the steps; empty for a plain run.
        norms: for each step the norms of all gradients; NumPy's runs alone have them.
        losses: of a plain run of a model, step by step.
        warnings: what the adapter warned of.
        changed: the steps that were refused although a parameter changed in them, bit for bit, and the
            first such parameter's index.
        start, params: the parameters before the first step and after the last.
        final_loss_scale: the scale for the step after the last.
        skipped: steps refused.
        stopped: the message of the NonFiniteError that ended it, else None.
        score: the goal's measure (accuracy or loss) at the end, else None.
        seconds: wall time.
    """

    backend: str
    rows: list[StepRow] = field(default_factory=list)
    norms: list[Array] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    changed: dict[int, int] = field(default_factory=dict)
    start: list[Array]
    params: list[Array]
    final_loss_scale: float = 1.0
    skipped: int = 0
    stopped: str | None = None
    score: float | None = None
    seconds: float = 0.0


class Disagreement(NamedTuple):
    """The first difference between a backend and NumPy. ``step`` is None for the end of the run."""

    scenario: str
    backend: str
    step: int | None
    field: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        where = "at the end" if self.step is None else f"step {self.step}"
        return (
            f"{self.scenario}, {self.backend}, {where}, {self.field}: "
            f"numpy has {_show(self.expected)}, {self.backend} has {_show(self.got)}"
        )


def _show(value: Any) -> str:
    if isinstance(value, Reason):
        return value.name
    return f"{value:.9g}" if isinstance(value, float) else str(value)


class Comparison(NamedTuple):
    """The outcome: the first disagreement (None if all agrees) and the largest differences seen."""

    disagreement: Disagreement | None
    worst_norm: float
    worst_params: float


# Equal, bit for bit. The others are floats that the backends sum in their own order.
_EXACT = ("applied", "reason", "loss_scale")


def compare_traces(scenario: str, reference: Trace, other: Trace, tolerance: Tolerance) -> Comparison:
    """Compare a run with NumPy's, step by step and at the end."""
    first: Disagreement | None = None

    def differ(step: int | None, name: str, expected: Any, got: Any) -> None:
        nonlocal first
        if first is None:
            first = Disagreement(scenario, other.backend, step, name, expected, got)

    limits = {"grad_norm": tolerance.norm, "clip_coefficient": tolerance.norm, "loss": tolerance.loss}
    worst_norm = 0.0
    for step, (ours, theirs) in enumerate(zip(reference.rows, other.rows)):
        for name in _EXACT:
            if getattr(ours, name) != getattr(theirs, name):
                differ(step, name, getattr(ours, name), getattr(theirs, name))
        if ours.worst != theirs.worst and not _tied(
            reference.norms[step], ours.worst, theirs.worst, tolerance.norm
        ):
            differ(step, "worst", ours.worst, theirs.worst)
        for name, limit in limits.items():
            one, two = getattr(ours, name), getattr(theirs, name)
            difference = relative_difference(one, two)
            if name != "loss":
                worst_norm = max(worst_norm, difference)
            if not difference <= limit:
                differ(step, name, one, two)
        if step in other.changed:
            differ(step, f"params[{other.changed[step]}] after a skip", "unchanged", "changed")
    if len(reference.rows) != len(other.rows):
        differ(None, "steps", len(reference.rows), len(other.rows))
    for name in ("final_loss_scale", "skipped"):
        if getattr(reference, name) != getattr(other, name):
            differ(None, name, getattr(reference, name), getattr(other, name))
    if (reference.stopped is None) != (other.stopped is None):
        differ(None, "stopped", reference.stopped, other.stopped)
    worst_params = 0.0
    for i, (p, q) in enumerate(zip(reference.params, other.params, strict=True)):
        difference = tensor_difference(p, q)
        worst_params = max(worst_params, difference)
        if not difference <= tolerance.params:
            differ(None, f"params[{i}] (relative difference)", 0.0, difference)
    return Comparison(first, worst_norm, worst_params)


def _tied(norms: Array, ours: int, theirs: int, tolerance: float) -> bool:
    """Whether the largest of all norms is a tie within rounding, so that either index is right."""
    if not (np.isfinite(norms).all() and 0 <= theirs < len(norms) and 0 <= ours < len(norms)):
        return False
    return relative_difference(float(norms[ours]), float(norms[theirs])) <= tolerance


def relative_difference(a: float, b: float) -> float:
    """``|a - b| / max(|a|, |b|)``; 0 if both are NaN, the same infinity, or below float32's normal range.

    Example:
        >>> relative_difference(1.0, 1.5), relative_difference(float("nan"), float("nan"))
        (0.333..., 0.0)
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    # XLA flushes subnormal numbers to zero on the CPU.
    if max(abs(a), abs(b)) < FLOAT32_TINY:
        return 0.0
    return abs(a - b) / max(abs(a), abs(b))


def tensor_difference(a: Array, b: Array) -> float:
    """The largest difference of two tensors over the largest number in the first.

    Non-finite elements must be of the same kind in the same places; then they do not count.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    one, two = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(finite, np.isfinite(two)):
        return math.inf
    if not np.array_equal(one[~finite], two[~finite], equal_nan=True):
        return math.inf
    one, two = one[finite], two[finite]
    if one.size == 0:
        return 0.0
    largest = float(np.abs(one).max())
    difference = float(np.abs(one - two).max())
    return 0.0 if difference < FLOAT32_TINY else difference / max(largest, FLOAT32_TINY)
