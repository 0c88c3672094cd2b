"""The guard's state as persistent tensors: one storage, read by torch and by NumPy alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stablenum.guard import GuardState

__all__ = ["copy_into", "host_view", "moved_to"]


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if not isinstance(tree, tuple):
        return function(tree)
    leaves = [_map(function, leaf) for leaf in tree]
    return type(tree)(*leaves) if hasattr(tree, "_fields") else tuple(leaves)


def _leaves(tree: Any) -> list[Any]:
    return [leaf for part in tree for leaf in _leaves(part)] if isinstance(tree, tuple) else [tree]


def host_view(state: GuardState) -> GuardState:
    """NumPy arrays that share memory with a state of CPU tensors."""
    view: GuardState = _map(Tensor.numpy, state)
    return view


def copy_into(state: GuardState, values: GuardState) -> None:
    """Write ``values`` (tensors or NumPy arrays) into the tensors of ``state``.

    In place, so that CUDA graphs, compiled steps and views go on seeing the same memory.
    """
    for leaf, value in zip(_leaves(state), _leaves(values), strict=True):
        if isinstance(value, Tensor):
            leaf.copy_(value)
        else:
            np.copyto(leaf.numpy(), value)


def moved_to(state: GuardState, device: torch.device) -> GuardState:
    """A copy of the state on ``device``."""
    moved: GuardState = _map(lambda leaf: leaf.to(device), state)
    return moved
