"""Fused optimizers, which divide gradients and skip a step in their own kernel.

torch's fused Adam, AdamW, SGD and (from 2.12 on) Adagrad read the attributes ``grad_scale`` and
``found_inf`` of the optimizer in ``step()``. The kernel divides each gradient by ``grad_scale``, and returns
early if ``found_inf`` is exactly 1, so the host need not know whether the step is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from stablenum._support.interrupts import and_then
from stablenum_torch._devices.direct_step import Factors, direct_step

__all__ = [
    "can_skip_on_device",
    "forgets_elements",
    "is_fused",
    "moves_nothing",
    "moves_other_elements",
    "step_folded",
]

_FUSED = frozenset(("SGD", "Adam", "AdamW", "Adagrad"))  # torch's optimizers with such kernels


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernel takes ``grad_scale`` and ``found_inf``."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # The attribute reflects the constructor's arguments. A step follows the groups, which may have changed
    # since then, because a state dict was loaded or a group was added.
    sgd = isinstance(optimizer, torch.optim.SGD)  # of both, torch's SGD takes `foreach`
    return all(g.get("fused") and not (sgd and g.get("foreach")) for g in optimizer.param_groups)


def forgets_elements(optimizer: Optimizer) -> torch.dtype | None:
    """Return the format of parameters on a CPU that the optimizer's fused kernel does not move; else None.

    torch 2.13's SGD moves only the last elements of 16-bit parameters, those that do not fill a vector. This
    is tried out, because other versions may do better.
    """
    if not isinstance(optimizer, torch.optim.SGD) or not is_fused(optimizer) or is_in_torch_dispatch_mode():
        return None
    formats = {p.dtype for group in optimizer.param_groups for p in group["params"] if p.is_cpu}
    return next((dtype for dtype in formats if not _sgd_moves_all(dtype)), None)


@functools.cache
def _sgd_moves_all(dtype: torch.dtype) -> bool:
    ones = torch.ones(64, dtype=dtype, device="cpu")
    moved = ones.clone()
    factors = {"lr": 0.5, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "fused": True}
    sgd([moved], [ones], [None], **factors, **flags)
    return bool((moved != ones).all())


def moves_other_elements(optimizer: Optimizer) -> Tensor | None:
    """Return a parameter on a CPU that the optimizer's fused kernel moves by the wrong elements of its
    gradient, because that lies in memory in another order; None if there is none.

    torch 2.13's fused kernels for the CPU walk through the memory of both. This is tried out, too.
    """
    if not is_fused(optimizer) or is_in_torch_dispatch_mode():
        return None
    params = (p for group in optimizer.param_groups for p in group["params"] if p.is_cpu)
    found = next((p for p in params if p.grad is not None and _in_other_order(p, p.grad)), None)
    kind = next((one.__name__ for one in type(optimizer).__mro__ if one.__name__ in _FUSED), None)
    return None if found is None or kind is None or _moves_same(kind) else found


def _in_other_order(p: Tensor, grad: Tensor) -> bool:
    plain = p.layout == grad.layout == torch.strided and p.numel() > 1
    return plain and p.stride() != grad.stride()


@functools.cache
def _moves_same(kind: str) -> bool:
    """Return whether a fused step is the same for a gradient in another order in memory."""
    moved, values = [], torch.arange(64.0, device="cpu").view(8, 8)
    for grad in (values, values.t().contiguous().t()):
        w = torch.zeros(8, 8, device="cpu", requires_grad=True)
        w.grad = grad
        getattr(torch.optim, kind)([w], lr=0.1, fused=True).step()
        moved.append(w.detach())
    return torch.equal(*moved)


def step_folded(
    optimizer: Optimizer,
    *,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    applied: Tensor | None = None,
    then: Callable[[], None] | None = None,
) -> None:
    """Call ``optimizer.step()``, which divides gradients by ``divisor``, or does nothing if ``found_inf`` is
    1; then call ``then``.

    The attributes are removed afterwards, even if the step raises, because a leftover ``found_inf`` would
    skip every later step.

    Args:
        optimizer: the inner optimizer.
        divisor: () float32, or None.
        found_inf: () float32, or None.
        applied: 1 - ``found_inf``, if it is known.
        then: completes a step whose parameters have moved. Once ``optimizer.step()`` has returned, it is
            called whatever happens (Ctrl-C), a second time if an exception stopped the first call.
    """

    # This is not a context manager, because torch.compile would break the graph around one. The attributes
    # are removed inside the `try`: in a `finally`, an interrupt could come before its first line.
    def complete() -> None:
        _remove_factors(optimizer, divisor, found_inf)
        if then is not None:
            then()

    known = found_inf is None or applied is not None
    direct = direct_step(optimizer, Factors(divisor, found_inf, applied)) if known else None
    try:
        if divisor is not None and direct is None:
            optimizer.grad_scale = divisor
        if found_inf is not None and direct is None:
            optimizer.found_inf = found_inf
        and_then(direct or optimizer.step, complete)
    except BaseException:
        _remove_factors(optimizer, divisor, found_inf)
        raise


def _remove_factors(optimizer: Optimizer, divisor: Tensor | None, found_inf: Tensor | None) -> None:
    """Remove what this step has set, but not an attribute of the user's optimizer with such a name."""
    if divisor is not None and "grad_scale" in optimizer.__dict__:
        del optimizer.grad_scale
    if found_inf is not None and "found_inf" in optimizer.__dict__:
        del optimizer.found_inf


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Return whether a fused step may be skipped by the flag alone, after preparing fused SGD for that.

    torch's fused SGD allocates its momentum buffer uninitialised, and the kernel of the first step fills it.
    If that step is skipped, the buffer keeps whatever was in memory. Without dampening a zero buffer gives
    the same first step (0 x momentum + g), so it is created here. With dampening the first steps have to be
    decided on the host.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    for group in optimizer.param_groups:
        if not group["momentum"]:
            continue
        for p in group["params"]:
            if p.grad is None or optimizer.state[p].get("momentum_buffer") is not None:
                continue
            if group["dampening"]:
                return False
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
    return True


def moves_nothing(optimizer: Optimizer) -> bool:
    """Return whether every learning rate is 0, as far as the host knows without asking a device.

    torch's checkpointing takes such a step on zero gradients to create the optimizer's state. It is no
    evidence that the loss scale may grow.
    """
    if torch.compiler.is_compiling():
        return False  # a tensor's value is not known while tracing
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    return bool(rates) and all((not isinstance(lr, Tensor) or lr.is_cpu) and lr == 0 for lr in rates)
