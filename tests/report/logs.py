"""Logs of runs that were made up: a loss that falls, spikes, and steps that are skipped."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from stablenum import Reason
from stablenum.guard.readout import StepRecord, Worst
from stablenum.runlog.lines import Update
from stablenum.runlog.writing import EVERY, LogFile

NAMES = tuple(f"blocks.{i}.{part}.weight" for i in range(12) for part in ("attention", "mlp"))
CLIP = {"rule": "ClipByGlobalNorm", "max_norm": 1.0}


def record(step: int, **changes: Any) -> StepRecord:
    """A step that was applied, but for ``changes``."""
    usual: dict[str, Any] = {
        "step": step,
        "loss": 2.0,
        "grad_norm": 0.5,
        "loss_scale": 1.0,
        "clip_coefficient": 1.0,
        "reason": Reason.OK,
        "applied": True,
        "worst": Worst(0, NAMES[0]),
        "worst_rank": None,
        "precision_level": 0,
    }
    return usual | changes  # type: ignore[return-value]


def begun(path: Path, **changes: Any) -> LogFile:
    """A log of a run that has taken no step."""
    header: dict[str, Any] = {
        "framework": "torch",
        "settings": {"clip": [CLIP], "on_nonfinite": "skip"},
        "optimizer": {"class": "AdamW", "lr": 3e-4},
        "versions": {"stablenum": "0.1.0", "torch": "2.13.0"},
    }
    file = LogFile(path, argument="log")
    file.begin(**(header | changes))
    return file


def log_of(path: Path, records: list[StepRecord], updates: list[Update] = [], **header: Any) -> Path:  # noqa: B006
    """Write a log with these steps and updates."""
    begun(path, **header).write(records, updates)
    return path


def long_log(path: Path, steps: int, seed: int = 0) -> Path:
    """Write a log of many steps, of which some in 3,000 are skipped, with an update in 64 steps."""
    draw, scale, rows = random.Random(seed), 65536.0, []
    file = begun(path, optimizer={"class": "AdamW", "lr": 1e-4 * (1 + seed)})
    for step in range(steps):
        row, scale = _drawn(step, draw, scale)
        rows.append(row)
        if step % EVERY == EVERY - 1:
            size = 1e-3 * math.exp(-step / 5e4) * draw.uniform(0.9, 1.1)
            file.write(rows, [Update(step, size, 10 * size, row["worst"].name)])
            rows = []
    file.write(rows)
    return path


def _drawn(step: int, draw: random.Random, scale: float) -> tuple[StepRecord, float]:
    loss, norm = 2 + 6 * math.exp(-step / 8000) + draw.gauss(0, 0.08), math.exp(draw.gauss(-0.5, 0.35))
    reason, luck = (Reason.CLIPPED if norm > 1 else Reason.OK), draw.random()
    if luck < 2e-4:
        reason, norm, after = Reason.INF_GRADIENT, math.inf, scale / 2
    else:
        after = min(2 * scale, 2.0**18) if step % 2000 == 1999 else scale
    if 2e-4 <= luck < 3e-4:
        reason, loss, norm = Reason.NONFINITE_LOSS, math.nan, math.nan
    k = min(len(NAMES) - 1, int(abs(draw.gauss(0, 5))))
    clip = 1 / norm if reason == Reason.CLIPPED else 1.0
    found = {"loss": loss, "grad_norm": norm, "loss_scale": scale, "clip_coefficient": clip, "reason": reason}
    return record(step, worst=Worst(k, NAMES[k]), **found), after
