"""Apply: carry out a decision on torch gradients and the optimizer that the user chose.

Fused optimizers (Adam, AdamW, SGD, Adagrad) take a divisor and a skip flag into their own kernel:
``optimizer.step`` reads the attributes ``grad_scale`` and ``found_inf``, the kernel divides each
gradient by the one and returns early if the other is exactly 1. The rest of the optimizers get
their gradients multiplied in place first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum.guard.config import GuardConfig
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._step.measure import dense_values
from stablenum_torch._step.measure_units import unit_factor

__all__ = [
    "can_skip_on_device",
    "gradients_to_change",
    "is_fused",
    "moves_nothing",
    "one_factor",
    "step_folded",
    "transform",
    "transform_gradients",
]


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer's kernel takes ``grad_scale`` and ``found_inf``."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # The attribute tells of the constructor. What a step does is up to the groups, and loading a state
    # dict or adding a group may have changed them since.
    return all(group.get("fused") for group in optimizer.param_groups)


def step_folded(optimizer: Optimizer, *, divisor: Tensor | None, found_inf: Tensor | None) -> None:
    """``optimizer.step()`` that divides gradients by ``divisor`` and skips if ``found_inf`` is 1.

    Both are () float32 or None. The attributes are removed afterwards, also when the step raises: a
    left-over ``found_inf`` would skip every later step.
    """
    # Not a context manager: torch.compile would break the graph around it.
    try:
        if divisor is not None:
            optimizer.grad_scale = divisor
        if found_inf is not None:
            optimizer.found_inf = found_inf
        optimizer.step()
    finally:
        if divisor is not None:
            del optimizer.grad_scale
        if found_inf is not None:
            del optimizer.found_inf


def can_skip_on_device(optimizer: Optimizer) -> bool:
    """Whether a fused step may be skipped by flag alone; prepares fused SGD for it.

    torch's fused SGD allocates a momentum buffer without contents and lets the kernel of the first
    step fill it: if that step is skipped, the buffer keeps whatever was in memory. A zero buffer
    gives the same first step (0 x momentum + g) if there is no dampening; with dampening the first
    steps have to be decided on the host.
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
    """Whether every learning rate is 0, as far as the host knows without asking a device.

    torch's checkpointing steps so on zero gradients, to create the optimizer's state. Such a step is
    not evidence that the loss scale may grow.
    """
    if torch.compiler.is_compiling():
        return False  # a tensor's value is not known while tracing
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    return bool(rates) and all((not isinstance(lr, Tensor) or lr.is_cpu) and lr == 0 for lr in rates)


def gradients_to_change(optimizer: Optimizer, params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients that ``optimizer`` steps on: the parameters', or float32 ones of its own.

    An optimizer that widens the gradients of narrow parameters says so by ``wide_gradients``: divided by a
    loss scale in 16 bits, they would flush to zero.
    """
    widened = getattr(optimizer, "wide_gradients", None)
    return [p.grad for p in params] if widened is None else widened(params)


def transform_gradients(
    grads: Sequence[Tensor], multipliers: Sequence[Tensor], max_value: float | None
) -> None:
    """Multiply the gradients in place, then clamp their elements to [-max_value, max_value].

    Args:
        grads: dense, sparse, complex or sharded; not None.
        multipliers: float32, one a gradient, () or of a shape that broadcasts over it; all the same
            tensor if one serves all.
        max_value: the bound, or None for none. Real and imaginary parts are clamped apart.
    """
    if not grads:
        return  # another rank holds them all
    grads = [_plain(local_part(g)) for g in grads]
    shared = all(factor is multipliers[0] for factor in multipliers)
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for g, factor in zip(grads, multipliers, strict=True):
        factor = factor.to(g.device)
        if g.dtype in (torch.float16, torch.bfloat16):
            # A factor of 2**-16 is hardly a number in float16, and on some devices torch rounds the
            # factor to the gradient's format.
            values = _stored_values(g)
            values.copy_(values.float() * _for_stored(factor, g))
        elif factor.ndim:
            _stored_values(g).mul_(_for_stored(factor, g))
        else:
            tensors, factors = by_device.setdefault(g.device, ([], []))
            tensors.append(g)
            factors.append(factor)
    for tensors, factors in by_device.values():
        torch._foreach_mul_(tensors, factors[0] if shared else factors)
    if max_value is not None:
        for g in grads:
            values = _stored_values(g)
            bound = min(max_value, torch.finfo(values.dtype).max)
            values.clamp_(-bound, bound)


def _plain(grad: Tensor) -> Tensor:
    """The gradient, or, if it is conjugated lazily, the memory under it: factors and bounds are real."""
    return grad.conj() if grad.is_complex() and grad.is_conj() else grad


def _for_stored(factor: Tensor, grad: Tensor) -> Tensor:
    """The factor in a shape that broadcasts over what :func:`_stored_values` gives."""
    if not factor.ndim:
        return factor
    if grad.layout != torch.strided:
        factor = factor.expand(grad.shape)[tuple(grad.coalesce().indices())]
    return factor.unsqueeze(-1) if grad.is_complex() else factor


def _stored_values(grad: Tensor) -> Tensor:
    """The real values that a gradient stores; writing to them writes to the gradient."""
    if grad.layout != torch.strided:
        grad.copy_(grad.coalesce())  # entries of one element are summed first
    return dense_values(grad)


def one_factor(config: GuardConfig) -> bool:
    """Whether one factor serves all gradients, with no bound on each element."""
    return not config.per_tensor and config.unit_rule is None and config.max_value is None


def transform(
    optimizer: Optimizer,
    config: GuardConfig,
    params: Sequence[Tensor],
    multiplier: Tensor,
    of_units: Sequence[Tensor],
    *,
    unchanged: Sequence[bool],
) -> None:
    """Multiply the gradients in place, and clamp them if there is a bound.

    ``of_units``: as in :class:`Decision`. ``unchanged``: which gradients are known to have a factor of 1.
    """
    # Unbound, not indexed: an index made on the host would have to be copied to the device first.
    each = list(multiplier.unbind()) if config.per_tensor else [multiplier] * len(params)
    for i, factors in enumerate(of_units):
        if config.unit_rule is not None and len(factors):
            each[i] = unit_factor(config.unit_rule, factors, params[i].shape)
    grads = gradients_to_change(optimizer, params)
    chosen = [
        (grad, factor)
        for grad, factor, same in zip(grads, each, unchanged, strict=True)
        if grad is not None and (config.max_value is not None or not same)
    ]
    transform_gradients([g for g, _ in chosen], [factor for _, factor in chosen], config.max_value)
