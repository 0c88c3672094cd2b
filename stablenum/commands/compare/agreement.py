"""Comparison of a backend with NumPy: the trace of a run, and the first difference between two traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stablenum.commands.compare.differences import (
    different_rewinds,
    different_statistics,
    relative_difference,
    tensor_difference,
    update_difference,
)
from stablenum.commands.compare.scenarios import Tolerance
from stablenum.guard.reasons import Reason
from stablenum.recovery.ledger import RecoveryEvent

__all__ = ["Comparison", "Disagreement", "StepRow", "Trace", "compare_traces"]

Array: TypeAlias = "np.ndarray[Any, Any]"


class StepRow(NamedTuple):
    """The guard's report on one step. ``worst`` is the parameter's index."""

    applied: bool
    reason: Reason
    worst: int
    loss_scale: float
    grad_norm: float
    clip_coefficient: float
    loss: float
    precision_level: int


@dataclass(slots=True, kw_only=True)
class Trace:
    """One run of one scenario on one backend.

    Attributes:
        backend: the name of the backend.
        rows: the steps; empty for a plain run.
        norms: the norms of all gradients, step by step; only for runs on NumPy.
        path: for a guarded stream, and one without a guard on NumPy, the parameters after each step.
        guard: the guard's state at the end, as plain values; empty for a plain run.
        losses: for a plain run of a model, the losses, step by step.
        warnings: the adapter's warnings.
        changed: the steps that were skipped although some bits of a parameter changed in them, with the
            index of the first such parameter.
        start, params: the parameters before the first step and after the last.
        final_loss_scale: the loss scale after the last step.
        skipped: the number of skipped steps.
        rewinds: how the run went back to snapshots, if it recovers.
        stopped: the message with which the guard or the recovery ended the run; None if neither did.
        score: the goal's measure (accuracy or loss) at the end; None if there is no goal.
        seconds: wall time.
    """

    backend: str
    rows: list[StepRow] = field(default_factory=list)
    norms: list[Array] = field(default_factory=list)
    path: list[list[Array]] = field(default_factory=list)
    guard: Mapping[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    changed: dict[int, int] = field(default_factory=dict)
    start: list[Array]
    params: list[Array]
    final_loss_scale: float = 1.0
    skipped: int = 0
    rewinds: Sequence[RecoveryEvent] = ()
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
    """The outcome: the first disagreement (None if there is none) and the largest differences."""

    disagreement: Disagreement | None
    worst_norm: float
    worst_params: float


# These fields must be equal. The others are floats, which each backend sums in its own order.
_EXACT = ("applied", "reason", "loss_scale", "precision_level")


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
        for i, added in _different_updates(reference, other, step, tolerance.params):
            differ(step, f"update of params[{i}]", *added)
    if len(reference.rows) != len(other.rows):
        differ(None, "steps", len(reference.rows), len(other.rows))
    for name, ours, theirs in different_statistics(reference.guard, other.guard, tolerance.norm):
        differ(None, name, ours, theirs)
    for name in ("final_loss_scale", "skipped"):
        if getattr(reference, name) != getattr(other, name):
            differ(None, name, getattr(reference, name), getattr(other, name))
    for name, ours, theirs in different_rewinds(reference.rewinds, other.rewinds, tolerance.norm):
        differ(None, name, ours, theirs)
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
    """Return whether both indices are right, because the largest norms are equal up to rounding."""
    if not (np.isfinite(norms).all() and 0 <= theirs < len(norms) and 0 <= ours < len(norms)):
        return False
    return relative_difference(float(norms[ours]), float(norms[theirs])) <= tolerance


def _different_updates(
    reference: Trace, other: Trace, step: int, tolerance: float
) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yield the index of each parameter that a step changed differently, and the two changes."""
    if step >= min(len(reference.path), len(other.path)):
        return
    for i, _ in enumerate(reference.start):
        before, theirs = (t.path[step - 1][i] if step else t.start[i] for t in (reference, other))
        added = update_difference(
            before, reference.path[step][i], theirs, other.path[step][i], tolerance=tolerance
        )
        if added is not None:
            yield i, added
