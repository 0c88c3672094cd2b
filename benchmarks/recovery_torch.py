"""A training in PyTorch with and without a recovery, for :mod:`benchmarks.recovery_cost`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import stablenum_torch
from benchmarks.recovery_cost import Training
from stablenum_torch._recovery.state import RunState

__all__ = ["training"]

_LAYERS, _BATCH = 4, 64


def training(width: int, options: Mapping[str, Any] | None, device: str = "cpu") -> Training:
    """Return a training of four layers.

    Args:
        width: the width of each layer.
        options: settings of the recovery; None for none.
        device: where the training runs.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        layers = [part for _ in range(_LAYERS) for part in (nn.Linear(width, width, bias=False), nn.Tanh())]
        model = nn.Sequential(*layers).to(device)
        batches = [torch.randn(_BATCH, width).to(device) for _ in range(8)]
    opt = stablenum_torch.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), names=model, clip=1.0
    )
    _step(model, opt, batches[0])  # the moments are there from now on
    tensors = [*model.parameters(), *(t for s in opt.state.values() for t in s.values())]
    size = sum(t.nbytes for t in tensors)
    held = 0
    if options is not None:
        held = sum(t.nbytes for t in _tensors(RunState(model, opt, {}).capture().read()))
    run = _steps(model, opt, batches, options)
    next(run)
    return Training(run.send, size, held)


def _step(model: nn.Module, opt: stablenum_torch.GuardedOptimizer, batch: Tensor) -> None:
    opt.zero_grad()
    opt.backward((model(batch) - batch).square().mean())
    opt.step()


def _steps(model: Any, opt: Any, batches: list[Tensor], options: Mapping[str, Any] | None) -> Any:
    """Take the number of steps that it is sent, again and again."""
    following: Iterator[Tensor] = _again(batches)
    if options is not None:
        recovery = stablenum_torch.Recovery(model, opt, data=batches, **options)
        following = recovery.batches(10**9)
    while True:
        for _ in range((yield) or 0):
            _step(model, opt, next(following))
        if batches[0].is_cuda:
            torch.cuda.synchronize()


def _again(batches: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from batches


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)
