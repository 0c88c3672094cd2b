"""Run a step as ``torch.compile`` has compiled it, for the rounding of the compiled code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["is_compiled", "with_arrays"]


def is_compiled(loss_fn: Callable[..., Any], modules: Iterable[nn.Module]) -> bool:
    """Return whether the function, a function that it names or a module is compiled."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(map(_marked, _named_by(loss_fn))) or any(
        _marked(part) for module in modules for part in module.modules()
    )


def _marked(x: Any) -> bool:
    if isinstance(x, nn.Module):
        return hasattr(x, "_orig_mod") or x._compiled_call_impl is not None
    return callable(x) and "_torchdynamo_orig_callable" in getattr(x, "__dict__", {})


def _named_by(function: Any) -> list[Any]:
    try:
        named = inspect.getclosurevars(function)
    except TypeError:  # a partial, or an object with __call__
        return [function, getattr(function, "func", None)]
    return [function, *named.nonlocals.values(), *named.globals.values()]


def with_arrays(tensors: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
    """Write arrays into the tensors of these names."""
    with torch.no_grad():
        for name, array in arrays.items():
            if name in tensors:
                tensors[name].copy_(torch.as_tensor(array).reshape(tensors[name].shape))
