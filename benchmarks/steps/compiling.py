"""``torch.compile`` of a whole step: graph breaks and seconds, which do not depend on the tensors' sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.steps.rows import TORCH_ROWS, Row

__all__ = ["compiling"]

# The variants that compile entirely or nearly so; the compile time of a step that keeps falling back to eager
# code is meaningless.
_COMPILED = ("bare", "clip", "idle", "fold")


def compiling(tensors: int = 10, *, device: str = "cpu", seconds: bool = True) -> list[dict[str, Any]]:
    """For the fused and the foreach AdamW: graph breaks of each variant, and seconds to compile some of them.

    Args:
        tensors: the number of (small) tensors.
        device: the torch device.
        seconds: whether to time the compilation of the fused variants with inductor, once each.
    """
    return [
        _one_kernel("fused", tensors, device, seconds),
        _one_kernel("foreach", tensors, device, seconds=False),
    ]


def _one_kernel(kernel: Any, tensors: int, device: str, seconds: bool) -> dict[str, Any]:
    import torch

    from benchmarks.steps.torch_counts import graph_breaks, seconds_to_compile
    from benchmarks.steps.torch_variants import TorchProblem, build

    row: Row = replace(TORCH_ROWS[0], size="small", kernel=kernel, tensors=tensors, shape=(100,))
    problem = TorchProblem(row, device)
    if seconds:
        seconds_to_compile(lambda: torch.ones(3).add(1))  # inductor's own imports
    found: dict[str, Any] = {}
    for name, variant in build(problem).items():
        problem.put(variant.steps, variant.scale)
        variant.step()  # creates the optimizer's state
        found[name] = graph_breaks(variant.step)
        if seconds and name in _COMPILED:
            found[name]["compile_s"] = round(seconds_to_compile(variant.step), 2)
    return {
        "framework": "torch",
        "optimizer": row.optimizer,
        "kernel": kernel,
        "tensors": tensors,
        "device": device,
        "variants": found,
    }
