"""Try a cure: change a running PyTorch training in one way, and leave all else as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stablenum.diagnosis.checkup.remedies import Change, Remedy
from stablenum_torch._diagnosis.watch.optimizers import parameters_of
from stablenum_torch._diagnosis.watch.script_recorder import existing_modules
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["apply", "before_first_step"]

_NARROW = (torch.float16, torch.bfloat16)


def apply(remedy: Remedy, applied: Callable[[], None]) -> None:
    """Change all optimizer steps from now on.

    Args:
        remedy: what is tried.
        applied: called when something is changed.
    """
    if remedy.change is Change.NO_CLIP:
        _never_clip(applied)
    elif remedy.change is Change.FLOAT32:
        masters = _Masters(applied)
        _around_steps(masters.widen, masters.narrow)
    elif remedy.change is Change.CLIP:
        _around_steps(lambda o: _clip(o, remedy.number, applied), _nothing)
    elif remedy.change is Change.CLEAR:
        _around_steps(_nothing, lambda o: _clear(o, applied))
    elif remedy.change in _SETTINGS:
        name, new = _SETTINGS[remedy.change]
        settings = _Settings(name, lambda old: new(old, remedy.number), applied)
        _around_steps(settings.change, settings.restore)


def before_first_step(
    remedy: Remedy, names: Mapping[int, tuple[str, str]], applied: Callable[[], None]
) -> None:
    """Draw parameters afresh, or standardise what a layer reads.

    Args:
        remedy: what is tried.
        names: id of a parameter -> its role and name.
        applied: called when something is changed.
    """
    modules = existing_modules()
    if remedy.change is Change.INITIALISE:
        generator = torch.Generator("cpu").manual_seed(0)
        own = {names[id(p)][1]: p for module in modules for p in module.parameters() if id(p) in names}
        with torch.no_grad():
            for name in (n for n in remedy.deviations if n in own):  # in this order, as numbers are drawn
                drawn = torch.randn(own[name].shape, generator=generator, device="cpu")
                own[name].copy_(remedy.deviations[name] * drawn)
                applied()
    elif remedy.change is Change.SCALE_INPUT:
        for module in modules:
            known = [names[id(p)][1] for p in module._parameters.values() if p is not None and id(p) in names]
            if set(known) & set(remedy.deviations):
                module.register_forward_pre_hook(_Standardise(applied))


class _Standardise:
    """Gives a layer inputs of mean 0 and standard deviation 1, by the statistics of the first batch."""

    def __init__(self, applied: Callable[[], None]) -> None:
        self._statistics: tuple[Tensor, Tensor] | None = None
        self._applied = applied

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return None
        x, *others = args
        if self._statistics is None:
            # Of a convolution all channels together, of other layers each feature by itself.
            whole = isinstance(module, nn.modules.conv._ConvNd)
            columns = tuple(range(x.ndim if whole else x.ndim - 1))
            deviation = x.detach().std(dim=columns, correction=0, keepdim=True)
            self._statistics = (
                x.detach().mean(dim=columns, keepdim=True),
                deviation.clamp(min=1e-12),
            )  # a constant stays one
            self._applied()
        mean, deviation = self._statistics
        return (x - mean) / deviation, *others


class _Settings:
    """Changes a setting of all parameter groups for the time of each step."""

    def __init__(self, name: str, new: Callable[[Any], Any], applied: Callable[[], None]) -> None:
        self._name, self._new, self._applied = name, new, applied
        self._old: dict[int, list[tuple[dict[str, Any], Any]]] = {}  # by the optimizer's id

    def change(self, optimizer: Optimizer) -> None:
        groups = [g for g in optimizer.param_groups if isinstance(g.get(self._name), (int, float, Tensor))]
        self._old[id(optimizer)] = [(group, group[self._name]) for group in groups]
        for group in groups:
            group[self._name] = self._new(group[self._name])
            self._applied()

    def restore(self, optimizer: Optimizer) -> None:
        for group, old in self._old.pop(id(optimizer), []):
            group[self._name] = old


_SETTINGS: dict[Change, tuple[str, Callable[[Any, float], Any]]] = {
    Change.RATE: ("lr", lambda old, factor: old * factor),
    Change.EPS: ("eps", lambda old, eps: eps),
    Change.NO_DECAY: ("weight_decay", lambda old, _: 0.0),
}


class _Masters:
    """Keeps a float32 copy of each 16-bit parameter, with which the optimizer steps."""

    def __init__(self, applied: Callable[[], None]) -> None:
        self._applied = applied
        self._wide: dict[int, Tensor] = {}
        self._narrow: dict[int, torch.dtype] = {}

    def widen(self, optimizer: Optimizer) -> None:
        for p in parameters_of(optimizer):
            if p.dtype in _NARROW:
                self._applied()
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


def _clip(optimizer: Optimizer, bound: float, applied: Callable[[], None]) -> None:
    nn.utils.clip_grad_norm_(list(parameters_of(optimizer)), bound)
    applied()


def _clear(optimizer: Optimizer, applied: Callable[[], None]) -> None:
    for p in parameters_of(optimizer):
        p.grad = None
        applied()


def _never_clip(applied: Callable[[], None]) -> None:
    for owner in (nn.utils, nn.utils.clip_grad):
        inner = owner.clip_grad_norm_

        def clip_grad_norm_(
            parameters: Any, max_norm: Any, *args: Any, _inner: Any = inner, **options: Any
        ) -> Any:
            applied()
            return _inner(parameters, float("inf"), *args, **options)

        owner.clip_grad_norm_ = clip_grad_norm_


def _around_steps(before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]) -> None:
    """Call functions around each optimizer's step; of a guarded one, around that of the optimizer inside."""

    def unless_guard(function: Callable[[Optimizer], None]) -> Callable[..., None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not isinstance(optimizer, GuardedOptimizer):
                function(optimizer)

        return hook

    register_optimizer_step_pre_hook(unless_guard(before))
    register_optimizer_step_post_hook(unless_guard(after))
