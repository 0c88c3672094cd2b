"""What the PyTorch loops have in common: the model, its loss, the optimizer and what is read at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.partners.batches import BAD, FEATURES, HIDDEN, SAVED_AFTER, batches, guard_config
from benchmarks.partners.outcome import Fault, Outcome, State

__all__ = [
    "GAMMA",
    "RATE",
    "Loop",
    "Net",
    "TorchBatch",
    "cut",
    "loss_of",
    "make_optimizer",
    "new_scaler",
    "torch_batches",
    "whole_state",
    "with_reference",
]

Loop: TypeAlias = Callable[..., Outcome]

RATE = 0.01
GAMMA = 0.9  # the learning rate falls by this factor at each step


class TorchBatch(NamedTuple):
    """x, z: (16, 4) float32; y: (16, 1) float32."""

    x: Tensor
    z: Tensor
    y: Tensor


def torch_batches(fault: Fault | None, *, without: bool = False) -> list[TorchBatch]:
    """Return the batches of a run, or those without the bad one."""
    made = [TorchBatch(*map(torch.from_numpy, batch)) for batch in batches(fault)]
    if fault is Fault.NAN_IN_BATCHNORM:
        # torch computes the variance in float64, so that with the shared values, whose variance is beyond
        # float32, only the running variance is infinite: see docs/recipes/batchnorm.md.
        made[BAD].x[0] = torch.nan
    return made[:BAD] + made[BAD + 1 :] if without else made


def cut(made: list[TorchBatch], *, without: bool) -> tuple[list[TorchBatch], list[TorchBatch]]:
    """Return the batches before the checkpoint, and those after it."""
    at = SAVED_AFTER + 1 - without
    return made[:at], made[at:]


class Net(nn.Module):
    """The model of :mod:`benchmarks.partners.batches`, always with the same weights.

    Args:
        half: whether to compute the dense layers in float16, whatever the loop around does.
    """

    def __init__(self, *, half: bool = False) -> None:
        super().__init__()
        self.half_precision = half
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.dense = nn.Linear(FEATURES, HIDDEN)
            self.norm = nn.BatchNorm1d(HIDDEN)
            self.direction = nn.Linear(FEATURES, HIDDEN, bias=False)
            self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the prediction, (16, 1) float32."""
        with torch.autocast("cpu", torch.float16) if self.half_precision else contextlib.nullcontext():
            h, u = self.norm(self.dense(x)).float(), self.direction(z).float()
            u = u * u.square().mean(dim=1, keepdim=True).rsqrt()
            return self.out(h.relu() + u).float()


def loss_of(prediction: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error, () float32."""
    return (prediction - y).square().mean()


def make_optimizer(params: Any, **hypers: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all loops."""
    return torch.optim.AdamW(params, **({"lr": RATE} | hypers))


def new_scaler(fault: Fault | None) -> torch.amp.GradScaler:
    """Return the scaler of a loop alone, with the first scale that a guard would have."""
    rule = guard_config(fault).loss_scale
    return torch.amp.GradScaler("cpu", init_scale=getattr(rule, "init_scale", 1.0), enabled=rule is not None)


def whole_state(model: nn.Module, optimizer: Any) -> State:
    """Return a copy of all parameters, buffers and moments, by name."""
    found: Mapping[str, Any] = {f"model/{name}": value for name, value in model.state_dict().items()}
    moments = {
        f"moments/{index}/{name}": value
        for index, of_one in optimizer.state_dict()["state"].items()
        for name, value in of_one.items()
    }
    return {name: value.detach().numpy().copy() for name, value in {**found, **moments}.items()}


def with_reference(loop: Loop) -> Loop:
    """Return a loop whose outcome has, for a fault, the same run without the bad batch."""

    @functools.wraps(loop)
    def run(fault: Fault | None, *, guarded: bool) -> Outcome:
        outcome = loop(fault, guarded=guarded)
        if fault is None:
            return outcome
        return dataclasses.replace(outcome, reference=loop(fault, guarded=guarded, without=True))

    return run
