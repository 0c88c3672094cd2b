"""What ``stablenum.diff`` costs: time and peak memory beside one plain training step of both programs.

The programs are a transformer in PyTorch and its port to JAX, in float32 on the CPU. Each figure comes from
processes of their own: one runs the plain steps of both sides (forward, backward, AdamW; JAX jitted and
compiled before), one compares the two where they agree, one records the first and compares the file with the
second, and one compares programs of which each block has another GELU.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.repeats import known_within
from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.keeping import Kept

__all__ = ["KINDS", "row_of", "run"]

KINDS = ("steps", "alike", "recorded", "differing")
# The programs that differ are compared at the smallest size only: each layer is a difference of its own.
_SIZES = {"1M": KINDS, "10M": KINDS[:3], "100M": KINDS[:2]}
_PROCESSES = 3
_PATIENCE_S = 1800


def _once(size: str, kind: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.diff_once", size, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _round(size: str, order: Sequence[str]) -> dict[str, dict[str, float]]:
    return {kind: _once(size, kind) for kind in order}


def row_of(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """The figures of one size: each round has the processes' results by kind."""
    both = [r["steps"]["torch"] + r["steps"]["jax"] for r in rounds]
    row: dict[str, Any] = {"processes": len(rounds)}
    row["steps"] = {"seconds": round(statistics.fmean(both), 3), "peak_mb": _peak(rounds, "steps")}
    for kind in KINDS[1:]:
        if kind in rounds[0]:
            ratio, half = known_within([r[kind]["diff"] / s for r, s in zip(rounds, both, strict=True)])
            row[kind] = {
                "seconds": round(statistics.fmean(r[kind]["diff"] for r in rounds), 1),
                "ratio": round(ratio, 1),
                "half_interval": round(half, 1),
                "peak_mb": _peak(rounds, kind),
                "operations": rounds[0][kind]["operations"],
            }
        if kind == "recorded" and kind in rounds[0]:
            row[kind]["record_seconds"] = round(statistics.fmean(r[kind]["record"] for r in rounds), 1)
    return row


def _peak(rounds: Sequence[Mapping[str, Mapping[str, float]]], kind: str) -> int:
    return round(max(r[kind]["peak_mb"] for r in rounds))


def run(kept: Kept) -> dict[str, Any]:
    """All figures, by size; each round is kept."""
    found = {}
    for size, kinds in _SIZES.items():
        rounds = []
        for number in range(_PROCESSES):
            order = random.Random(number).sample(kinds, len(kinds))
            rounds.append(kept.part(f"{size}, round {number + 1}", functools.partial(_round, size, order)))
        found[size] = row_of(rounds)
    return found
