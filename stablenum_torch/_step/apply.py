"""Apply a decision to the gradients in place, where no fused kernel of the optimizer does it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum.guard.decide import Decision
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.norms import dense_values
from stablenum_torch._step.measure.units import unit_factor

__all__ = ["gradients_to_change", "multiply_gradients", "shift_gradients", "transform", "transform_gradients"]


def gradients_to_change(optimizer: Optimizer, params: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients that ``optimizer`` uses: those of the parameters, or float32 copies that it keeps.

    An optimizer that widens the gradients of narrow parameters has a method ``wide_gradients``. In 16 bits,
    small gradients divided by a loss scale would flush to zero.
    """
    widened = getattr(optimizer, "wide_gradients", None)
    return [p.grad for p in params] if widened is None else widened(params)


def transform_gradients(
    grads: Sequence[Tensor], multipliers: Sequence[Tensor], max_value: float | None
) -> None:
    """Multiply the gradients in place, then clamp their elements to [-max_value, max_value].

    Args:
        grads: dense, sparse, complex or sharded; not None.
        multipliers: float32, one per gradient, () or of a shape that broadcasts over the gradient; the same
            tensor object for all gradients if they have one factor.
        max_value: the bound, or None for none. Real and imaginary parts are clamped separately.
    """
    if not grads:
        return  # all gradients are on other ranks
    grads = [_plain(local_part(g)) for g in grads]
    shared = all(factor is multipliers[0] for factor in multipliers)
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for g, factor in zip(grads, multipliers, strict=True):
        factor = factor.to(g.device)
        if g.dtype in (torch.float16, torch.bfloat16):
            # A factor of 2**-16 is subnormal in float16, and on some devices torch rounds the factor to the
            # gradient's format.
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


def multiply_gradients(params: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply the gradients of parameters in place by a () float32 factor."""
    grads = [p.grad for p in params if p.grad is not None]
    with torch.no_grad():
        transform_gradients(grads, [factor] * len(grads), None)


def _plain(grad: Tensor) -> Tensor:
    """Return the gradient or, if it is lazily conjugated, the underlying tensor: real factors and bounds act
    on both alike."""
    return grad.conj() if grad.is_complex() and grad.is_conj() else grad


def _for_stored(factor: Tensor, grad: Tensor) -> Tensor:
    """Return the factor in a shape that broadcasts over the result of :func:`_stored_values`."""
    if not factor.ndim:
        return factor
    if grad.layout != torch.strided:
        factor = factor.expand(grad.shape)[tuple(grad.coalesce().indices())]
    return factor.unsqueeze(-1) if grad.is_complex() else factor


def _stored_values(grad: Tensor) -> Tensor:
    """Return the real values that a gradient stores; writing to them writes to the gradient."""
    if grad.layout != torch.strided:
        grad.copy_(grad.coalesce())  # several entries for one element are summed first
    return dense_values(grad)


def transform(
    grads: Sequence[Tensor | None],
    inputs: StepInputs,
    multiplier: Tensor,
    of_units: Sequence[Tensor],
    *,
    unchanged: Sequence[bool],
    clamp: bool = True,
) -> None:
    """Multiply the gradients in place, and clamp them if there is a bound.

    Args:
        grads: what :func:`gradients_to_change` returned; a second call would make copies afresh.
        inputs: the settings and the parameters.
        multiplier: () or (n,), as in :class:`stablenum.Decision`.
        of_units: the factors of units, as ``unit_multipliers`` in that class.
        unchanged: which gradients are known to have a factor of 1.
        clamp: whether to clamp.
    """
    config, params = inputs.config, inputs.params
    max_value = config.max_value if clamp else None
    # Unbound rather than indexed, because an index made on the host would have to be copied to the device.
    each = list(multiplier.unbind()) if config.per_tensor else [multiplier] * len(params)
    for i, factors in enumerate(of_units):
        if config.unit_rule is not None and len(factors):
            each[i] = unit_factor(config.unit_rule, factors, params[i])
    chosen = [
        (grad, factor)
        for grad, factor, same in zip(grads, each, unchanged, strict=True)
        if grad is not None and (max_value is not None or not same)
    ]
    transform_gradients([g for g, _ in chosen], [factor for _, factor in chosen], max_value)


def shift_gradients(grads: Sequence[Tensor | None], inputs: StepInputs, decision: Decision) -> None:
    """Multiply the gradients in place by the decision's powers of two, if one of them is not 1.

    Args:
        grads, inputs: as for :func:`transform`.
        decision: its arrays are in the host's memory.
    """
    shifts = [np.asarray(decision.shift), *map(np.asarray, decision.unit_shifts)]
    if not any(shift.any() for shift in shifts):
        return
    unchanged = [False] * len(grads)
    # In two halves, because float32 does not hold the powers below -126.
    for part in ([s // 2 for s in shifts], [s - s // 2 for s in shifts]):
        whole, *of_units = (torch.from_numpy(np.asarray(np.ldexp(1.0, half))) for half in part)
        transform(grads, inputs, whole, of_units, unchanged=unchanged, clamp=False)
