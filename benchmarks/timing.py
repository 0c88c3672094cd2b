"""Interleaved timing: every variant runs once a round, so that all share the machine's moods."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping

__all__ = ["Times", "host_timer", "interleaved"]


class Times:
    """Milliseconds of one variant over the rounds."""

    def __init__(self, samples: list[float]) -> None:
        self.samples = samples
        self.median = statistics.median(samples)
        quarters = statistics.quantiles(samples, n=4)
        self.spread = (quarters[2] - quarters[0]) / self.median

    # Both of each round by itself, so that a mood of the machine that lasts longer than a round cancels.

    def median_ratio_to(self, other: Times) -> float:
        """How many times as long as ``other``."""
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=True))

    def median_above(self, other: Times) -> float:
        """Milliseconds more than ``other``."""
        return statistics.median(a - b for a, b in zip(self.samples, other.samples, strict=True))

    def as_dict(self) -> dict[str, float]:
        """Median and relative interquartile range."""
        return {"median_ms": round(self.median, 4), "spread": round(self.spread, 4)}


def host_timer(step: Callable[[], object]) -> float:
    """Milliseconds until ``step`` returns."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 3,
    prepare: Callable[[str], None] | None = None,
    timer: Callable[[Callable[[], object]], float] = host_timer,
    seed: int = 0,
) -> dict[str, Times]:
    """Time every variant once in each round.

    The order is drawn anew for each round, for what ran before a step has filled the caches; and the garbage
    collector does not run within a step.

    Args:
        variants: name -> one step; it returns only when its work is done, unless ``timer`` waits for it.
        rounds: measured rounds.
        warmup: rounds that are thrown away.
        prepare: called with a variant's name, untimed, before it runs: puts its inputs back.
        timer: runs a step and returns its milliseconds.
        seed: of the orders.
    """
    draw = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for round_ in range(warmup + rounds):
            draw.shuffle(names)
            for name in names:
                if prepare:
                    prepare(name)
                took = timer(variants[name])
                if round_ >= warmup:
                    samples[name].append(took)
    finally:
        if collecting:
            gc.enable()
    return {name: Times(values) for name, values in samples.items()}
