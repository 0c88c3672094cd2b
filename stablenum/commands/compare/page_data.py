"""The runs of a scenario as its plots show them: without a guard, with one, and where backends disagree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stablenum.commands.compare.agreement import StepRow, Trace
from stablenum.commands.compare.backends import REFERENCE
from stablenum.commands.compare.runner import Result, distances
from stablenum.commands.run_plots.page_data import column, plotted_run
from stablenum.guard.config import GuardConfig
from stablenum.guard.reasons import Reason
from stablenum.runlog.lines import Step
from stablenum.runlog.reading import Run

__all__ = ["drawn_runs"]

_NAN = float("nan")


def drawn_runs(result: Result) -> list[dict[str, Any]]:
    """Return the runs to draw. One line with a guard stands for all backends that agree with NumPy."""
    return [*_guarded(result), _without_guard(result.plain[REFERENCE])]


def _guarded(result: Result) -> Iterator[dict[str, Any]]:
    settings = result.scenario.guard
    different = [name for name, c in result.comparisons.items() if c.disagreement is not None]
    name = "with the guard" + (f", {REFERENCE}" if different else "")
    yield _with_guard(name, result.guarded[REFERENCE], settings)
    for name in different:
        yield _with_guard(f"with the guard, {name}", result.guarded[name], settings)


def _with_guard(name: str, trace: Trace, settings: GuardConfig) -> dict[str, Any]:
    run = _run(name, trace.rows, settings.to_dict())
    return plotted_run(run) | _moved(trace)


def _without_guard(trace: Trace) -> dict[str, Any]:
    losses = [_NAN] * len(trace.path) if trace.path else trace.losses  # a stream's losses do not depend on it
    rows = [
        StepRow(
            applied=True, reason=Reason.OK, worst=-1, loss_scale=_NAN, grad_norm=_NAN, clip_coefficient=1.0,
            loss=loss, precision_level=0,
        )
        for loss in losses
    ]  # fmt: skip
    return plotted_run(_run("without a guard", rows, {})) | {"bare": True} | _moved(trace)


def _moved(trace: Trace) -> dict[str, Any]:
    return {"moved": column(distances(trace))} if trace.path else {}


def _run(name: str, rows: Sequence[StepRow], settings: Mapping[str, Any]) -> Run:
    run = Run(name)
    run.add({"settings": settings})
    for number, row in enumerate(rows):
        run.add(
            Step(
                step=number,
                loss=row.loss,
                grad_norm=row.grad_norm,
                loss_scale=row.loss_scale,
                clip_coefficient=row.clip_coefficient,
                reason=row.reason,
                worst=None if row.worst < 0 else f"params[{row.worst}]",
                worst_rank=None,
                precision_level=row.precision_level,
            )
        )
    return run
