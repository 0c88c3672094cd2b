"""The bandwidth of this machine's memory, from which the lower limit of a guarded step's time follows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.steps.errors import NoisyError, WrongResultError
from benchmarks.timing import host_timer, interleaved

__all__ = ["BOUND", "bandwidth"]

BOUND = 0.20


def bandwidth(
    *,
    device: str = "cpu",
    elements: int = 2**27,
    rounds: int = 15,
    timer: Callable[[Callable[[], object]], float] = host_timer,
    bound: float = BOUND,
) -> dict[str, object]:
    """GB/s of a copy (both directions counted) and of the fastest of three reductions (reading alone).

    Args:
        device: the torch device.
        elements: the number of float32 elements of each of two buffers; far more than the caches hold.
        rounds: the number of rounds for the medians.
        timer: as in ``interleaved``.
        bound: the largest spread that is accepted.

    Raises:
        NoisyError: a spread is above the bound.
    """
    source = torch.full((elements,), 0.5, device=device)
    target = torch.empty_like(source)
    ways = {
        "copy_": lambda: target.copy_(source),
        "sum": lambda: source.sum(),
        "dot": lambda: torch.dot(source, source),
        "amax": lambda: source.amax(),
    }
    times = interleaved(ways, rounds=rounds, timer=timer)
    if not torch.equal(target, source):
        raise WrongResultError("bandwidth: the copy is not equal to its source.")
    size = source.numel() * source.element_size()
    moved = {name: (2 if name == "copy_" else 1) * size for name in ways}
    speed = {name: moved[name] / times[name].median / 1e6 for name in ways}
    restless = {name: t.spread for name, t in times.items() if t.spread > bound}
    if restless:
        raise NoisyError(f"bandwidth: the spreads {restless} are above {bound}.")
    return {
        "copy_gb_s": round(speed["copy_"], 2),
        "read_gb_s": round(max(v for name, v in speed.items() if name != "copy_"), 2),
        "buffer_bytes": size,
        "each": {
            name: {"gb_s": round(speed[name], 2), "spread": round(times[name].spread, 4)} for name in ways
        },
        "spread_bound": bound,
    }
