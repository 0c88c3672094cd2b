"""The PyTorch backends: ``stablenum_torch.wrap`` (fused, foreach and compiled), and bare optimizers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch

from stablenum.commands.compare.backends.interface import Setup
from stablenum.commands.compare.backends.torch_models import loss_function
from stablenum.commands.compare.scenarios import OptimizerSpec, tensor_names
from stablenum.commands.compare.scenarios.training_data import Batch
from stablenum.guard.halting import check_halted
from stablenum.recovery.ledger import RecoveryEvent

__all__ = ["start"]

Array: TypeAlias = "np.ndarray[Any, Any]"


def start(setup: Setup, mode: str) -> GuardedRun | PlainRun:
    """Start a run; ``mode`` is ``"fused"``, ``"foreach"`` or ``"compiled"``."""
    return PlainRun(setup, mode) if setup.guard is None else GuardedRun(setup, mode)


def make_optimizer(spec: OptimizerSpec, params: list[torch.Tensor], mode: str) -> torch.optim.Optimizer:
    """Return the optimizer of a scenario: fused if all parameters are float32, otherwise foreach."""
    fused = mode != "foreach" and all(p.dtype == torch.float32 for p in params)
    kind = {"fused": True} if fused else {"foreach": True}
    if spec.name == "sgd":
        return torch.optim.SGD(
            params, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay, **kind
        )
    make = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    return make(params, lr=spec.lr, eps=spec.eps, weight_decay=spec.weight_decay, **kind)


class PlainRun:
    """The bare optimizer, with ``clip_grad_norm_`` if the scenario clips."""

    loss_scale = 1.0
    norms = None

    def __init__(self, setup: Setup, mode: str) -> None:
        self._device = setup.device
        self._params = [torch.nn.Parameter(to_torch(p, self._device)) for p in setup.params]
        self._optimizer = make_optimizer(setup.optimizer, self._params, mode)
        self._clip = setup.plain_clip
        self._seen: Mapping[str, Any] = {}
        self._ladder = setup.ladder
        compute = self._ladder[0] if len(self._ladder) == 1 else None  # otherwise autocast chooses
        self._loss = None if setup.training is None else loss_function(setup.training, compute)

    @property
    def last(self) -> Mapping[str, Any]:
        return self._seen

    def step(self, gradients: list[Array], loss: float) -> None:
        for p, g in zip(self._params, gradients, strict=True):
            p.grad = to_torch(g, self._device)
        self._finish_step(loss)

    def train(self, batch: Batch) -> None:
        if self._loss is None:
            raise ValueError("this run has no model to train")
        self._optimizer.zero_grad()
        with self._precision():
            loss = self._loss(self._params, *(torch.as_tensor(leaf, device=self._device) for leaf in batch))
        self._seen = {"loss": float(loss.detach())}
        self._backward(loss)
        self._finish_step(None)

    def params(self) -> list[Array]:
        return [to_numpy(p.detach()) for p in self._params]

    def guard_state_dict(self) -> dict[str, Any]:
        return {}

    def load_guard_state_dict(self, plain: Mapping[str, Any]) -> None:
        raise ValueError("a plain run has no guard")

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _finish_step(self, loss: float | None) -> None:
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self._params, self._clip)
        self._optimizer.step()


class GuardedRun(PlainRun):
    """The same optimizer, wrapped. ``compiled`` compiles the whole ``step``."""

    def __init__(self, setup: Setup, mode: str) -> None:
        super().__init__(setup, mode)
        adapter: Any = importlib.import_module("stablenum_torch")
        names = dict(zip(tensor_names(len(setup.params)), self._params, strict=True))
        self._guarded = adapter.wrap(self._optimizer, setup.guard, names=names)
        self._recovery = setup.recovery
        self.rewinds: Sequence[RecoveryEvent] = ()
        self._step = self._guarded.step
        if mode == "compiled":
            # Every optimizer is a new program, which cannot reuse the code that was compiled for the last
            # one.
            torch.compiler.reset()
            # The traced graph runs operation by operation, because generating machine code for about thirty
            # scenarios would take minutes and give the same decisions.
            self._step = torch.compile(self._guarded.step, backend="aot_eager")

    @property
    def loss_scale(self) -> float:  # type: ignore[override]
        return self._guarded.loss_scale

    @property
    def last(self) -> Mapping[str, Any]:
        return self._guarded.last

    def batches(self, steps: int) -> Iterator[int]:
        adapter: Any = importlib.import_module("stablenum_torch")
        model = torch.nn.ParameterList(self._params)
        recovery = adapter.Recovery(model, self._guarded, self._recovery, data=int)
        self.rewinds = recovery.events
        yield from recovery.batches(steps)

    def guard_state_dict(self) -> dict[str, Any]:
        return self._guarded.guard_state_dict()

    def load_guard_state_dict(self, plain: Mapping[str, Any]) -> None:
        self._guarded.load_guard_state_dict(plain)

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if len(self._ladder) == 1 else self._guarded.autocast()

    def _backward(self, loss: torch.Tensor) -> None:
        self._guarded.backward(loss)

    def _finish_step(self, loss: float | None) -> None:
        # The gradients are given: these calls say that they have been scaled, and record the loss.
        self._guarded.scale()
        if loss is not None:
            self._guarded.scale(torch.tensor(loss, device=self._device))
        self._step()
        check_halted(self._guarded.guard_state, config=self._guarded.config)


# NumPy has no bfloat16, so its bits are passed as int16.


def to_torch(array: Array, device: str = "cpu") -> torch.Tensor:
    """Return a copy of an array as a tensor of the same dtype."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(array.copy()).to(device)


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a copy of a tensor as an array of the same dtype."""
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().copy().view(ml_dtypes.bfloat16)
    return tensor.numpy().copy()
