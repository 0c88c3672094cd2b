"""State dicts as trees: copied to the host, and brought back to the devices of those they are for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from stablenum_torch._devices.ranks import is_dtensor

__all__ = ["brought_back", "copied_tree"]


def copied_tree(tree: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy that shares nothing with ``tree``: its tensors ``copied``, the rest deeply copied.

    DTensors stay where they are, because only a program of all ranks can take them to the host and back.
    """
    if isinstance(tree, Tensor):
        return tree.detach().clone() if is_dtensor(tree) else copied(tree)
    if isinstance(tree, dict):
        made = copy.copy(tree)  # of the same class, with its attributes
        made.update({key: copied_tree(value, copied) for key, value in tree.items()})
        return made
    if type(tree) in (list, tuple):
        return type(tree)(copied_tree(value, copied) for value in tree)
    return copy.deepcopy(tree)


def brought_back(tree: Any, like: Any) -> Any:
    """Return a copy of ``tree`` with tensors on the devices of those at the same places in ``like``."""
    if isinstance(tree, Tensor):
        at_home = isinstance(like, Tensor) and not is_dtensor(tree)
        return tree.to(like.device, copy=True) if at_home else tree.clone()
    if isinstance(tree, dict):
        known = like if isinstance(like, Mapping) else {}
        made = copy.copy(tree)
        made.update({key: brought_back(value, known.get(key)) for key, value in tree.items()})
        return made
    if type(tree) in (list, tuple):
        same = type(like) is type(tree) and len(like) == len(tree)
        pairs = zip(tree, like if same else [None] * len(tree), strict=True)
        return type(tree)(brought_back(value, its) for value, its in pairs)
    return copy.deepcopy(tree)
