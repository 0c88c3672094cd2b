"""Make a kernel from its source, and launch it. What is imported here is imported by the first launch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import linecache
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from stablenum_torch._devices.kernels.printed_decide import Kinds, printed_decide
from stablenum_torch._devices.kernels.squares_source import BLOCK, SOURCE

__all__ = ["decide_kernel", "has_triton", "on", "squares_kernel"]

# Of the launch of a decision. A fused multiply-add would round once where NumPy rounds twice.
_ROUNDED = {"enable_fp_fusion": False}
_FEW = 1024  # values of a block for which 4 warps, Triton's default, hold enough registers


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is there. torch's builds for a GPU bring it along."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def squares_kernel() -> Callable[..., None]:
    """Return what launches the kernel that adds up squares: a function of the number of pieces, the
    addresses, the table and the output."""
    squared = made(SOURCE, "squared")

    def launch(pieces: int, *args: torch.Tensor) -> None:
        squared[(pieces,)](*args, BLOCK=BLOCK, num_warps=8, enable_fp_fusion=True)

    return launch


@functools.lru_cache(maxsize=256)
def decide_kernel(kinds: Kinds) -> Callable[..., None]:
    """Return what launches the kernel of a decision, a function of its arguments.

    Raises:
        UnprintableError: there is no such kernel.
    """
    decided = made(printed_decide(kinds), "decided")
    warps = 4 if max(kinds.n, kinds.ranks) <= _FEW else 8

    def launch(*args: Any) -> None:
        decided[(1,)](*args, num_warps=warps, **_ROUNDED)

    return launch


def made(source: str, name: str) -> Any:
    """Return the function ``name`` of a module with this source, which Triton reads again, by its name."""
    file = f"<stablenum kernel {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, file, "exec"), scope)  # the text is printed from the core's own operations only
    return scope[name]


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels are launched on ``device``; Triton launches on the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
