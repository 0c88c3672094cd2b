"""Buffers that a forward pass leaves NaN although no step is taken with its batch: running statistics of
normalisations, averages, copies of parameters."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stablenum_torch._diagnosis.replay.tensor_memory import is_freed
from stablenum_torch._diagnosis.watch.by_hand import unwrapped
from stablenum_torch._diagnosis.watch.script_recorder import existing_modules

__all__ = ["Buffers", "Poisoned"]

# So many searches for modules, each of which takes a tenth of a second, are made after bad losses.
_MOST_SEARCHES = 20
_isnan = torch.isnan  # the original, not the watched one


class Poisoned(NamedTuple):
    """A buffer with NaN, and the outermost module that has it."""

    name: str
    tensor: Tensor
    module: nn.Module

    @property
    def still(self) -> bool:
        """Whether the module's buffer of this name, which may be another tensor by now, has NaN."""
        now = dict([*self.module.named_buffers(), *self.module.named_parameters()]).get(self.name)
        return now is not None and _has_nan(now)

    def trained(self, stepped: Set[int]) -> bool:
        """Return whether its module has any of these parameters, which are given by id."""
        return any(id(p) in stepped for p in self.module.parameters())


class Buffers:
    """Finds the buffers that have become NaN.

    Attributes:
        searches: how many searches for modules are left.
    """

    def __init__(self) -> None:
        self._from_the_start: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets the id
        self.searches = _MOST_SEARCHES

    def note_start(self) -> None:
        """Note those that have NaN before training, such as markers of missing values."""
        self._from_the_start |= {id(b.tensor): b.tensor for b in _with_nan(set())}

    def poisoned(self, stepped: Set[int]) -> list[Poisoned]:
        """Return those that have become NaN.

        Args:
            stepped: ids of the parameters that optimizers change.
        """
        if self.searches <= 0:
            return []
        self.searches -= 1
        return [b for b in _with_nan(stepped) if id(b.tensor) not in self._from_the_start]


def _with_nan(stepped: Set[int]) -> list[Poisoned]:
    """Return buffers, and parameters that no optimizer changes, with NaN."""
    found: dict[int, Poisoned] = {}
    for module in existing_modules():
        own = any(id(p) in stepped for p in module.parameters())
        copies = [] if own else [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
        for name, tensor in [*module.named_buffers(), *copies]:
            known = found.get(id(tensor))
            if (known is None or len(name) > len(known.name)) and _has_nan(tensor):
                found[id(tensor)] = Poisoned(name, tensor, module)
    return list(found.values())


def _has_nan(tensor: Tensor) -> bool:
    tensor = unwrapped(tensor).detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return False
    return tensor.layout is torch.strided and not is_freed(tensor) and bool(_isnan(tensor).any())
