"""Compute a row's figures from the measurements of several processes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.repeats import Timed, known_within, pooled, quotient_within, ratio_to_bare, timed
from benchmarks.steps.reference import TOLERANCE
from benchmarks.steps.rows import LABELS, Row

__all__ = ["PEER", "SHARE_BOUND", "figures_of", "result_of"]

# The peer whose extra time ours is compared with.
PEER = {"torch": "scaler", "jax": "apply_if_finite"}
# Our extra time as a share of the peer's is left out if its uncertainty is above this.
SHARE_BOUND = 0.2


def result_of(row: Row, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entry of a row in the file. The first part has the counts."""
    first = parts[0]
    figures = figures_of(row, timed(parts))
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
        "share_bound": SHARE_BOUND,
        "tolerance": TOLERANCE[row.dtype],
        "peer": PEER[row.framework],
        "variants": figures,
    }


def figures_of(row: Row, processes: Sequence[Timed]) -> dict[str, dict[str, Any]]:
    """Each variant's median, spread, ratio to bare, extra time, and extra time relative to the peer's.

    Ratios and extra times are computed for each round. The figure is the mean over processes of the median
    over the rounds of a process.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in processes[0]:
        figures: dict[str, Any] = {"label": LABELS[name], **pooled(processes, name).as_dict()}
        ratio, known = ratio_to_bare(processes, name)
        figures["ratio_to_bare"] = round(ratio, 4)
        figures["extra_ms"] = round(statistics.fmean(_extras(processes, name)), 4)
        if name != "bare":
            figures["uncertainty"] = round(known, 4)
            figures |= _against(processes, name, PEER[row.framework])
        found[name] = figures
    return found


def _against(processes: Sequence[Timed], name: str, peer: str) -> dict[str, float]:
    """The ratio to the peer's step, and our extra time over the peer's if that is known well enough."""
    if peer not in processes[0]:
        return {}
    ratio, _ = known_within([process[name].median_ratio_to(process[peer]) for process in processes])
    against = {"ratio_to_peer": round(ratio, 4)}
    found = quotient_within(_extras(processes, name), _extras(processes, peer))
    if found is None or not found[1] <= SHARE_BOUND:
        return against
    return against | {"extra_over_peers": round(found[0], 4), "extra_over_peers_within": round(found[1], 4)}


def _extras(processes: Sequence[Timed], name: str) -> list[float]:
    """For each process, the median over its rounds of the milliseconds above the bare step."""
    return [process[name].median_above(process["bare"]) for process in processes]
