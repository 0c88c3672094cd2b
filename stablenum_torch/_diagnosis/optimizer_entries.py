"""What torch's optimizers keep for each parameter, by its role in the update."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum.diagnosis.audit import TORCH_ROLES, Role
from stablenum_torch._precision.float32_copies import Float32CopyOptimizer

__all__ = ["Entries", "entries_of", "formula_owner", "kind_of", "unwrapped"]

Entries = dict[str, tuple[Role, Tensor]]

# An update formula applies to the class and to subclasses that do not override ``step``, such as AdamW.
_FORMULAS: dict[type[Optimizer], str] = {
    torch.optim.Adam: "adam",
    torch.optim.NAdam: "nadam",
    torch.optim.RAdam: "radam",
    torch.optim.Adamax: "adamax",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
    torch.optim.SGD: "sgd",
    torch.optim.SparseAdam: "sparse adam",
    torch.optim.Adadelta: "adadelta",
}


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the state, from inside a guard, Accelerate's wrapper, and the like."""
    seen = {id(optimizer)}
    while not isinstance(optimizer, Float32CopyOptimizer):
        inner = getattr(optimizer, "inner", None) or getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or id(inner) in seen:
            return optimizer
        seen.add(id(inner))
        optimizer = inner
    return optimizer


def formula_owner(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose update formula applies: inside one that runs it in float32."""
    return optimizer.inner if isinstance(optimizer, Float32CopyOptimizer) else optimizer


def kind_of(optimizer: Optimizer) -> str:
    # The class's `step`, because schedulers patch the instance's; unwrapped, because torch wraps the class's
    # for its profiler when the first instance is made.
    step = inspect.unwrap(type(optimizer).step)
    for base, kind in _FORMULAS.items():
        if isinstance(optimizer, base) and step is inspect.unwrap(base.step):
            return kind
    return ""


def entries_of(p: Tensor, state: Mapping[str, Any], kind: str) -> tuple[Entries, dict[str, Tensor]]:
    """Return the entries of known meaning, in the parameter's shape, and the other floating-point tensors."""
    known: Entries = {}
    others: dict[str, Tensor] = {}
    for key, value in state.items():
        role = TORCH_ROLES.get(key, Role.SECOND if key == "sum" and kind == "adagrad" else None)
        # A compensation is an integer, so it is always finite; only its parameter can be poisoned.
        if not isinstance(value, Tensor) or not (
            value.is_floating_point() or value.is_complex() or role is Role.COMPENSATION
        ):
            continue
        if role is not None and value.shape == p.shape and value.layout == torch.strided:
            known[key] = (role, value)
        elif key != "step":
            others[key] = value
    return known, others
