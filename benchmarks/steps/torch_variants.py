"""PyTorch: the bare step, the peers as they are commonly used, and ours.

All variants of a row use the same gradient tensors, which are written again before each step, as by a
backward pass. Each variant has its own parameters and moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import stablenum
import stablenum_torch
from benchmarks.steps.errors import WrongResultError
from benchmarks.steps.reference import (
    CLIP_AT,
    FACTORS,
    LEARNING_RATE,
    MOMENTUM,
    SCALE,
    WEIGHT_DECAY,
    check_decided,
)
from benchmarks.steps.rows import Row

__all__ = ["BUILD", "TorchProblem", "TorchVariant", "build"]

_SEED = 0


class TorchProblem:
    """The gradients of a row.

    Attributes:
        raw: the gradients at factor 1, never changed.
        grads: the gradients that the optimizers get.
        norm: the norm of ``raw``, computed in float64.
        loss: () the loss that belongs to the gradients.
    """

    def __init__(self, row: Row, device: str) -> None:
        self.row, self.device, self.dtype = row, torch.device(device), getattr(torch, row.dtype)
        draw = torch.Generator().manual_seed(_SEED + 1)
        self.raw = [
            torch.randn(row.shape, generator=draw).mul_(1e-2).to(self.device, self.dtype)
            for _ in range(row.tensors)
        ]
        self.grads = [torch.zeros_like(g) for g in self.raw]
        self.norm = math.sqrt(math.fsum(float(g.double().square().sum()) for g in self.raw))
        self.max_norm = CLIP_AT * self.norm
        self.loss = torch.tensor(2.0, device=self.device)

    def put(self, step: int, scale: float) -> None:
        """Write the gradients of a step, multiplied by the loss scale."""
        for source, grad in zip(self.raw, self.grads, strict=True):
            torch.mul(source, FACTORS[step % len(FACTORS)] * scale, out=grad)

    def parameters(self) -> list[torch.nn.Parameter]:
        """New parameters, equal each time, with the shared gradients."""
        draw, made = torch.Generator().manual_seed(_SEED), []
        for grad in self.grads:
            start = torch.randn(self.row.shape, generator=draw).mul_(1e-3).to(self.device, self.dtype)
            made.append(torch.nn.Parameter(start))
            made[-1].grad = grad
        return made


@dataclass
class TorchVariant:
    """One variant of the step.

    Attributes:
        name: as in ``rows``.
        params: the variant's own parameters.
        optimizer: the unguarded optimizer.
        step: runs a whole step, starting from the gradients.
        scale: the loss scale that the gradients are multiplied by.
        skips: whether a non-finite gradient leaves parameters and state unchanged.
        checked: is called with the number of steps, and raises ``WrongResultError`` if a result is not what
            the name says.
        steps: the number of steps so far.
    """

    name: str
    params: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]
    scale: float = 1.0
    skips: bool = False
    checked: Callable[[int], None] = lambda _steps: None
    steps: int = 0

    def check(self) -> None:
        """Raise ``WrongResultError`` if a result is not what the name says."""
        self.checked(self.steps)


def make_optimizer(row: Row, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The row's optimizer with the row's kernel."""
    kernel = {"fused": row.kernel == "fused", "foreach": row.kernel == "foreach"}
    lr = LEARNING_RATE[row.optimizer]
    if row.optimizer == "sgd":
        return torch.optim.SGD(params, lr=lr, momentum=MOMENTUM, **kernel)
    return torch.optim.AdamW(params, lr=lr, weight_decay=WEIGHT_DECAY, **kernel)


def _bare(problem: TorchProblem) -> TorchVariant:
    params = problem.parameters()
    optimizer = make_optimizer(problem.row, params)
    return TorchVariant("bare", params, optimizer, optimizer.step)


def _clip(problem: TorchProblem) -> TorchVariant:
    params = problem.parameters()
    optimizer = make_optimizer(problem.row, params)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, problem.max_norm)
        optimizer.step()

    return TorchVariant("clip", params, optimizer, step)


def _scaler(problem: TorchProblem) -> TorchVariant:
    params = problem.parameters()
    optimizer = make_optimizer(problem.row, params)
    scaler = torch.amp.GradScaler(problem.device.type, init_scale=SCALE)

    def step() -> None:
        scaler.scale(problem.loss)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, problem.max_norm)
        scaler.step(optimizer)
        scaler.update()

    check = _scale_is_kept("scaler", scaler.get_scale)
    return TorchVariant("scaler", params, optimizer, step, scale=SCALE, skips=True, checked=check)


def _isfinite(problem: TorchProblem) -> TorchVariant:
    params = problem.parameters()
    optimizer = make_optimizer(problem.row, params)

    def step() -> None:
        if all(torch.isfinite(p.grad).all() for p in params):
            torch.nn.utils.clip_grad_norm_(params, problem.max_norm)
            optimizer.step()

    return TorchVariant("isfinite", params, optimizer, step, skips=True)


def _accelerate(problem: TorchProblem) -> TorchVariant:
    """Accelerate with a loss scale ("fp16") on a CUDA device; on a CPU it rejects "fp16", so it only
    clips."""
    import accelerate

    scales = problem.device.type == "cuda" and problem.dtype == torch.float32
    # Accelerate's settings are global to the process and set only once.
    accelerator = accelerate.Accelerator(
        cpu=problem.device.type == "cpu",
        mixed_precision="fp16" if scales else "no",
        kwargs_handlers=[accelerate.utils.GradScalerKwargs(init_scale=SCALE)],
    )
    params = problem.parameters()
    inner = make_optimizer(problem.row, params)
    optimizer = accelerator.prepare(inner)

    def step() -> None:
        if scales:
            accelerator.scaler.scale(problem.loss)  # what accelerator.backward does first
        accelerator.clip_grad_norm_(params, problem.max_norm)
        optimizer.step()

    check = _scale_is_kept("accelerate", accelerator.scaler.get_scale) if scales else lambda _steps: None
    return TorchVariant(
        "accelerate", params, inner, step, scale=SCALE if scales else 1.0, skips=scales, checked=check
    )


def _idle(problem: TorchProblem) -> TorchVariant:
    params = problem.parameters()
    inner = make_optimizer(problem.row, params)
    guarded = stablenum_torch.wrap(inner, clip=1e30)
    check = _decided("idle", problem, guarded, clipped=False, scale=1.0)
    return TorchVariant("idle", params, inner, guarded.step, skips=True, checked=check)


def _fold(problem: TorchProblem) -> TorchVariant:
    params = problem.parameters()
    inner = make_optimizer(problem.row, params)
    rule = stablenum.DynamicLossScale(init_scale=SCALE)
    guarded = stablenum_torch.wrap(inner, clip=problem.max_norm, loss_scale=rule)

    def step() -> None:
        guarded.scale(problem.loss)
        guarded.step()

    check = _decided("fold", problem, guarded, clipped=True, scale=SCALE)
    return TorchVariant("fold", params, inner, step, scale=SCALE, skips=True, checked=check)


def _all(problem: TorchProblem) -> TorchVariant:
    params = problem.parameters()
    inner = make_optimizer(problem.row, params)
    rule = stablenum.DynamicLossScale(init_scale=SCALE)
    guarded = stablenum_torch.wrap(inner, clip=problem.max_norm, loss_scale=rule, spike="skip")

    def step() -> Any:
        guarded.scale(problem.loss)
        guarded.step()
        return guarded.last

    check = _decided("all", problem, guarded, clipped=True, scale=SCALE)
    return TorchVariant("all", params, inner, step, scale=SCALE, skips=True, checked=check)


BUILD: dict[str, Callable[[TorchProblem], TorchVariant]] = {
    "bare": _bare,
    "clip": _clip,
    "scaler": _scaler,
    "isfinite": _isfinite,
    "accelerate": _accelerate,
    "idle": _idle,
    "fold": _fold,
    "all": _all,
}


def build(problem: TorchProblem, turn: int = 0) -> dict[str, TorchVariant]:
    """The variants of the problem's row, created in the order of that turn."""
    return {name: BUILD[name](problem) for name in problem.row.in_turn(turn)}


def _scale_is_kept(name: str, scale: Callable[[], float]) -> Callable[[int], None]:
    """Checks that a scaler neither backed off nor grew."""

    def check(_steps: int) -> None:
        if scale() != SCALE:
            raise WrongResultError(f"{name}: the loss scale is {scale()}; expected {SCALE}, unchanged.")

    return check


def _decided(
    name: str,
    problem: TorchProblem,
    guarded: stablenum_torch.GuardedOptimizer,
    *,
    clipped: bool,
    scale: float,
) -> Callable[[int], None]:
    """Checks that every step was applied, with the loss scale and the clipping that the name says."""

    def check(steps: int) -> None:
        check_decided(name, guarded.last, norm=problem.norm, steps=steps, clipped=clipped, scale=scale)

    return check
