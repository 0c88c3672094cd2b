"""Fixtures of the PyTorch adapter's tests: optimizers x paths through the adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stablenum_torch
import stablenum_torch.stepping

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "adam-foreach": lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=True),
    "adam-single": lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=False),
    "sgd-fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "sgd-foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=True),
    "sgd-fused-dampening": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, dampening=0.5, fused=True),
    "adagrad-fused": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.9),
}


@pytest.fixture(params=list(OPTIMIZERS))
def make_optimizer(request: pytest.FixtureRequest) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes an optimizer of each kind."""
    return OPTIMIZERS[request.param]


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The host path, as on a CPU, and the path of accelerators, run here on CPU tensors."""
    if request.param == "device":
        monkeypatch.setattr(stablenum_torch.stepping, "_on_host", lambda *_: False)
    return str(request.param)


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Three seeded parameters of different shapes."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in ((4, 3), (7,), (2, 2, 2))
    ]


def set_gradients(params: list[torch.nn.Parameter], seed: int, size: float = 1.0) -> None:
    """Seeded normal gradients of the given size."""
    g = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=g) * size).to(p.dtype)


def snapshot(optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Every bit of the parameters and of the optimizer's state."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors = [p.detach(), *(v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor))]
            found += [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    return found
