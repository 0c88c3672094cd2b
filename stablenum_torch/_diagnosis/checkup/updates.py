"""What a step has done with parameters, and the settings with which it was taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor

from stablenum.diagnosis.checkup.course import ParameterSeen, measure_update
from stablenum_torch._diagnosis.audit import value_of

__all__ = ["copies_of", "is_measurable", "parameters_seen", "settings_of", "wide"]

_SETTINGS = ("lr", "weight_decay", "eps", "momentum", "maximize")


def is_measurable(p: Tensor) -> bool:
    """Return whether a parameter's numbers can be read and compared."""
    number = p.is_floating_point() or p.is_complex()
    return p.layout is torch.strided and number and not p.is_meta and p.numel() > 0


def copies_of(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer | None) -> dict[int, Tensor]:
    """Return copies of the parameters before a step, by id; in float32 if the optimizer keeps them so."""
    return {id(p): _value(p, optimizer).detach().clone() for p in parameters if is_measurable(p)}


def _value(p: Tensor, optimizer: torch.optim.Optimizer | None) -> Tensor:
    return p if optimizer is None else value_of(optimizer, p)


def parameters_seen(
    groups: Sequence[Mapping[str, Any]],
    before: Mapping[int, Tensor],
    names: Mapping[int, tuple[str, str]],
    optimizer: torch.optim.Optimizer | None,
) -> tuple[ParameterSeen, ...]:
    """Return what a step has done with the parameters that require a gradient.

    Args:
        groups: parameter groups.
        before: what :func:`copies_of` returned before the step; other parameters are left out.
        names: id of a parameter -> its role and name.
        optimizer: what has taken the step; without a step, only the gradients are known.
    """
    seen = []
    own = [(p, group.get("lr")) for group in groups for p in group["params"] if isinstance(p, Tensor)]
    for i, (p, rate) in enumerate((p, rate) for p, rate in own if is_measurable(p) and p.requires_grad):
        if id(p) not in before:
            continue
        gradient = torch.zeros_like(p) if p.grad is None else _dense(p.grad)
        value = _value(p, optimizer)
        before_after = [wide(t.detach()) for t in (before[id(p)], value, gradient)]
        numbers = measure_update(*before_after, xp=torch_namespace).tolist()
        one = ParameterSeen(
            names.get(id(p), ("", f"parameter {i}"))[1],
            tuple(p.shape),
            str(value.dtype).removeprefix("torch."),
            math.nan if rate is None else float(rate),
            p.grad is not None,
            *(numbers if optimizer is not None else _without_step(numbers)),
        )
        seen.append(one._replace(optimizer=_mover_of(p, optimizer)))
    return tuple(seen)


def _mover_of(p: Tensor, optimizer: torch.optim.Optimizer | None) -> str:
    """Return what moves a parameter: the name of the optimizer's class; "momentum" where an optimizer that
    treats its groups in several ways, as Muon with AdamW for the rest does, keeps no second moment."""
    kind = kind_of(optimizer)
    state = {} if optimizer is None else optimizer.state.get(p, {})
    averages = [k for k, t in state.items() if isinstance(t, Tensor) and t.shape == p.shape and p.ndim]
    return "momentum" if len(averages) == 1 and "sq" not in averages[0] else kind


def wide(t: Tensor) -> Tensor:
    """Return a tensor in float64; the real and imaginary parts of complex numbers along one more axis."""
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double()


def _without_step(numbers: list[float]) -> list[float]:
    """Return the numbers without those that compare the parameter after the step."""
    return [*numbers[:3], *[math.nan] * 3, numbers[6], math.nan]


def kind_of(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the name of the class of an optimizer, or of that which a guard wraps; "" for none."""
    return "" if optimizer is None else type(getattr(optimizer, "inner", optimizer)).__name__


def settings_of(optimizer: torch.optim.Optimizer) -> tuple[str, dict[str, float]]:
    """Return the name of an optimizer's class, without a guard, and its settings that are numbers."""
    known = {k: optimizer.defaults.get(k) for k in _SETTINGS}
    return kind_of(optimizer), {k: float(v) for k, v in known.items() if isinstance(v, (int, float))}


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient with an element for each of the parameter's."""
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient
