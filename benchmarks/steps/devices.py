"""Timers for the device on which a step runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.timing import host_timer

__all__ = ["cuda_timer", "timer_of"]


def cuda_timer(step: Callable[[], object]) -> float:
    """Milliseconds between two CUDA events around the step; the device is idle when the step begins."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def timer_of(device: str) -> Callable[[Callable[[], object]], float]:
    """The timer for a torch device."""
    return cuda_timer if device == "cuda" else host_timer
