"""A row's figures, from what several processes measured of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from benchmarks.repeats import known_within
from benchmarks.steps.reference import TOLERANCE
from benchmarks.steps.rows import LABELS, Row
from benchmarks.timing import Times

__all__ = ["PEER", "figures_of", "restless", "result_of"]

# What the extra time of ours is compared with.
PEER = {"torch": "scaler", "jax": "apply_if_finite"}
# One process's times, by variant.
Timed: TypeAlias = dict[str, Times]


def restless(row: Row, parts: Sequence[dict[str, Any]]) -> str:
    """Which ratios to the bare step are not known within the row's bound yet; "" if all are."""
    timed = _timed(parts)
    known = {name: _ratio(timed, name)[1] for name in timed[0] if name != "bare"}
    over = {name: f"{u:.1%}" for name, u in known.items() if not u <= row.bound}
    if not over:
        return ""
    return (
        f"{row.name}: after {len(parts)} processes the ratios to the bare step are uncertain by {over}, "
        f"beyond {row.bound:.0%}. The machine is too busy."
    )


def result_of(row: Row, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is written of a row. The first part has the counts."""
    first = parts[0]
    figures = figures_of(row, _timed(parts))
    for name, found in figures.items():
        off = max(part["distances"][name] for part in parts)
        found |= {"distance_from_reference": float(f"{off:.3g}")} | first["counts"][name]
    return {
        "name": row.name,
        "device": first["device"],
        "framework": row.framework,
        "optimizer": row.optimizer,
        "kernel": row.kernel,
        "size": row.size,
        "parameters": row.parameters,
        "tensors": row.tensors,
        "dtype": row.dtype,
        "gradient_bytes": row.gradient_bytes,
        "processes": len(parts),
        "rounds": row.rounds,
        "uncertainty_bound": row.bound,
        "tolerance": TOLERANCE[row.dtype],
        "peer": PEER[row.framework],
        "variants": figures,
    }


def figures_of(row: Row, timed: Sequence[Timed]) -> dict[str, dict[str, Any]]:
    """Each variant's median, spread, ratio to bare, extra time, and that over the peer's extra.

    Ratios and extra times are taken round by round; of each process the median over its rounds counts, and
    the figure is the mean over the processes.
    """
    peer = PEER[row.framework]
    found: dict[str, dict[str, Any]] = {}
    for name in timed[0]:
        pooled = Times([sample for process in timed for sample in process[name].samples])
        figures: dict[str, Any] = {"label": LABELS[name], **pooled.as_dict()}
        ratio, known = _ratio(timed, name)
        figures["ratio_to_bare"] = round(ratio, 4)
        figures["extra_ms"] = round(statistics.fmean(_extra(process, name) for process in timed), 4)
        if name != "bare":
            figures["uncertainty"] = round(known, 4)
            figures |= _against(timed, name, peer)
        found[name] = figures
    return found


def _against(timed: Sequence[Timed], name: str, peer: str) -> dict[str, float]:
    """The ratio to the peer's step, and what is added over what the peer adds."""
    if peer not in timed[0]:
        return {}
    found = {"ratio_to_peer": round(_over(timed, lambda p: p[name].median_ratio_to(p[peer]))[0], 4)}
    if all(_extra(process, peer) > 0 for process in timed):  # else it costs nothing that could be seen
        share, known = _over(timed, lambda p: _extra(p, name) / _extra(p, peer))
        found["extra_over_peers"] = round(share, 4)
        if name != peer:
            found["extra_over_peers_uncertainty"] = round(known, 4)
    return found


def _timed(parts: Sequence[dict[str, Any]]) -> list[Timed]:
    return [{name: Times(samples) for name, samples in part["samples"].items()} for part in parts]


def _ratio(timed: Sequence[Timed], name: str) -> tuple[float, float]:
    return _over(timed, lambda process: process[name].median_ratio_to(process["bare"]))


def _over(timed: Sequence[Timed], figure: Callable[[Timed], float]) -> tuple[float, float]:
    return known_within([figure(process) for process in timed])


def _extra(process: Timed, name: str) -> float:
    """Milliseconds above the bare step, the median over the rounds."""
    return process[name].median_above(process["bare"])
