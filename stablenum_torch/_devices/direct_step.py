"""Call torch's fused kernels without the part of ``Optimizer.step`` that gathers their arguments.

Half of a fused step of small tensors is Python: in every step torch looks up the state of each parameter, and
sorts all tensors by format and device. Where torch would call one kernel for each group and nobody looks, the
same kernel is called here with the same arguments, so that the result is the same in every bit. Anything else
takes ``Optimizer.step``: a subclass, a ``step`` that was replaced, a hook, a profiler of this thread, a mode
of torch (``torch.set_default_device`` is one), a sparse gradient, a parameter without one.
"""

from __future__ import annotations

import functools
import os.path
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from stablenum_torch._devices.waits import capturing

__all__ = ["Factors", "direct_step", "is_observed"]

_Group: TypeAlias = Mapping[str, Any]
_Call: TypeAlias = Callable[[], object]
_OF_TORCH = {Tensor, torch.nn.Parameter}
_CPU = torch.device("cpu")
_FOLDER = os.path.dirname(torch_optimizer.__file__)
_dtype, _device, _layout = attrgetter("dtype"), attrgetter("device"), attrgetter("layout")
_is_cpu = attrgetter("is_cpu")


class Factors(NamedTuple):
    """What a step of fused kernels depends on besides gradients and settings; () float32 each.

    Attributes:
        divisor: by which the kernel divides the gradients; None for 1.
        skip: 1 if the step is skipped, otherwise 0; None if it is not.
        applied: 1 - ``skip``; None without it.
    """

    divisor: Tensor | None = None
    skip: Tensor | None = None
    applied: Tensor | None = None


class _Lists(NamedTuple):
    """What a kernel takes of a group."""

    params: list[Tensor]
    grads: list[Tensor | None]  # all there once `_call` has looked
    states: Sequence[Mapping[str, Any]]
    factors: Factors


def direct_step(optimizer: Optimizer, factors: Factors) -> Callable[[], None] | None:
    """Return what does the same as ``optimizer.step()``; None if that must be called.

    Args:
        optimizer: any. None is returned for all but torch's own with a fused kernel.
        factors: what torch reads of the optimizer's attributes ``grad_scale`` and ``found_inf``. torch counts
            a skipped step and then takes it back; with ``applied`` it is not counted.
    """
    kind = type(optimizer)
    groups = optimizer.param_groups
    if torch.compiler.is_compiling() or kind not in _KERNELS or not all(g.get("fused") for g in groups):
        return None
    if not _only_torch(optimizer) or capturing():
        return None
    calls = []
    state, params = optimizer.state, [p for group in groups for p in group["params"]]
    # The first step makes the states in the order of the parameters, if all of them have gradients then.
    alike = len(state) == len(params) and all(map(is_, state, params))
    states = list(state.values()) if alike else [state.get(p, {}) for p in params]
    begin, device = 0, _CPU
    for group in groups:
        own = list(group["params"])
        if not own:
            continue
        call = _call(
            kind, group, _Lists(own, [p.grad for p in own], states[begin : begin + len(own)], factors)
        )
        if call is None:
            return None
        calls.append(call)
        begin, device = begin + len(own), own[0].device
    if not _agrees(kind, device):  # type: ignore[arg-type]  # every class is hashable
        return None

    def step() -> None:
        if "step" in optimizer.__dict__:  # a scheduler's, which counts
            optimizer._opt_called = True
        for call in calls:
            call()

    return step


def _call(kind: type, group: _Group, lists: _Lists) -> _Call | None:
    """Return the call of the kernel for a group; None if torch does more than to call it once."""
    params, grads = lists.params, lists.grads
    if not {*map(type, params), *map(type, grads)} <= _OF_TORCH or group.get("differentiable"):
        return None
    dtypes, devices = {*map(_dtype, params), *map(_dtype, grads)}, {*map(_device, params)}
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point or len(devices) > 1:
        return None
    device, rate = params[0].device, group["lr"]
    given = [factor for factor in lists.factors if factor is not None]
    if isinstance(rate, Tensor):  # torch moves one to the device of the parameters
        given.append(rate)
    if {*map(_layout, grads)} != {torch.strided} or not {*map(_device, given)} <= {device}:
        return None
    if device.type not in ("cpu", "cuda") or (lists.factors.skip is None) != (lists.factors.applied is None):
        return None
    try:
        return _KERNELS[kind](group, lists)
    except (KeyError, AttributeError):  # a state that torch has yet to make; another version of torch
        return None


# --- whether nothing but torch's own code would run ---------------------------------------------------------


def _only_torch(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step()`` would run torch's own code alone, with nobody looking."""
    step = optimizer.__dict__.get("step")
    return (
        (step is None or _counts(step))
        and _is_torchs(type(optimizer).step)
        and not is_observed(optimizer)
        and type(optimizer.state) in (dict, defaultdict)
        # What a GradScaler has left there.
        and getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
        and not torch.is_grad_enabled()
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


def _is_torchs(function: Any) -> bool:
    """Return whether a function and all that it wraps are written in ``torch.optim``."""
    if function in _KNOWN:
        return True
    part = function
    while part is not None:
        code = getattr(part, "__code__", None)
        if code is None or os.path.dirname(code.co_filename) != _FOLDER:
            return False
        part = getattr(part, "__wrapped__", None)
    _KNOWN.append(function)
    return True


_KNOWN: list[Any] = []  # functions that have been looked at; one for each class, or a few


@functools.cache
def _agrees(kind: Any, device: torch.device) -> bool:
    """Return whether steps are the same in every bit, all but the first of which call the kernel directly.

    The kernels are private, so that another version of torch may call them in another way.
    """
    try:
        return torch.equal(_steps(kind, device, direct=False), _steps(kind, device, direct=True))
    except (AssertionError, AttributeError, RuntimeError, TypeError):  # another version's
        return False


def _steps(kind: Any, device: torch.device, *, direct: bool) -> Tensor:
    """Return the parameter and its state after an ordinary step, one with a divisor, one that may be skipped
    and is not, and one that is."""
    values = [-1.0, 2.0], [1.0, 3.0], 4.0, 1.0, 0.0
    w, grad, divisor, one, zero = (torch.tensor(x, dtype=torch.float32, device=device) for x in values)
    optimizer = kind([w], lr=0.1, weight_decay=0.1, fused=True, **({"momentum": 0.9} if kind is SGD else {}))
    w.grad = grad
    optimizer.step()
    for factors in (Factors(divisor), Factors(divisor, zero, one), Factors(divisor, one, zero)):
        if direct:
            call = _call(kind, optimizer.param_groups[0], _Lists([w], [grad], [optimizer.state[w]], factors))
            assert call is not None
            call()
        else:
            optimizer.grad_scale, optimizer.found_inf = divisor, factors.skip
            optimizer.step()
    return torch.cat([w, *(v.reshape(-1) for v in optimizer.state[w].values())])


# --- the kernels --------------------------------------------------------------------------------------------


def _count_step(steps: list[Tensor], applied: Tensor | None) -> None:
    """Add 1 to counts of steps, () float32 each, or ``applied``.

    On a CPU, torch adds to one after the other, which takes longer than the step of small tensors. A sum of
    float64 is the same when it is rounded to float32.
    """
    if applied is not None or not all(map(_is_cpu, steps)):
        torch._foreach_add_(steps, 1 if applied is None else applied)
        return
    for step in steps:
        count = step.numpy()
        count[()] = count.item() + 1


def _adam(group: _Group, lists: _Lists) -> _Call | None:
    params, grads, states, (divisor, skip, applied) = lists
    beta1, beta2 = group["betas"]
    steps = [s["step"] for s in states]
    if isinstance(beta1, Tensor) or isinstance(beta2, Tensor) or {*map(_dtype, steps)} != {torch.float32}:
        return None
    moments = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    largest = [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else []
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    settings = {k: group[k] for k in ("amsgrad", "lr", "weight_decay", "eps", "maximize")}

    def call() -> None:
        _count_step(steps, applied)
        kernel(
            params, grads, *moments, largest, steps,
            beta1=beta1, beta2=beta2, **settings, grad_scale=divisor, found_inf=skip,
        )  # fmt: skip

    return call


def _sgd(group: _Group, lists: _Lists) -> _Call | None:
    params, grads, states, (divisor, skip, _) = lists
    buffers = [s["momentum_buffer"] for s in states] if group["momentum"] else []
    if group["foreach"] or any(buffer is None for buffer in buffers):
        return None
    names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
    settings = {k: group[k] for k in names}
    return functools.partial(
        torch._fused_sgd_, params, grads, buffers,
        **settings, is_first_step=False, grad_scale=divisor, found_inf=skip,
    )  # fmt: skip


def _adagrad(group: _Group, lists: _Lists) -> _Call | None:
    params, grads, states, (divisor, skip, applied) = lists
    steps, sums = [s["step"] for s in states], [s["sum"] for s in states]
    if {*map(_dtype, steps)} != {torch.float32}:
        return None
    settings = {k: group[k] for k in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}

    def call() -> None:
        _count_step(steps, applied)
        torch._fused_adagrad_(
            params, grads, sums, steps, **settings, grad_scale=divisor, found_inf=skip
        )  # fmt: skip

    return call


_KERNELS: dict[type, Callable[[_Group, _Lists], _Call | None]] = {
    Adam: _adam,
    AdamW: _adam,
    SGD: _sgd,
    Adagrad: _adagrad,
}
