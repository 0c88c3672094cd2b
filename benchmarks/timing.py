"""Interleaved timing: every variant runs once a round, so that all share the machine's moods."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

__all__ = ["Times", "interleaved"]


class Times:
    """Milliseconds of one variant over the rounds."""

    def __init__(self, samples: list[float]) -> None:
        self.samples = samples
        self.median = statistics.median(samples)
        quarters = statistics.quantiles(samples, n=4)
        self.spread = (quarters[2] - quarters[0]) / self.median

    def as_dict(self) -> dict[str, float]:
        """Median and relative interquartile range."""
        return {"median_ms": round(self.median, 4), "spread": round(self.spread, 4)}


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    prepare: Callable[[str], None] | None = None,
) -> dict[str, Times]:
    """Time every variant once in each round.

    Args:
        variants: name -> one step; it returns only when its work is done.
        rounds: measured rounds.
        warmup: rounds that are thrown away.
        prepare: called with a variant's name, untimed, before it runs: puts its inputs back.
    """
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(warmup + rounds):
        for name, step in variants.items():
            if prepare:
                prepare(name)
            start = time.perf_counter()
            step()
            if round_ >= warmup:
                samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: Times(values) for name, values in samples.items()}
