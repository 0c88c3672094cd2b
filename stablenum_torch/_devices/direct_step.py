"""Call torch's fused kernels without the part of ``Optimizer.step`` that gathers their arguments.

Half of a fused step of small tensors is Python: in every step torch looks up the state of each parameter, and
sorts all tensors by format and device. Where nothing but torch's own code would run, the same kernel is
called here with the same arguments, so that the result is the same in every bit. Anything else (a subclass, a
hook, a ``step`` that was replaced, a sparse gradient, a parameter without one) takes ``Optimizer.step``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = ["direct_step", "is_observed"]

_Group: TypeAlias = Mapping[str, Any]
_State: TypeAlias = Sequence[Mapping[str, Any]]
# Calls a kernel for a group: with its parameters, their gradients and states, and a divisor. What may be
# lacking is read before anything is changed.
_Kernel: TypeAlias = Callable[[_Group, list[Tensor], list[Tensor], _State, Tensor | None], Callable[[], None]]


def direct_step(optimizer: Optimizer, divisor: Tensor | None) -> Callable[[], None] | None:
    """Return what does the same as ``optimizer.step()`` on a CPU; None if that must be called.

    Args:
        optimizer: any. None is returned for all but torch's own with a fused kernel.
        divisor: () float32, by which the kernel divides the gradients, or None.
    """
    kind = type(optimizer)
    if kind not in _KERNELS or not _only_torch(optimizer):
        return None
    groups, states = optimizer.param_groups, list(optimizer.state.values())
    having = [p for group in groups if _has_state(kind, group) for p in group["params"]]
    # The first step makes the state, in another order if some parameters get their first gradient later.
    if len(states) != len(having) or not all(map(is_, optimizer.state, having)):
        return None
    calls, begin = list[Callable[[], None]](), 0
    for group in groups:
        end = begin + (len(group["params"]) if _has_state(kind, group) else 0)
        call = _call(kind, group, states[begin:end], divisor)
        if call is None:
            return None
        calls.append(call)
        begin = end
    if not _agrees(kind.__name__):
        return None

    def step() -> None:
        if "step" in optimizer.__dict__:  # a scheduler's, which counts
            optimizer._opt_called = True
        for call in calls:
            call()

    return step


def _has_state(kind: type, group: _Group) -> bool:
    return kind is not SGD or bool(group["momentum"])


def _call(kind: type, group: _Group, states: _State, divisor: Tensor | None) -> Callable[[], None] | None:
    """Return the call of the kernel for a group; None if torch does more than to call it once."""
    params: list[Tensor] = group["params"]
    if not params:
        return _nothing
    grads = [p.grad for p in params]
    if not {*map(type, params), *map(type, grads)} <= _PLAIN:
        return None
    formats, devices = ({*map(get, params), *map(get, grads)} for get in _FORMAT_AND_DEVICE)
    plain = len(formats) == 1 and devices == {_CPU} and next(iter(formats)).is_floating_point
    if not plain or {*map(_LAYOUT, grads)} != {torch.strided}:
        return None
    if not group.get("fused") or group.get("differentiable"):
        return None
    try:
        return _KERNELS[kind](group, params, grads, states, divisor)
    except (KeyError, AttributeError):  # a state that torch has yet to complete; another version of torch
        return None


_PLAIN = {Tensor, torch.nn.Parameter}
_CPU = torch.device("cpu")
_FORMAT_AND_DEVICE = attrgetter("dtype"), attrgetter("device")
_LAYOUT = attrgetter("layout")


def _nothing() -> None:
    """Step a group without parameters."""


# --- whether nothing but torch's own code would run ---------------------------------------------------------


def _only_torch(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step()`` would run torch's own code alone, unobserved."""
    step = optimizer.__dict__.get("step")
    return (
        (step is None or _counts(step))
        and _is_torchs(type(optimizer).step)
        and not is_observed(optimizer)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and not torch.overrides._is_torch_function_mode_enabled()
    )


def is_observed(optimizer: Optimizer) -> bool:
    """Return whether a hook or a profiler looks at the steps of an optimizer."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()
    )


def _counts(step: Any) -> bool:
    """Return whether a ``step`` of an optimizer is the one that a scheduler of torch's has put there."""
    code = getattr(step, "__code__", None)
    return code is not None and code.co_filename == lr_scheduler.__file__ and _is_torchs(step.__wrapped__)


@functools.lru_cache(maxsize=64)
def _is_torchs(function: Callable[..., Any]) -> bool:
    """Return whether a function and all that it wraps are written in ``torch.optim``."""
    while True:
        code = getattr(function, "__code__", None)
        if code is None or Path(code.co_filename).parent != Path(torch_optimizer.__file__).parent:
            return False
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            return True
        function = inner


@functools.cache
def _agrees(name: str) -> bool:
    """Return whether two steps are the same in every bit, the second of which calls the kernel directly.

    The kernels are private, so that another version of torch may call them in another way.
    """
    try:
        kind = getattr(torch.optim, name)
        return torch.equal(_two_steps(kind, direct=False), _two_steps(kind, direct=True))
    except (AssertionError, AttributeError, RuntimeError, TypeError):  # another version's
        return False


def _two_steps(kind: Any, *, direct: bool) -> Tensor:
    w = torch.linspace(-1.0, 1.0, 8, device="cpu").requires_grad_()
    optimizer = kind([w], lr=0.1, weight_decay=0.1, fused=True, **({"momentum": 0.9} if kind is SGD else {}))
    w.grad = torch.linspace(1.0, 3.0, 8, device="cpu")
    optimizer.step()
    divisor = torch.full((), 4.0, device="cpu")
    if direct:
        call = _call(kind, optimizer.param_groups[0], [optimizer.state[w]], divisor)
        assert call is not None
        call()
    else:
        optimizer.grad_scale = divisor
        optimizer.step()
    return torch.cat([w.detach(), *(v.reshape(-1) for v in optimizer.state[w].values())])


# --- the kernels --------------------------------------------------------------------------------------------


def _adam(
    group: _Group, params: list[Tensor], grads: list[Tensor], states: _State, divisor: Tensor | None
) -> Callable[[], None]:
    beta1, beta2 = group["betas"]
    if isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        raise KeyError("torch reads betas that are tensors")
    steps = [s["step"] for s in states]
    moments = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    largest = [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else []
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    settings = {k: group[k] for k in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}

    def call() -> None:
        torch._foreach_add_(steps, 1)
        kernel(
            params, grads, *moments, largest, steps,
            beta1=beta1, beta2=beta2, **settings, grad_scale=divisor, found_inf=None,
        )  # fmt: skip

    return call


def _sgd(
    group: _Group, params: list[Tensor], grads: list[Tensor], states: _State, divisor: Tensor | None
) -> Callable[[], None]:
    buffers = [s["momentum_buffer"] for s in states] if group["momentum"] else []
    if any(buffer is None for buffer in buffers):
        raise KeyError("torch makes the buffers")
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    settings = {k: group[k] for k in names}
    return functools.partial(
        torch._fused_sgd_, params, grads, buffers,
        **settings, is_first_step=False, grad_scale=divisor, found_inf=None,
    )  # fmt: skip


def _adagrad(
    group: _Group, params: list[Tensor], grads: list[Tensor], states: _State, divisor: Tensor | None
) -> Callable[[], None]:
    steps, sums = [s["step"] for s in states], [s["sum"] for s in states]
    settings = {k: group[k] for k in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}

    def call() -> None:
        torch._foreach_add_(steps, 1)
        torch._fused_adagrad_(
            params, grads, sums, steps, **settings, grad_scale=divisor, found_inf=None
        )  # fmt: skip

    return call


_KERNELS: dict[type, _Kernel] = {Adam: _adam, AdamW: _adam, SGD: _sgd, Adagrad: _adagrad}
