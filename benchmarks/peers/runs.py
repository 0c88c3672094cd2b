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

__all__ = ["Call", "Returned", "Run", "TorchStep", "given", "noted", "torch_run", "torch_step"]

Arrays = Mapping[str, np.ndarray]
Returned = dict[str, dict[int, list[np.ndarray]]]


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
        outputs, cotangents: by the path of the module, in the order in which they came up first, and by the
            place among what it returns; one array for each call.
        gradients, updated: by the name of the parameter; ``updated`` is empty without an optimizer.
        calls: the outermost calls of modules; only known for PyTorch.
    """

    loss: float = float("nan")
    outputs: Returned = field(default_factory=dict)
    cotangents: Returned = field(default_factory=dict)
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

    def gradients(self) -> Tensor:
        """Run the forward and the backward pass, and return the loss."""
        loss = self.loss_fn(*self.args)
        loss.backward()
        return loss

    def update(self) -> None:
        """Make the optimizer's step, if there is an optimizer."""
        if self.optimizer is not None:
            self.optimizer.step()


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
        found.loss = step.gradients().item()
    parameters = dict(step.model.named_parameters())
    for name, p in parameters.items():  # before the update, which may clip them
        found.gradients[name] = _array(p.grad if p.grad is not None else torch.zeros_like(p))
    step.update()
    if step.optimizer is not None:
        found.updated |= {name: _array(p) for name, p in parameters.items()}
    return found


@contextmanager
def _hooks(model: nn.Module, found: Run) -> Iterator[None]:
    running: list[Call] = []

    def begin(path: str, module: nn.Module) -> None:
        own = next(module.parameters(recurse=False), None) is not None
        call = Call(path, type(module).__name__, own)
        (running[-1].children if running else found.calls).append(call)
        running.append(call)

    def end(out: Any) -> Any:
        call = running.pop()
        return _mapped(out, lambda tensor: returned(call, tensor))

    def returned(call: Call, tensor: Tensor) -> Tensor:
        """Return a copy, whose gradient is that of what reads it outside of the module."""
        place, copy = len(call.outputs), tensor.clone()
        call.outputs.append(_array(copy))
        call.gradients.append(None)
        noted(found.outputs, call.module, place, call.outputs[-1])
        if copy.requires_grad:
            copy.register_hook(_keeps(call, place, found))
        return copy

    with ExitStack() as stack:
        for path, module in model.named_modules():
            before = module.register_forward_pre_hook(lambda m, _, path=path: begin(path, m))
            after = module.register_forward_hook(lambda _, __, out: end(out))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def noted(into: Returned, module: str, place: int, array: np.ndarray) -> None:
    """Note an array that a module returned at a place."""
    into.setdefault(module, {}).setdefault(place, []).append(array)


def _keeps(call: Call, index: int, found: Run) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        call.gradients[index] = _array(gradient)
        noted(found.cotangents, call.module, index, _array(gradient))

    return keep


def _mapped(out: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the floating-point tensors among what a module returns."""
    if isinstance(out, Tensor):
        return change(out) if out.is_floating_point() else out
    if isinstance(out, (list, tuple)):
        parts = [_mapped(part, change) for part in out]
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
    return out


def _array(x: Tensor) -> np.ndarray:
    return x.detach().numpy().copy()
