"""The guard's state as tensors that keep their memory from step to step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stablenum.arrays import leaves, map_leaves
from stablenum.guard.decide import GuardState

__all__ = ["copy_into", "in_memory_of", "moved_to", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on ``device``. Copies to a device are asynchronous; copies to the host are not.

    An asynchronous copy to the host might be read before it is complete.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def copy_into(state: GuardState, values: GuardState) -> None:
    """Write the tensors ``values`` into those of ``state``, in one launch per dtype.

    They are written in place, so that CUDA graphs, compiled steps and views keep using the same memory.
    """
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for leaf, value in zip(leaves(state), leaves(values), strict=True):
        if value is not leaf:  # a step leaves some tensors unchanged
            into, of = by_dtype.setdefault(leaf.dtype, ([], []))
            into.append(leaf)
            of.append(value)
    for into, of in by_dtype.values():
        torch._foreach_copy_(into, of)


def in_memory_of(before: Any, after: Any) -> Any:
    """Return the state ``after`` with the tensors of ``before`` wherever those fit.

    No value is copied yet. What the user or a compiled step holds of ``before`` stays alive that way.
    """
    if isinstance(after, Tensor):
        fits = isinstance(before, Tensor) and before.shape == after.shape and before.dtype == after.dtype
        return before if fits else after
    if type(before) is not type(after):
        return after
    missing = [None] * (len(after) - len(before))  # of several rules, those that were added
    parts = map(in_memory_of, [*before, *missing], after)
    return type(after)(*parts) if hasattr(after, "_fields") else tuple(parts)


def moved_to(state: GuardState, device: torch.device) -> GuardState:
    """Return a copy of the state on ``device``."""
    return map_leaves(lambda leaf: leaf.to(device), state)
