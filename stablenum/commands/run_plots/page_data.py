"""The steps of runs as JSON, which the script of a page reads."""

from __future__ import annotations

import math
import sys
from array import array
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from stablenum.commands.run_plots.thresholds import thresholds
from stablenum.commands.run_plots.undone import one_at_each_step, rewind_sentence
from stablenum.guard.reasons import APPLIED, EXPLANATIONS, Reason
from stablenum.runlog.reading import Run

__all__ = ["MOST", "column", "plotted", "plotted_run", "seen"]

MOST = 100_000  # steps, above which not all are drawn
# No screen has so many points in a row, and a zoom into a tenth still finds 500. Chosen, not measured.
_STRETCHES = 5_000
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
    """Return the steps of a run; of very many those that an eye can tell apart."""
    threshold = thresholds(run)
    at = seen(run.loss, run.grad_norm, run.loss_scale, skipped=run.skipped)
    return {
        "name": run.name,
        "count": len(at),
        "steps": _steps([run.steps[i] for i in at]),
        "loss": column([run.loss[i] for i in at]),
        "norm": column([run.grad_norm[i] for i in at]),
        "threshold": column([threshold[i] for i in at]),
        "scale": column([run.loss_scale[i] for i in at]),
        "reason": _base64(array("B", [run.reason[i] for i in at])),
        "worst": _base64(array("i", [run.worst[i] for i in at])),
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


def seen(*columns: Sequence[float], skipped: Sequence[int]) -> Sequence[int]:
    """Return the positions that are drawn: all up to 100,000; of more, in each of 5,000 stretches the first
    and the last, those with the smallest and the largest values, and the first and the last skipped one.

    Example:
        >>> len(seen([0.0] * 99_999, skipped=[])), len(seen([0.0] * 200_000, skipped=[7]))
        (99999, 10001)
    """
    count = len(columns[0])
    if count <= MOST:
        return range(count)
    kept = {0, count - 1}
    ends = [k * count // _STRETCHES for k in range(_STRETCHES + 1)]
    for start, stop in pairwise(ends):
        kept |= {start, stop - 1}
        for values in columns:
            known = [i for i in range(start, stop) if math.isfinite(values[i])]
            kept |= {choose(known, key=values.__getitem__) for choose in (min, max) if known}
        within = skipped[bisect_left(skipped, start) : bisect_left(skipped, stop)]
        kept |= {*within[:1], *within[-1:]}
    return sorted(kept)


def _undone(run: Run) -> dict[str, Any]:
    steps = one_at_each_step(run)
    skipped = [i for i, step in enumerate(steps) if step.reason not in APPLIED]
    at = seen([step.loss for step in steps], [step.grad_norm for step in steps], skipped=skipped)
    steps = [steps[i] for i in at]
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
