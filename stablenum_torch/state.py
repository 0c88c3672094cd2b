"""The guard's state as persistent tensors: one storage, read by torch and by NumPy alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stablenum.guard import GuardState
from stablenum.trees import leaves, map_leaves

__all__ = ["copy_into", "host_view", "moved_to", "to_device"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``. Only copies away from the host go on in the background.

    A copy to the host that nobody waits for would be read before it arrives.
    """
    return tensor.to(device, non_blocking=device.type != "cpu")


def host_view(state: GuardState) -> GuardState:
    """NumPy arrays that share memory with a state of CPU tensors."""
    return map_leaves(Tensor.numpy, state)


def copy_into(state: GuardState, values: GuardState) -> None:
    """Write ``values`` (tensors or NumPy arrays) into the tensors of ``state``.

    In place, so that CUDA graphs, compiled steps and views go on seeing the same memory.
    """
    tensors = []
    for leaf, value in zip(leaves(state), leaves(values), strict=True):
        if isinstance(value, Tensor):
            tensors.append((leaf, value))
        else:
            np.copyto(leaf.numpy(), value)
    _copy_together(tensors)


def _copy_together(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first, in one launch for each format."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for leaf, value in pairs:
        if value is not leaf:  # what a step leaves alone
            by_dtype.setdefault(leaf.dtype, []).append((leaf, value))
    for members in by_dtype.values():
        torch._foreach_copy_([leaf for leaf, _ in members], [value for _, value in members])


def moved_to(state: GuardState, device: torch.device) -> GuardState:
    """A copy of the state on ``device``."""
    return map_leaves(lambda leaf: leaf.to(device), state)
