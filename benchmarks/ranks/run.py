"""Measure each number of ranks in both frameworks, in as many processes as its uncertainty needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.ranks import jax_ranks, torch_ranks
from benchmarks.repeats import pooled, ratio_to_bare, restless, timed, until_known

__all__ = ["run"]

WORLDS = (1, 2, 4, 8)
ROUNDS = 60
# The largest relative uncertainty of a ratio to the bare step. It is large because ranks wait for each other,
# which makes the times vary.
BOUND = 0.15
# (ranks, rounds, number of processes before) -> samples and counts.
MEASURE: Mapping[str, Callable[[int, int, int], dict[str, Any]]] = MappingProxyType(
    {"torch": torch_ranks.measure, "jax": jax_ranks.measure}
)


def run(
    worlds: tuple[int, ...] | None = None,
    rounds: int = ROUNDS,
    bound: float = BOUND,
    frameworks: Sequence[str] = tuple(MEASURE),
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row for each framework and number of ranks, by default up to the number of cores.

    Raises:
        BenchmarkError: a rank failed, or the uncertainty of a ratio stays above ``bound``.
    """
    chosen = worlds or tuple(world for world in WORLDS if world <= (os.cpu_count() or 1))
    return [_row(framework, world, rounds, bound, say) for framework in frameworks for world in chosen]


def _row(framework: str, world: int, rounds: int, bound: float, say: Callable[[str], None]) -> dict[str, Any]:
    parts = until_known(
        lambda turn: MEASURE[framework](world, rounds, turn),
        lambda parts: restless(f"{framework}, {world} ranks", timed(parts), bound),
        say=say,
    )
    variants, processes = {}, timed(parts)
    for name, counts in parts[0]["counts"].items():
        ratio, known = ratio_to_bare(processes, name)
        variants[name] = pooled(processes, name).as_dict() | {"ratio_to_bare": round(ratio, 4)} | counts
        if name != "bare":
            variants[name]["uncertainty"] = round(known, 4)
    return {
        "framework": framework,
        "ranks": world,
        "processes": len(parts),
        "uncertainty_bound": bound,
        "variants": variants,
    }
