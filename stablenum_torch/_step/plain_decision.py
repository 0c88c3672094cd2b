"""Decide a step on a device with torch's own operations, which a compiler may merge."""

from __future__ import annotations

from typing import NamedTuple

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor

from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum.guard.observation import Fault
from stablenum_torch._devices.device_law import decide_on_device
from stablenum_torch._step.observe import Measured, observation

__all__ = ["Decided", "decided_without_wait"]


class Decided(NamedTuple):
    """What a step on a device goes on with.

    Attributes:
        reason: () int32, see :class:`stablenum.Reason`; None if the state has it already.
        multiplier, unit_multipliers: as in :class:`stablenum.Decision`.
        after: the next state; None if it has been written already.
        divisor, skip: () float32, what fused kernels take: 1 / multiplier, and exactly 1 or 0, because the
            kernels compare it with 1.
        applied: () float32, 1 - ``skip``; None if it is not known without another operation.
    """

    reason: Tensor | None
    multiplier: Tensor
    unit_multipliers: tuple[Tensor, ...]
    after: GuardState | None
    divisor: Tensor
    skip: Tensor
    applied: Tensor | None = None


def decided_without_wait(
    config: GuardConfig, still: bool, state: GuardState, measured: Measured, fault: Fault | None = None
) -> Decided:
    """Return what is decided, and what follows from it.

    This is everything between the measurement and the optimizer's step, so that it compiles as one function.

    Args:
        config: the settings.
        still: whether the step moves nothing, see ``moves_nothing``.
        state: the guard's tensors.
        measured: what was measured.
        fault: what else forbids the step.
    """
    seen = observation(measured)
    if fault is not None:
        seen = seen._replace(fault=fault)
    decision, after = decide_on_device(config, still, state, seen, xp=torch_namespace)
    return Decided(
        reason=decision.reason,
        multiplier=decision.multiplier,
        unit_multipliers=decision.unit_multipliers,
        after=after,
        divisor=1.0 / decision.multiplier,
        skip=torch.logical_not(decision.apply).float(),
    )
