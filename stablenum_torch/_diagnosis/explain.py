"""Explain the step that an optimizer has just skipped, by a replay and by what the guard knows about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from stablenum.diagnosis.report.report import Report
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum.guard.readout import Metrics
from stablenum.guard.reasons import EXPLANATIONS, SPIKES
from stablenum_torch._devices.generators import RngState
from stablenum_torch._devices.ranks import several_ranks
from stablenum_torch._diagnosis.replay.replay import replay

__all__ = ["explain_step"]

_OTHER_BACKWARD_PASSES = (
    "the gradients that the parameters hold are not finite, but those of this closure are: if several "
    "backward passes add up to one step, replay the others too"
)
_SPIKE = "the guard skipped this step as {}: {}. All its numbers are finite, which is what a replay looks at"


class Guarded(Protocol):
    """The interface that a guarded optimizer must have."""

    config: GuardConfig
    guard_state: GuardState
    last: Metrics
    param_groups: list[dict[str, Any]]


def explain_step(
    optimizer: Guarded,
    beginnings: Sequence[RngState | Tensor | None],
    closure: Callable[[], Any],
    model: torch.nn.Module | None,
) -> Report:
    """Return the report of :meth:`stablenum_torch.GuardedOptimizer.explain`.

    Args:
        optimizer: the optimizer that skipped the step.
        beginnings: the states that the generators may have had when the step began, the likeliest first.
        closure: runs the step's forward pass.
        model: gives modules their names.
    """
    begun = int(optimizer.guard_state.step) > 0
    last = optimizer.last
    scaled = begun and optimizer.config.loss_scale is not None
    spike = last["reason"] in SPIKES
    # Of several ranks, all must replay the step equally often.
    for beginning in beginnings[:1] if several_ranks() else beginnings:
        report = replay(
            closure,
            model=model,
            optimizer=optimizer,
            loss_scale=float(last["loss_scale"]) if scaled else None,
            rng_state=beginning,
            known_bad=begun and not last["applied"] and not spike,
        )
        if report.evidence.bad and report.evidence.reproduced is not False:
            return report
    return _with_what_the_guard_saw(report, optimizer) if begun and not report.evidence.bad else report


def _with_what_the_guard_saw(report: Report, optimizer: Guarded) -> Report:
    """Add what the guard measured: a replay without findings may have run only a part of the step."""
    notes = list(report.notes)
    reason = optimizer.last["reason"]
    if reason in SPIKES:
        notes.append(
            _SPIKE.format(reason.name, EXPLANATIONS[reason].what.removeprefix("the step was skipped: "))
        )
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not all(bool(torch.isfinite(g).all()) for g in grads):
        notes.append(_OTHER_BACKWARD_PASSES)
    elsewhere = several_ranks() and not optimizer.last["applied"]
    return Report.of(
        replace(report.evidence, other_rank=elsewhere), notes=tuple(notes), seconds=report.seconds
    )
