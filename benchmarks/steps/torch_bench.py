"""A row in PyTorch, with the interface that ``measure`` uses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from benchmarks.steps import torch_counts
from benchmarks.steps.devices import timer_of
from benchmarks.steps.rows import Row
from benchmarks.steps.torch_variants import TorchProblem, build

__all__ = ["TorchBench"]


class TorchBench:
    """Implements ``measure.Bench``."""

    def __init__(self, row: Row, device: str, turn: int) -> None:
        self.device, self.timer = device, timer_of(device)
        self.problem = TorchProblem(row, device)
        self.norm, self.raw = self.problem.norm, self.problem.raw
        self.variants = build(self.problem, turn)

    def put(self, name: str) -> None:
        variant = self.variants[name]
        self.problem.put(variant.steps, variant.scale)
        variant.steps += 1

    def start(self) -> list[torch.Tensor]:
        return self.problem.parameters()

    def parameters(self, name: str) -> list[torch.nn.Parameter]:
        return self.variants[name].params

    def numbers(self, array: torch.Tensor) -> np.ndarray:
        return array.detach().double().cpu().numpy()

    def square_apart(self, one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one.detach().float() - other.detach().float()).square().sum(dtype=torch.float64))

    def count(self, name: str) -> dict[str, Any]:
        variant = self.variants[name]
        counts = torch_counts.count(self.problem, variant)
        if self.device == "cuda":
            counts |= torch_counts.kernels(self.problem, variant)
        return counts | {"peak_bytes": torch_counts.peak_bytes(self.problem, variant)}

    def skip(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        variant = self.variants[name]
        state = variant.optimizer.state.values()
        tracked = [*variant.params, *(t for s in state for t in s.values() if isinstance(t, torch.Tensor))]
        picked = [tracked[i] for i in sorted({*range(3), *range(len(tracked) - 3, len(tracked))})]
        self.put(name)
        self.problem.grads[-1].view(-1)[-1] = math.inf
        before = [self.numbers(t).copy() for t in picked]
        variant.step()
        return before, [self.numbers(t) for t in picked]
