"""What a recovery adds to a training that nothing happens to: milliseconds per step, and host memory.

``plain`` is the loop without a recovery. ``checked`` reads the record and searches the state every 10 steps,
and takes no snapshot after the first; ``snapshots`` takes one every 100 steps as well. Each sample is the
mean of a stretch of 100 steps, so that it holds ten checks and one snapshot. The step is the same compiled
one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.timing import interleaved

__all__ = ["FRAMEWORKS", "STRETCH", "VARIANTS", "Training", "run"]

STRETCH = 100
VARIANTS: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "checked": {"every": 10**9, "audit": False},
    "snapshots": {"every": STRETCH},
}
# For each framework, the module whose training(width, options) makes a training of one variant.
FRAMEWORKS = {"jax": "benchmarks.recovery_jax", "torch": "benchmarks.recovery_torch"}
WIDTHS = {"cpu": (512, 1024), "cuda": (1024, 4096)}
ROUNDS = 5


class Training(NamedTuple):
    """A training of one variant.

    Attributes:
        steps: makes so many steps, and returns when they are done.
        state_bytes: the size of the state.
        snapshot_bytes: what one snapshot holds in host memory; 0 without a recovery.
    """

    steps: Callable[[int], None]
    state_bytes: int
    snapshot_bytes: int


def run(
    rounds: int = ROUNDS,
    widths: Sequence[int] | None = None,
    frameworks: Sequence[str] = tuple(FRAMEWORKS),
    stretch: int = STRETCH,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """One row for each framework and width, by default those of ``WIDTHS`` for the device."""
    return [
        _row(name, width, rounds, stretch, device)
        for name in frameworks
        for width in widths or WIDTHS[device]
    ]


def _row(framework: str, width: int, rounds: int, stretch: int, device: str) -> dict[str, Any]:
    module = importlib.import_module(FRAMEWORKS[framework])
    trainings: dict[str, Training] = {
        name: module.training(width, options, device) for name, options in VARIANTS.items()
    }
    variants = {name: _stretch_of(one, stretch) for name, one in trainings.items()}
    times = interleaved(variants, rounds=rounds, warmup=1)
    return {
        "framework": framework,
        "size": f"width {width}",
        "state_bytes": trainings["plain"].state_bytes,
        "snapshot_bytes": trainings["snapshots"].snapshot_bytes,
        "variants": {
            name: {
                "ms_per_step": round(took.median / stretch, 4),
                "spread": round(took.spread, 4),
                "ratio_to_plain": round(took.median_ratio_to(times["plain"]), 4),
            }
            for name, took in times.items()
        },
    }


def _stretch_of(training: Training, stretch: int) -> Callable[[], None]:
    return lambda: training.steps(stretch)
