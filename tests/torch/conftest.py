"""Fixtures of the PyTorch adapter's tests: optimizers x paths through the adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import stablenum
from stablenum_torch._step.guard import on_device_path
from tests.torch.watched import Watching, watching_with

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


@pytest.fixture(autouse=True, scope="module")
def gradients_set_by_hand() -> Iterator[None]:
    """Most tests step with gradients that they set to what a scaled loss would give."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stablenum_torch._step.guard.check_unscaled", lambda params: None)
        yield


@pytest.fixture(autouse=True)
def always(compiling_warns_in_each_test: None) -> None:
    """Applies to every test in this folder."""


# Every rule with windows so short that a test runs past them. The names are those of `parameters`.
RULES: dict[str, dict[str, Any]] = {
    "by value": {"clip": (1.0, stablenum.ClipByValue(0.3))},
    "each tensor": {"clip": (stablenum.ClipByNorm(2.0), 3.0)},
    "agc": {"clip": stablenum.AdaptiveGradClip(clipping=0.3, exclude="b", output_axis="first")},
    "agc, last axis": {"clip": stablenum.AdaptiveGradClip(clipping=0.3, output_axis="last")},
    "agc among others": {
        "clip": (
            stablenum.ClipByNorm(3.0),
            stablenum.AdaptiveGradClip(clipping=0.5, output_axis="first"),
            1.0,
            stablenum.ClipByValue(0.2),
        ),
        "loss_scale": "dynamic",
    },
    "autoclip": {"clip": stablenum.AutoClip(quantile=0.4, window=20)},
    "zclip": {"clip": stablenum.ZClip(warmup_steps=10, max_norm=None)},
    "adagc": {"clip": stablenum.AdaGC(warmup_steps=10)},
    "adagc and agc": {
        "clip": (stablenum.AdaGC(warmup_steps=10), stablenum.AdaptiveGradClip(output_axis="first"))
    },
    "update": {"clip": (2.0, stablenum.ClipUpdateRMS(0.3))},
    "update, absolute": {"clip": stablenum.ClipUpdateRMS(0.004, per_lr=False)},
    "hysteresis": {
        "loss_scale": stablenum.DynamicLossScale(hysteresis=2, hysteresis_refill="growth", growth_interval=20)
    },
    "log-max scale": {"loss_scale": stablenum.LogMaxLossScale(mean_decay=0.9)},
    "underflow scale": {"loss_scale": stablenum.UnderflowAwareLossScale(max_tiny=0.01), "clip": 1.0},
    "spike skip": {"spike": stablenum.SpikeGuard(window=24, min_samples=12)},
    "spike clip": {"spike": stablenum.SpikeGuard(window=24, min_samples=12, action="clip"), "clip": 2.0},
    "spike mean": {"spike": stablenum.MeanStdSpikeGuard(window=24, min_samples=12)},
    "all at once": {
        "clip": (
            stablenum.AdaptiveGradClip(clipping=0.5, output_axis="first"),
            stablenum.AdaGC(warmup_steps=10),
            stablenum.ZClip(warmup_steps=10),
            stablenum.ClipByValue(1.0),
            stablenum.ClipUpdateRMS(1.0),
        ),
        "loss_scale": stablenum.LogMaxLossScale(),
        "spike": "skip",
    },
}

PATHS = ("host", "device")


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    """Begins to watch, as ``stablenum explain`` does."""
    yield from watching_with(monkeypatch)


@pytest.fixture(params=list(OPTIMIZERS))
def make_optimizer(request: pytest.FixtureRequest) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes an optimizer of each kind."""
    return OPTIMIZERS[request.param]


@pytest.fixture(params=list(RULES))
def rule(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings with each rule."""
    return RULES[request.param]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The host path, as on a CPU, and the device path of accelerators, run here on CPU tensors."""
    with on_device_path() if request.param == "device" else nullcontext():
        yield str(request.param)


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


def named(params: list[torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """The parameters by the names that ``RULES`` uses."""
    return dict(zip("abc", params, strict=True))
