"""What a tool with hooks sees of one training step: module outputs, their gradients, and the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import stablenum_torch

__all__ = ["Call", "Run", "TorchStep", "given", "torch_run", "torch_step"]

Arrays = Mapping[str, np.ndarray]


@dataclass
class Call:
    """One call of a module.

    Attributes:
        module: its path; "" is the model itself.
        kind: the module's class.
        own: whether it has parameters of its own rather than only those of modules inside.
        outputs, gradients: the floating-point arrays that it returned, and the loss's gradients with respect
            to them; None where no gradient arrives.
    """

    module: str
    kind: str
    own: bool
    children: list[Call] = field(default_factory=list)
    outputs: list[np.ndarray] = field(default_factory=list)
    gradients: list[np.ndarray | None] = field(default_factory=list)


@dataclass
class Run:
    """A training step.

    Attributes:
        outputs, cotangents: by the path of the module, in the order in which they came up first; one array
            for each call and each array that it returned.
        gradients, updated: by the name of the parameter; ``updated`` is empty without an optimizer.
        calls: the outermost calls of modules; only known for PyTorch.
    """

    loss: float = float("nan")
    outputs: dict[str, list[np.ndarray]] = field(default_factory=dict)
    cotangents: dict[str, list[np.ndarray]] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    updated: dict[str, np.ndarray] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


@dataclass
class TorchStep:
    """What a pair hands to ``stablenum_torch.program``."""

    loss_fn: Callable[..., Tensor]
    args: tuple[Any, ...]
    model: nn.Module
    optimizer: torch.optim.Optimizer | None

    def run(self) -> Tensor:
        """Forward and backward pass, and the update."""
        loss = self.loss_fn(*self.args)
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss


def torch_step(side: Callable[[], Any], arrays: Arrays | None = None) -> TorchStep:
    """Return the step of a pair's PyTorch side, with these parameters and buffers if they are given."""

    def taken(loss_fn: Any, *args: Any, model: nn.Module, optimizer: Any = None) -> TorchStep:
        return TorchStep(loss_fn, args, model, optimizer)

    with mock.patch.object(stablenum_torch, "program", taken):
        step: TorchStep = side()
    if arrays is not None:
        given(step.model, arrays)
    return step


def given(model: nn.Module, arrays: Arrays) -> None:
    """Give a model these parameters and buffers; those that are not among them stay."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in arrays:
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(arrays[name])).reshape(tensor.shape))


def torch_run(step: TorchStep) -> Run:
    """Run the step with hooks on all modules."""
    found = Run()
    with _hooks(step.model, found):
        found.loss = step.run().item()
    for name, p in step.model.named_parameters():
        found.gradients[name] = _array(p.grad if p.grad is not None else torch.zeros_like(p))
        if step.optimizer is not None:
            found.updated[name] = _array(p)
    return found


@contextmanager
def _hooks(model: nn.Module, found: Run) -> Iterator[None]:
    running: list[Call] = []

    def begin(path: str, module: nn.Module) -> None:
        own = next(module.parameters(recurse=False), None) is not None
        call = Call(path, type(module).__name__, own)
        (running[-1].children if running else found.calls).append(call)
        running.append(call)

    def end(out: Any) -> None:
        call = running.pop()
        for tensor in _tensors(out):
            call.outputs.append(_array(tensor))
            call.gradients.append(None)
            found.outputs.setdefault(call.module, []).append(call.outputs[-1])
            if tensor.requires_grad:
                tensor.register_hook(_keeps(call, len(call.gradients) - 1, found))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            before = module.register_forward_pre_hook(lambda m, _, path=path: begin(path, m))
            after = module.register_forward_hook(lambda _, __, out: end(out))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def _keeps(call: Call, index: int, found: Run) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        call.gradients[index] = _array(gradient)
        found.cotangents.setdefault(call.module, []).append(_array(gradient))

    return keep


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield out
    elif isinstance(out, (list, tuple)):
        for part in out:
            yield from _tensors(part)


def _array(x: Tensor) -> np.ndarray:
    return x.detach().numpy().copy()
