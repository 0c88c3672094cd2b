"""Try a cure: change a running PyTorch training in one way, and leave all else as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stablenum.diagnosis.checkup.remedies import Change, Remedy
from stablenum_torch._diagnosis.optimizers import parameters_of
from stablenum_torch._diagnosis.script_recorder import existing_modules

__all__ = ["apply", "before_first_step"]

_NARROW = (torch.float16, torch.bfloat16)


def apply(remedy: Remedy) -> None:
    """Change all optimizer steps from now on."""
    if remedy.change is Change.NO_CLIP:
        _never_clip()
    elif remedy.change is Change.FLOAT32:
        masters = _Masters()
        _around_steps(masters.widen, masters.narrow)
    elif remedy.change is Change.CLIP:
        _around_steps(lambda o: _clip(o, remedy.number), _nothing)
    elif remedy.change is Change.CLEAR:
        _around_steps(_nothing, _clear)
    elif remedy.change in _SETTINGS:
        name, new = _SETTINGS[remedy.change]
        settings = _Settings(name, lambda old: new(old, remedy.number))
        _around_steps(settings.change, settings.restore)


def before_first_step(remedy: Remedy, names: Mapping[int, tuple[str, str]]) -> None:
    """Draw parameters afresh, or standardise what a layer reads.

    Args:
        remedy: what is tried.
        names: id of a parameter -> its role and name.
    """
    if remedy.change is Change.INITIALISE:
        generator = torch.Generator().manual_seed(0)
        own = {
            names[id(p)][1]: p for module in existing_modules() for p in module.parameters() if id(p) in names
        }
        with torch.no_grad():
            for name, deviation in remedy.deviations.items():
                if name in own:
                    own[name].copy_(deviation * torch.randn(own[name].shape, generator=generator))
    elif remedy.change is Change.SCALE_INPUT:
        for module in existing_modules():
            own_names = [
                names[id(p)][1] for p in module._parameters.values() if p is not None and id(p) in names
            ]
            if set(own_names) & set(remedy.deviations):
                module.register_forward_pre_hook(_Standardise())


class _Standardise:
    """Gives a layer inputs of mean 0 and standard deviation 1, by the statistics of the first batch."""

    def __init__(self) -> None:
        self._statistics: tuple[Tensor, Tensor] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return None
        x, *others = args
        if self._statistics is None:
            columns = tuple(range(x.ndim - 1)) if x.ndim < 4 else tuple(range(x.ndim))
            deviation = x.detach().std(dim=columns, correction=0, keepdim=True)
            self._statistics = x.detach().mean(dim=columns, keepdim=True), deviation.clamp(min=1e-12)
        mean, deviation = self._statistics
        return (x - mean) / deviation, *others


class _Settings:
    """Changes a setting of all parameter groups for the time of each step."""

    def __init__(self, name: str, new: Callable[[Any], Any]) -> None:
        self._name, self._new, self._old = name, new, list[tuple[dict[str, Any], Any]]()

    def change(self, optimizer: Optimizer) -> None:
        groups = [group for group in optimizer.param_groups if self._name in group]
        self._old = [(group, group[self._name]) for group in groups]
        for group, old in self._old:
            group[self._name] = self._new(old)

    def restore(self, optimizer: Optimizer) -> None:
        for group, old in self._old:
            group[self._name] = old


_SETTINGS: dict[Change, tuple[str, Callable[[Any, float], Any]]] = {
    Change.RATE: ("lr", lambda old, factor: old * factor),
    Change.EPS: ("eps", lambda old, eps: eps),
    Change.NO_DECAY: ("weight_decay", lambda old, _: 0.0),
}


class _Masters:
    """Keeps a float32 copy of each 16-bit parameter, with which the optimizer steps."""

    def __init__(self) -> None:
        self._wide: dict[int, Tensor] = {}
        self._narrow: dict[int, torch.dtype] = {}

    def widen(self, optimizer: Optimizer) -> None:
        for p in parameters_of(optimizer):
            if p.dtype in _NARROW:
                self._narrow[id(p)] = p.dtype
                gradient, p.grad = p.grad, None
                p.data = self._wide.setdefault(id(p), p.data.float())
                p.grad = None if gradient is None else gradient.float()

    def narrow(self, optimizer: Optimizer) -> None:
        for p in parameters_of(optimizer):
            if id(p) in self._narrow:
                gradient, p.grad = p.grad, None
                self._wide[id(p)], p.data = p.data, p.data.to(self._narrow[id(p)])
                p.grad = None if gradient is None else gradient.to(p.dtype)


def _nothing(optimizer: Optimizer) -> None: ...


def _clip(optimizer: Optimizer, bound: float) -> None:
    nn.utils.clip_grad_norm_(list(parameters_of(optimizer)), bound)


def _clear(optimizer: Optimizer) -> None:
    for p in parameters_of(optimizer):
        p.grad = None


def _never_clip() -> None:
    for owner in (nn.utils, nn.utils.clip_grad):
        inner = owner.clip_grad_norm_

        def clip_grad_norm_(
            parameters: Any, max_norm: Any, *args: Any, _inner: Any = inner, **options: Any
        ) -> Any:
            return _inner(parameters, float("inf"), *args, **options)

        owner.clip_grad_norm_ = clip_grad_norm_


def _around_steps(before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]) -> None:
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: before(optimizer))
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: after(optimizer))
