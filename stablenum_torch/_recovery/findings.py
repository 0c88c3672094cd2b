"""What is bad in the state of a run: a non-finite parameter, buffer or moment; and what is measured of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stablenum.diagnosis.audit import Role
from stablenum.diagnosis.audit.entry_roles import TORCH_ROLES
from stablenum.recovery.parameters import Measures
from stablenum.recovery.symptoms import Finding, SymptomCode
from stablenum_torch._devices.finiteness import which_are_finite
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._diagnosis.optimizer_entries import unwrapped
from stablenum_torch._recovery.modules import inside, tensors_of
from stablenum_torch._recovery.optimizers import parameters_of

__all__ = ["Search", "nonfinite"]


class Search:
    """Searches the state of a model and its optimizer for values that end a training.

    Buffers, and parameters that are not trained, which were not finite at the beginning are left out: masks
    of -inf, and the extremes that observers of quantisation begin with.

    Args:
        model: the model.
        optimizer: its optimizer, guarded or not.
        others: other things with a state, by name, of which modules are searched too.

    Attributes:
        modules: the modules that are searched, by what is put in front of the names in them.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, others: Mapping[str, Any] | None = None
    ) -> None:
        self._model, self._optimizer = inside(model), optimizer
        modules = {name: inside(m) for name, m in (others or {}).items() if isinstance(m, nn.Module)}
        self.modules = {"": self._model} | {f"{name}.": module for name, module in modules.items()}
        trained = {id(p) for p in parameters_of(optimizer)}
        untrained = {name: t for name, t in self._held().items() if id(t) not in trained}
        self._left_out = frozenset(nonfinite(untrained))

    def findings(self) -> list[Finding]:
        """Return what is not finite."""
        bad = self.nonfinite()
        return [Finding(SymptomCode.NONFINITE_STATE, _detail(bad), tuple(bad))] if bad else []

    def nonfinite(self) -> list[str]:
        """Return the names of the parameters, buffers and moments that are not finite."""
        return nonfinite(self._tensors())

    @torch.no_grad()
    def measures(self) -> dict[str, Measures]:
        """Return what is measured of each parameter, of this rank's part; one wait for each device."""
        state, found = unwrapped(self._optimizer).state, {}
        for name, p in self._named_parameters().items():
            values = _values(p)
            if values is not None:
                norm = torch.linalg.vector_norm(values.float() if values.itemsize < 4 else values).double()
                found[name] = torch.stack([norm, *_moments(state.get(p, {}), norm)])
        return {name: Measures(*measured) for name, measured in _read(found).items()}

    def _held(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of all modules."""
        return {p + name: t for p, module in self.modules.items() for name, t in tensors_of(module).items()}

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: t for name, t in self._held().items() if name not in self._left_out}
        known = {id(t) for t in found.values()}
        names = {id(p): name for name, p in self._named_parameters().items()}
        for p in parameters_of(self._optimizer):
            if id(p) not in known:
                found[names[id(p)]] = p
        state = unwrapped(self._optimizer).state
        for p in parameters_of(self._optimizer):
            for key, value in state.get(p, {}).items():
                if isinstance(value, Tensor):
                    found[f"{key} of {names[id(p)]}"] = value
        return found

    def _named_parameters(self) -> dict[str, Tensor]:
        """Return the optimizer's parameters by the model's names, or by the optimizer's if it has others."""
        names = {id(t): name for name, t in self._model.named_parameters()}
        own = getattr(self._optimizer, "parameter_names", None)
        params = parameters_of(self._optimizer)
        others = own() if callable(own) else [f"parameter {i}" for i in range(len(params))]
        return {names.get(id(p), other): p for p, other in zip(params, others, strict=True)}


def _moments(entries: Mapping[str, Any], norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lowest and the largest second moment and the ratio, as in ``Measures``."""
    by_role = {TORCH_ROLES[key]: _values(v) for key, v in entries.items() if key in TORCH_ROLES}
    first, second = by_role.get(Role.FIRST), by_role.get(Role.SECOND)
    none = torch.zeros_like(norm)
    lowest = [v.min().to(norm) for role, v in by_role.items() if role.squared and v is not None]
    if second is None:
        return torch.stack([none, *lowest]).min(), none, none
    alike = first is not None and first.shape == second.shape
    return (
        torch.stack([none, *lowest]).min(),
        second.max().to(norm),
        _ratio(first, second).to(norm) if alike else none,
    )


def _ratio(first: Tensor, second: Tensor) -> Tensor:
    wide = second if second.dtype == torch.float64 else second.float()
    usable = wide.masked_fill(wide <= _floor(second.dtype), math.inf)
    return usable.rsqrt_().mul_(first).abs_().max()


def _floor(dtype: torch.dtype) -> float:
    return 1e10 * torch.finfo(dtype).tiny if dtype != torch.float16 else 1e-3


def _read(numbers: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Return tensors as floats; the host waits once for each device."""
    of_device: dict[torch.device, list[str]] = {}
    for name, number in numbers.items():
        of_device.setdefault(number.device, []).append(name)
    read = {d: torch.stack([numbers[n] for n in names]).tolist() for d, names in of_device.items()}
    return {name: value for d, names in of_device.items() for name, value in zip(names, read[d], strict=True)}


def _detail(names: Sequence[str]) -> str:
    if len(names) == 1:
        return "1 tensor of the state is not finite"
    return f"{len(names)} tensors of the state are not finite"


@torch.no_grad()
def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors with a value that is not finite; the host waits once for each device.

    Of a sharded tensor, only this rank's part is read.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        values = _values(tensor)
        if values is not None:
            alike.setdefault((values.device, values.dtype), []).append((name, values))
    flags: dict[torch.device, list[tuple[list[str], Tensor]]] = {}
    for (device, _), pairs in alike.items():
        finite = which_are_finite([values for _, values in pairs])
        flags.setdefault(device, []).append(([name for name, _ in pairs], ~finite))
    bad: set[str] = set()
    for found in flags.values():
        names = [name for group, _ in found for name in group]
        read = torch.cat([flag for _, flag in found]).tolist()
        bad |= {name for name, flag in zip(names, read, strict=True) if flag}
    return [name for name in tensors if name in bad]


def _values(tensor: Any) -> Tensor | None:
    """Return the real values; None if there are none, or they are whole numbers."""
    values = local_part(tensor).detach()
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.layout is torch.sparse_coo else values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point() or not values.numel():
        return None
    return values
