"""The parameters that an optimizer is about to change, their sizes, and what is known of its step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from stablenum_torch._diagnosis.replay.collectives import local_of
from stablenum_torch._diagnosis.replay.tensor_memory import is_freed
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["StepFrames", "largest", "parameters_of", "rate_of", "will_skip"]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return all parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)]


def largest(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest magnitude of each tensor on this rank. The host waits once per device and format."""
    found = [0.0] * len(tensors)
    tensors = [local_of(t) for t in tensors]
    groups: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        if (
            t.layout is torch.strided
            and t.is_floating_point()
            and not t.is_meta
            and t.numel()
            and not is_freed(t)
        ):
            groups.setdefault((t.device, t.dtype), []).append(i)
    for members in groups.values():
        sizes = torch.stack([t.amax() for t in torch._foreach_abs([tensors[i].detach() for i in members])])
        for i, size in zip(members, sizes.double().tolist(), strict=True):
            found[i] = size
    return found


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

    def are_nested(self, frame: FrameType) -> bool:
        """Return whether the step that runs in this frame is a part of another."""
        self._known.add(frame.f_code)
        outer = frame.f_back
        while outer is not None and outer.f_code not in self._known:
            outer = outer.f_back
        return outer is not None
