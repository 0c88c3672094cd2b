"""All numbers of ranks in both frameworks, each in as many runs as it takes to know its ratios."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.ranks import jax_ranks, torch_ranks
from benchmarks.repeats import known_within, until_known
from benchmarks.timing import Times

__all__ = ["run"]

WORLDS = (1, 2, 4, 8)
ROUNDS = 60
# Within how much of itself a ratio to the bare step has to be known: ranks wait for each other, which is
# restless by nature.
BOUND = 0.10
MEASURE: Mapping[str, Callable[[int, int], dict[str, Any]]] = MappingProxyType(
    {"torch": torch_ranks.measure, "jax": jax_ranks.measure}
)


def run(
    worlds: tuple[int, ...] | None = None,
    rounds: int = ROUNDS,
    bound: float = BOUND,
    frameworks: Sequence[str] = tuple(MEASURE),
) -> list[dict[str, Any]]:
    """One row for each framework and number of ranks, by default up to the number of cores.

    Raises:
        BenchmarkError: a rank failed, or the ratios are uncertain beyond ``bound`` to the end.
    """
    chosen = worlds or tuple(world for world in WORLDS if world <= (os.cpu_count() or 1))
    return [_row(framework, world, rounds, bound) for framework in frameworks for world in chosen]


def _row(framework: str, world: int, rounds: int, bound: float) -> dict[str, Any]:
    def restless(parts: list[dict[str, Any]]) -> str:
        known = [_ratio(parts, name)[1] for name in parts[0]["samples"] if name != "bare"]
        if all(within <= bound for within in known):
            return ""
        return f"{framework}, {world} ranks: an uncertainty of {max(known):.0%} is beyond {bound:.0%}."

    parts = until_known(lambda _turn: MEASURE[framework](world, rounds), restless)
    variants = {}
    for name in parts[0]["samples"]:
        times = Times([sample for part in parts for sample in part["samples"][name]])
        ratio, known = _ratio(parts, name)
        variants[name] = times.as_dict() | {"ratio_to_bare": round(ratio, 4)} | parts[0]["counts"][name]
        if name != "bare":
            variants[name]["uncertainty"] = round(known, 4)
    return {
        "framework": framework,
        "ranks": world,
        "processes": len(parts),
        "uncertainty_bound": bound,
        "variants": variants,
    }


def _ratio(parts: list[dict[str, Any]], name: str) -> tuple[float, float]:
    return known_within(
        [Times(part["samples"][name]).median_ratio_to(Times(part["samples"]["bare"])) for part in parts]
    )
