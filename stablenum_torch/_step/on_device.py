"""One guarded step where the parameters lie on an accelerator: nothing of it comes to the host.

The host waits only for an optimizer that cannot skip by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from stablenum.formats import FLOAT32_MAX
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import Decision, GuardState, Observation, decide, select
from stablenum.rules.clipping import Units
from stablenum_torch._devices.compiled_decide import fewer_kernels
from stablenum_torch._devices.state import to_device
from stablenum_torch._devices.waits import wait_for_bool
from stablenum_torch._step.apply import (
    can_skip_on_device,
    is_fused,
    moves_nothing,
    one_factor,
    step_folded,
    transform,
)
from stablenum_torch._step.clip_update import before_update, clip_update_on_device
from stablenum_torch._step.measure import gradient_norms_on_device, saturated
from stablenum_torch._step.measure_elements import Extremes, extremes_on_device
from stablenum_torch._step.measure_units import units_on_device

__all__ = [
    "Measured",
    "decided_on_device",
    "in_float32",
    "measured_on_device",
    "observation",
    "step_on_device",
]


def step_on_device(
    optimizer: Optimizer,
    config: GuardConfig,
    state: GuardState,
    params: Sequence[Tensor],
    loss: Tensor | None,
    process_group: ProcessGroup | None,
    included: Sequence[bool],
) -> GuardState:
    device = state.step.device
    measured = measured_on_device(config, params, loss, device, process_group, included)
    still = moves_nothing(optimizer)
    if config.unit_rule is None:
        decide_fast = fewer_kernels(decided_on_device, config, still, on=state.step, shape=len(params))
        decided = decide_fast(state, measured)
    else:  # each unit would be operations of its own, and compiling take minutes
        decided = decided_on_device(config, still, state, measured)
    decision, after, divisor, found_inf = decided
    if not (is_fused(optimizer) and can_skip_on_device(optimizer)):
        if not wait_for_bool(decision.apply):
            return after
        found_inf = None
    rule = config.update_rule
    copied = None if rule is None else before_update(rule, optimizer)
    if not (config.changes_gradients and is_fused(optimizer) and one_factor(config)):
        divisor = None
    if config.changes_gradients and divisor is None:
        unchanged, of_units = [False] * len(params), decision.unit_multipliers
        transform(optimizer, config, params, decision.multiplier, of_units, unchanged=unchanged)
    step_folded(optimizer, divisor=divisor, found_inf=found_inf)
    if rule is not None and copied is not None:
        clip_update_on_device(rule, copied, device, process_group)
    return after


class Measured(NamedTuple):
    """What is measured on a device, before the small arithmetic that makes an ``Observation`` of it.

    Attributes:
        norms: (n,) float64, see ``wide_norms_on_device``; or float32 with units.
        loss: () the loss in its own format, or None.
        units: as in ``Observation``.
        extremes: what loss-scale rules ask for.
    """

    norms: Tensor
    loss: Tensor | None
    units: Units | None
    extremes: Extremes


def measured_on_device(
    config: GuardConfig,
    params: Sequence[Tensor],
    loss: Tensor | None,
    device: torch.device,
    process_group: ProcessGroup | None,
    included: Sequence[bool],
) -> Measured:
    units = None
    if config.unit_rule is None:
        norms = gradient_norms_on_device(params, device, process_group)
    else:
        norms, units = units_on_device(config.unit_rule, params, included, device)
    return Measured(
        norms=norms,
        loss=None if loss is None else to_device(loss, device),
        units=units,
        extremes=extremes_on_device(params, device, config.needs, process_group),
    )


def decided_on_device(
    config: GuardConfig, still: bool, state: GuardState, measured: Measured
) -> tuple[Decision, GuardState, Tensor, Tensor]:
    """The decision, the next state, and what fused kernels take: a divisor and a flag for a skip, () float32.

    All that lies between the measurement and the optimizer's step, so that it can be compiled as one.
    ``still``: the step moves nothing.
    """
    seen = observation(measured)
    decision, after = decide(config, state, seen, xp=torch_namespace)
    if still:
        after = _without_trace(decision, state, after)
    # Exactly 1. or 0.: the kernels compare with 1.
    return decision, after, 1.0 / decision.multiplier, torch.logical_not(decision.apply).float()


def observation(measured: Measured) -> Observation:
    amax, tiny = measured.extremes.joined()
    return Observation(
        norms=saturated(measured.norms),
        loss=None if measured.loss is None else in_float32(measured.loss),
        units=measured.units,
        amax=amax,
        tiny=tiny,
    )


def in_float32(loss: Tensor) -> Tensor:
    """The loss in float32; a finite float64 beyond its range saturates, for it is not an inf."""
    if loss.dtype == torch.float64:
        loss = torch.where(torch.isfinite(loss), loss.clamp(-FLOAT32_MAX, FLOAT32_MAX), loss)
    return loss.float()


def _without_trace(decision: Decision, before: GuardState, after: GuardState) -> GuardState:
    """The state after a step of learning rate 0: as before it, if its gradients were all zero."""
    return select((decision.grad_norm == 0) & decision.apply, before, after, xp=torch_namespace)
