"""The parameters that an optimizer is about to change, their sizes, and what is known of its step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from stablenum_torch._devices.finiteness import magnitudes
from stablenum_torch._diagnosis.replay.collectives import local_of
from stablenum_torch._diagnosis.replay.tensor_memory import is_freed
from stablenum_torch._diagnosis.watch.by_hand import finite
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["StepFrames", "largest", "parameters_of", "rate_of", "will_skip"]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)]


def largest(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest magnitude of each tensor on this rank: NaN or inf if the tensor is not finite, and 0
    if it is but cannot be measured. The host waits once per device and format."""
    found = [0.0] * len(tensors)
    groups: dict[Any, dict[int, torch.Tensor]] = {}
    for i, t in enumerate(map(local_of, tensors)):
        if t.is_floating_point() and t.layout is torch.strided and _has_values(t):
            groups.setdefault((t.device, t.dtype), {})[i] = t
        elif not finite(t):
            found[i] = math.nan
    for members in groups.values():
        for i, size in zip(members, magnitudes(list(members.values())), strict=True):
            found[i] = size
    return found


def _has_values(tensor: torch.Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.is_meta and not is_freed(tensor)


def rate_of(optimizer: torch.optim.Optimizer | None) -> float | None:
    """Return the highest learning rate of an optimizer."""
    rates = [] if optimizer is None else [group.get("lr") for group in optimizer.param_groups]
    return max((float(rate) for rate in rates if rate is not None), default=None)


def will_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step with bad gradients is expected and will be skipped, because a loss scale is still
    being sought."""
    found = getattr(optimizer, "found_inf", None)
    if found is not None and bool(found):
        return True
    return isinstance(optimizer, GuardedOptimizer) and optimizer.loss_scale > 1.0


class StepFrames:
    """Tells steps that are parts of others, as in a guard and other wrappers of optimizers."""

    def __init__(self) -> None:
        self._known: set[CodeType] = set()  # the code of the functions that take steps
        self._nested: dict[int, bool] = {}  # by the id of the frame in which a step runs

    def begins_nested(self, frame: FrameType) -> bool:
        """Return whether the step that begins in this frame is a part of another."""
        self._known.add(frame.f_code)
        outer = frame.f_back if self._nested else None  # no other step has begun and not ended
        while outer is not None and outer.f_code not in self._known:
            outer = outer.f_back
        self._nested[id(frame)] = outer is not None
        return outer is not None

    def ends_nested(self, frame: FrameType) -> bool:
        """Return whether the step that ends in this frame is a part of another."""
        return self._nested.pop(id(frame), False)
