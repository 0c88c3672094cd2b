"""Casts of nested values and of a module's parameters."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from stablenum.precision.policy import Policy, parse_format, wider

__all__ = ["cast_floating", "cast_module", "dtype_of", "narrowed", "running_statistics"]

Value = TypeVar("Value")


def dtype_of(format: str) -> torch.dtype:  # noqa: A002
    """Return torch's dtype for a format's name."""
    found: torch.dtype = getattr(torch, format)
    return found


def cast_floating(value: Value, dtype: torch.dtype) -> Value:
    """Return the value with its floating-point tensors in ``dtype``; the rest, and the structure, are
    unchanged.

    The cast descends into tuples, named tuples, lists, mappings and dataclasses. Integer, bool, complex and
    8-bit tensors, numbers and other objects stay as they are; a container with nothing to cast is returned
    unchanged. Gradients flow through. Values beyond the format's range become inf, as in any cast.

    Example:
        >>> x = cast_floating({"x": torch.ones(2), "n": torch.arange(2)}, torch.bfloat16)
        >>> x["x"].dtype, x["n"].dtype
        (torch.bfloat16, torch.int64)
    """
    found: Any = _cast(value, dtype)
    return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype.itemsize > 1 else value
    if isinstance(value, (tuple, list)):
        parts = [_cast(part, dtype) for part in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        changed = {key: _cast(part, dtype) for key, part in value.items()}
        changed = {key: part for key, part in changed.items() if part is not value[key]}
        if not changed:
            return value
        made: Any = copy.copy(value)
        for key, part in changed.items():
            made[key] = part
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: _cast(part, dtype) for name, part in fields.items()}
        changed = {name: part for name, part in changed.items() if part is not fields[name]}
        if not changed:
            return value
        made = copy.copy(value)
        for name, part in changed.items():
            object.__setattr__(made, name, part)  # works for frozen dataclasses too
        return made
    return value


def cast_module(model: torch.nn.Module, policy: Policy) -> None:
    """Cast parameters in place to the policy's format for parameters, module by module.

    Parameters stay the same objects, so optimizers and tied weights keep working. Floating-point buffers get
    the wider of their module's formats for parameters and for computing; running statistics are never
    narrowed.
    """
    done: set[int] = set()
    for path, module in model.named_modules():
        here = policy.at(path)
        for p in module._parameters.values():
            if p is not None and id(p) not in done:
                done.add(id(p))
                p.data = cast_floating(p.data, dtype_of(here.params))
                if p.grad is not None:
                    p.grad = cast_floating(p.grad, dtype_of(here.params))
        kept = wider(here.params, here.carrier)
        statistics = running_statistics(module)
        if statistics is not None:
            kept = wider(kept, parse_format(statistics.dtype))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = cast_floating(buffer, dtype_of(kept))


def running_statistics(module: torch.nn.Module) -> Tensor | None:
    """Return the running mean of a batch or instance norm; None for a module without one."""
    return module.running_mean if isinstance(module, _NormBase) else None


def narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``wide`` to nearest in ``dtype``. NaN and inf pass through; finite values stay finite."""
    top = torch.finfo(dtype).max
    return torch.where(torch.isfinite(wide), wide.clamp(-top, top), wide).to(dtype)
