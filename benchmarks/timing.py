"""Interleaved timing: every variant runs once per round, so that changes of the machine affect all alike."""

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

    # Both methods compare within each round, so that a change of the machine over several rounds cancels.

    def median_ratio_to(self, other: Times) -> float:
        """The median over rounds of the time relative to ``other``'s."""
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=True))

    def median_above(self, other: Times) -> float:
        """The median over rounds of the time minus ``other``'s, in milliseconds."""
        return statistics.median(a - b for a, b in zip(self.samples, other.samples, strict=True))

    def as_dict(self) -> dict[str, float]:
        """The median and the relative interquartile range."""
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

    The order is drawn at random for each round, because the caches hold the data of the step before. The
    garbage collector does not run during a step.

    Args:
        variants: one step per name; it returns only when its work is done, unless ``timer`` waits for it.
        rounds: the number of timed rounds.
        warmup: the number of rounds before them that are not counted.
        prepare: called with a variant's name before its step, untimed, to restore its inputs.
        timer: runs a step and returns its milliseconds.
        seed: the seed of the orders.
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
