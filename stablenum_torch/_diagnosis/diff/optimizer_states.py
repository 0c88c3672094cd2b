"""The state of an optimizer as arrays by parameter and role, and an optimizer that begins with one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum.diagnosis.diff.sides.play import COUNT, Moments
from stablenum_torch._diagnosis.optimizer_entries import entries_of, formula_owner, kind_of, unwrapped

__all__ = ["begin_with", "kept_by"]


def kept_by(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[tuple[str, str], Any]:
    """Return what an optimizer keeps of its steps: (parameter, role) -> array of NumPy.

    An entry that has no role of the audit, such as NAdam's ``mu_product``, has its key as its role. If two
    entries have one role, both are left out. Nothing is returned for an optimizer that has taken no step,
    although Adagrad makes its entries before the first.
    """
    inner = unwrapped(optimizer)
    found: dict[tuple[str, str], Any] = {}
    for name, p in parameters.items():
        for role, key in _keys(inner, p, inner.state.get(p, {})).items():
            found[name, role] = torch.as_tensor(inner.state[p][key]).detach().cpu().double().numpy()
    counts = [int(x) for (_, role), x in found.items() if role == COUNT]
    return {} if counts and not any(counts) else found


def _keys(optimizer: Optimizer, p: Tensor, state: Mapping[str, Any]) -> dict[str, str]:
    """Return the key of each role."""
    entries, others = entries_of(p, state, kind_of(formula_owner(optimizer)))
    roles = [role for role, _ in entries.values()]
    keys = {str(role): key for key, (role, _) in entries.items() if roles.count(role) == 1}
    return {**keys, **{key: key for key in others}, **({COUNT: "step"} if "step" in state else {})}


def begin_with(optimizer: Optimizer, parameters: Mapping[str, Tensor], *, moments: Moments | None) -> None:
    """Put an optimizer at its beginning or, with ``moments``, where another optimizer stands.

    A parameter for which an entry is missing begins with the first step, and so does one with an entry of
    another shape than its own, such as Adafactor's sums over rows.
    """
    inner = unwrapped(optimizer)
    begun: defaultdict[Any, Any] = defaultdict(dict)
    for name, p in parameters.items():
        state = None if moments is None else _state_of(inner, p, name, moments)
        if state is not None:
            begun[p] = state
    inner.state = begun


def _state_of(optimizer: Optimizer, p: Tensor, name: str, moments: Moments) -> dict[str, Any] | None:
    """Return the state of a parameter, in the form of a first step; None if an entry cannot be had."""
    first = _first_state(optimizer, p)
    keys = _keys(optimizer, p, first)
    if any(torch.as_tensor(first[key]).shape not in ((), p.shape) for key in keys.values()):
        return None
    arrays = {role: moments(name, role) for role in keys}
    if not arrays or any(x is None for x in arrays.values()):
        return None
    for role, key in keys.items():
        own = first[key]
        value = torch.as_tensor(arrays[role]).reshape(torch.as_tensor(own).shape)
        first[key] = value.to(own) if isinstance(own, Tensor) else type(own)(value.item())
    return first


def _first_state(optimizer: Optimizer, p: Tensor) -> dict[str, Any]:
    """Return what an optimizer of this kind keeps of a parameter after its first step.

    Where the optimizer has taken steps, its own state shows it; otherwise a step of another one does, from a
    gradient of zero.
    """
    if optimizer.state.get(p):
        return dict(optimizer.state[p])
    group = next((g for g in optimizer.param_groups if any(q is p for q in g["params"])), None)
    if group is None or not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return {}
    scratch = torch.nn.Parameter(torch.zeros_like(p))
    scratch.grad = torch.zeros_like(p)
    other = type(optimizer)([{**group, "params": [scratch]}], **_required(optimizer))
    other.step()
    return dict(other.state[scratch])


def _required(optimizer: Optimizer) -> dict[str, Any]:
    """Return the arguments without which an optimizer cannot be made."""
    return {"lr": optimizer.defaults["lr"]} if "lr" in optimizer.defaults else {}
