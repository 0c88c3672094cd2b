"""The steps of runs as JSON, which the script of a page reads."""

from __future__ import annotations

import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from stablenum.commands.run_plots.thresholds import thresholds
from stablenum.commands.run_plots.undone import one_at_each_step, rewind_sentence
from stablenum.guard.reasons import APPLIED, EXPLANATIONS, Reason
from stablenum.runlog.reading import Run

__all__ = ["column", "plotted", "plotted_run"]

_FEW = 8  # a column that changes more seldom than once in so many steps is stored by its changes


def plotted(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is drawn in one set of plots; each run is as :func:`plotted_run` returns it.

    Columns are numbers in base64, or their changes: 100,000 steps take some 2 MB, and a browser reads them
    in milliseconds.
    """
    return {"runs": list(runs), "reasons": _reasons()}


def _reasons() -> dict[int, dict[str, Any]]:
    return {
        int(reason): {"name": reason.name, "what": EXPLANATIONS[reason].what, "applied": reason in APPLIED}
        for reason in Reason
    }


def plotted_run(run: Run) -> dict[str, Any]:
    """Return the steps of a run."""
    return {
        "name": run.name,
        "count": len(run),
        "steps": _steps(run.steps),
        "loss": column(run.loss),
        "norm": column(run.grad_norm),
        "threshold": column(thresholds(run)),
        "scale": column(run.loss_scale),
        "reason": _base64(array("B", run.reason)),
        "worst": _base64(array("i", run.worst)),
        "names": list(run.names),
        "updates": {
            "steps": [update.step for update in run.updates],
            "size": [_finite(update.size) for update in run.updates],
            "largest": [_finite(update.largest) for update in run.updates],
            "names": [update.parameter for update in run.updates],
        },
        "undone": _undone(run),
        "rewinds": [
            {"first": rewind.first, "last": rewind.last, "text": rewind_sentence(rewind)}
            for rewind in run.events
        ],
        "starts": [{"step": step, "what": "started again"} for step in run.restarts]
        + [{"step": step, "what": "went back to this step"} for step in run.rewinds],
    }


def _undone(run: Run) -> dict[str, Any]:
    steps = one_at_each_step(run)
    return {
        "count": len(steps),
        "steps": _base64(array("i", [step.step for step in steps])),
        "loss": column([step.loss for step in steps]),
        "norm": column([step.grad_norm for step in steps]),
        "reason": _base64(array("B", [step.reason for step in steps])),
        "worst": _base64(array("i", [step.worst for step in steps])),
    }


def _steps(steps: Sequence[int]) -> dict[str, Any]:
    if steps and steps[-1] - steps[0] == len(steps) - 1:
        return {"from": steps[0]}
    return {"base64": _base64(array("i", steps))}


def column(values: Sequence[float]) -> dict[str, Any]:
    """Return a column as float32 numbers, or as its changes: a position, and the value from there on."""
    changes = [i for i, value in enumerate(values) if i == 0 or not _same(value, values[i - 1])]
    if _FEW * len(changes) <= len(values):
        return {"at": changes, "values": [_finite(values[i]) for i in changes]}
    return {"base64": _base64(array("f", values))}


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _base64(column: array[Any]) -> str:
    if sys.byteorder == "big":
        column.byteswap()
    return b64encode(column.tobytes()).decode()
