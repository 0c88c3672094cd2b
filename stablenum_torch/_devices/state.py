"""The guard's state as persistent tensors: one storage, read by torch and by NumPy alike."""

from __future__ import annotations

import torch
from torch import Tensor

from stablenum.arrays import leaves, map_leaves
from stablenum.guard.decide import GuardState

__all__ = ["copy_into", "moved_to", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``. Only copies away from the host go on in the background.

    A copy to the host that nobody waits for would be read before it arrives.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def copy_into(state: GuardState, values: GuardState) -> None:
    """Write the tensors ``values`` into those of ``state``, in one launch for each format.

    In place, so that CUDA graphs, compiled steps and views go on seeing the same memory.
    """
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for leaf, value in zip(leaves(state), leaves(values), strict=True):
        if value is not leaf:  # what a step leaves alone
            into, of = by_dtype.setdefault(leaf.dtype, ([], []))
            into.append(leaf)
            of.append(value)
    for into, of in by_dtype.values():
        torch._foreach_copy_(into, of)


def moved_to(state: GuardState, device: torch.device) -> GuardState:
    """A copy of the state on ``device``."""
    return map_leaves(lambda leaf: leaf.to(device), state)
