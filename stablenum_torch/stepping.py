"""One guarded step: measure the gradients, decide in the core, apply the decision or skip whole.

Two paths to the same decision. On a CPU the host sees the gradients for nothing, so it decides in NumPy
and branches. On an accelerator everything stays there; the host waits only for an optimizer that cannot
skip by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import array_api_compat.numpy as np_namespace
import array_api_compat.torch as torch_namespace
import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from stablenum.clipping import Units
from stablenum.config import GuardConfig
from stablenum.formats import FLOAT32_MAX
from stablenum.guard import Decision, GuardState, Observation, decide, select
from stablenum_torch.apply import (
    can_skip_on_device,
    gradients_to_change,
    is_fused,
    moves_nothing,
    step_folded,
    transform_gradients,
)
from stablenum_torch.compiled import fewer_kernels
from stablenum_torch.extremes import Extremes, extremes_on_device, extremes_on_host
from stablenum_torch.measure import gradient_norms_on_device, norms_on_host, saturated
from stablenum_torch.ranks import joins_ranks, several_ranks
from stablenum_torch.readback import wait_for_bool
from stablenum_torch.state import host_view, to_device
from stablenum_torch.units import unit_factor, units_on_device, units_on_host
from stablenum_torch.update import before_update, clip_update_on_device, clip_update_on_host

__all__ = ["guarded_step"]


def guarded_step(
    optimizer: Optimizer,
    config: GuardConfig,
    state: GuardState,
    params: Sequence[Tensor],
    loss: Tensor | None,
    process_group: ProcessGroup | None,
    included: Sequence[bool] = (),
) -> GuardState:
    """Step ``optimizer`` as the core decides, and return the guard's next state.

    Args:
        optimizer: the inner optimizer; its parameters hold the gradients.
        config: the guard's settings.
        state: the guard's tensors, not changed here.
        params: the parameters of the optimizer, in order; those without gradient count as zero.
        loss: () the unscaled loss, if known.
        process_group: ranks over which plain gradients are sharded.
        included: whether the rule for units, if there is one, applies to each parameter.
    """
    if several_ranks():
        # Each rank has a loss of its own. Decisions rest on the gradients alone then, which all
        # ranks share: otherwise one bad loss would make the ranks disagree.
        loss = None
    if _on_host(state, params, process_group):
        return _step_on_host(optimizer, config, state, params, loss, included)
    return _step_on_device(optimizer, config, state, params, loss, process_group, included)


def _on_host(state: GuardState, params: Sequence[Tensor], process_group: ProcessGroup | None) -> bool:
    """Whether all that a decision needs lies in this process's memory."""
    if torch.compiler.is_compiling() or joins_ranks(params, process_group):
        return False
    return state.step.is_cpu and all(p.is_cpu for p in params)


def _step_on_host(
    optimizer: Optimizer,
    config: GuardConfig,
    state: GuardState,
    params: Sequence[Tensor],
    loss: Tensor | None,
    included: Sequence[bool],
) -> GuardState:
    before = host_view(state)
    with np.errstate(all="ignore"):
        seen = _observed_on_host(config, params, loss, included)
        decision, after = decide(config, before, seen, xp=np_namespace)
        if moves_nothing(optimizer):
            after = _without_trace(decision, before, after, np_namespace)
    if not decision.apply:
        return after
    rule = config.update_rule
    copied = None if rule is None else before_update(rule, optimizer)
    unchanged = _unchanged(decision, len(params))
    multiplier = torch.as_tensor(decision.multiplier, device="cpu")
    of_units = [torch.from_numpy(part) for part in decision.unit_multipliers]
    _apply(optimizer, config, params, multiplier, of_units, unchanged=unchanged, found_inf=None)
    if rule is not None and copied is not None:
        with np.errstate(all="ignore"):
            clip_update_on_host(rule, copied)
    return after


def _unchanged(decision: Decision, n: int) -> list[bool]:
    """For each parameter whether its gradient stays as it is: a pass over it that can be left out."""
    whole = np.broadcast_to(decision.multiplier == 1, (n,))
    units = decision.unit_multipliers or ((),) * n
    return [bool(np.all(u == 1) if len(u) else w) for u, w in zip(units, whole, strict=True)]


def _observed_on_host(
    config: GuardConfig, params: Sequence[Tensor], loss: Tensor | None, included: Sequence[bool]
) -> Observation:
    grads, units = [p.grad for p in params], None
    if config.unit_rule is None:
        norms = norms_on_host(grads)
    else:
        norms, units = units_on_host(config.unit_rule, params, included)
    amax, tiny = extremes_on_host(grads, config.needs)
    return Observation(
        norms=norms,
        loss=None if loss is None else _float32(loss).cpu().numpy(),
        units=units,
        amax=amax,
        tiny=tiny,
    )


def _step_on_device(
    optimizer: Optimizer,
    config: GuardConfig,
    state: GuardState,
    params: Sequence[Tensor],
    loss: Tensor | None,
    process_group: ProcessGroup | None,
    included: Sequence[bool],
) -> GuardState:
    device = state.step.device
    measured = _measured_on_device(config, params, loss, device, process_group, included)
    still = moves_nothing(optimizer)
    if config.unit_rule is None:
        decided = fewer_kernels(_decided_on_device, config, still, on=state.step)(state, measured)
    else:  # each unit would be operations of its own, and compiling take minutes
        decided = _decided_on_device(config, still, state, measured)
    decision, after, divisor, found_inf = decided
    if not (is_fused(optimizer) and can_skip_on_device(optimizer)):
        if not wait_for_bool(decision.apply):
            return after
        found_inf = None
    rule = config.update_rule
    copied = None if rule is None else before_update(rule, optimizer)
    _apply(
        optimizer,
        config,
        params,
        decision.multiplier,
        decision.unit_multipliers,
        unchanged=[not config.changes_gradients] * len(params),
        found_inf=found_inf,
        divisor=divisor,
    )
    if rule is not None and copied is not None:
        clip_update_on_device(rule, copied, device, process_group)
    return after


class _Measured(NamedTuple):
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


def _measured_on_device(
    config: GuardConfig,
    params: Sequence[Tensor],
    loss: Tensor | None,
    device: torch.device,
    process_group: ProcessGroup | None,
    included: Sequence[bool],
) -> _Measured:
    units = None
    if config.unit_rule is None:
        norms = gradient_norms_on_device(params, device, process_group)
    else:
        norms, units = units_on_device(config.unit_rule, params, included, device)
    return _Measured(
        norms=norms,
        loss=None if loss is None else to_device(loss, device),
        units=units,
        extremes=extremes_on_device(params, device, config.needs, process_group),
    )


def _decided_on_device(
    config: GuardConfig, still: bool, state: GuardState, measured: _Measured
) -> tuple[Decision, GuardState, Tensor, Tensor]:
    """The decision, the next state, and what fused kernels take: a divisor and a flag for a skip, () float32.

    All that lies between the measurement and the optimizer's step, so that it can be compiled as one.
    ``still``: the step moves nothing.
    """
    amax, tiny = measured.extremes.joined()
    seen = Observation(
        norms=saturated(measured.norms),
        loss=None if measured.loss is None else _float32(measured.loss),
        units=measured.units,
        amax=amax,
        tiny=tiny,
    )
    decision, after = decide(config, state, seen, xp=torch_namespace)
    if still:
        after = _without_trace(decision, state, after, torch_namespace)
    # Exactly 1. or 0.: the kernels compare with 1.
    return decision, after, 1.0 / decision.multiplier, torch.logical_not(decision.apply).float()


def _float32(loss: Tensor) -> Tensor:
    """The loss in float32; a finite float64 beyond its range saturates, for it is not an inf."""
    if loss.dtype == torch.float64:
        loss = torch.where(torch.isfinite(loss), loss.clamp(-FLOAT32_MAX, FLOAT32_MAX), loss)
    return loss.float()


def _without_trace(decision: Decision, before: GuardState, after: GuardState, xp: Any) -> GuardState:
    """The state after a step of learning rate 0: as before it, if its gradients were all zero."""
    return select((decision.grad_norm == 0) & decision.apply, before, after, xp=xp)


def _apply(
    optimizer: Optimizer,
    config: GuardConfig,
    params: Sequence[Tensor],
    multiplier: Tensor,
    of_units: Sequence[Tensor],
    *,
    unchanged: Sequence[bool],
    found_inf: Tensor | None,
    divisor: Tensor | None = None,
) -> None:
    """Step the optimizer on gradients times ``multiplier``, in its own pass where it can.

    ``of_units``: as in :class:`Decision`. ``unchanged``: which gradients are known to have a factor of 1.
    ``divisor``: ``1 / multiplier`` if it is known.
    """
    bounded, one_for_all = config.max_value is not None, not config.per_tensor and config.unit_rule is None
    fold = is_fused(optimizer) and one_for_all and not bounded
    if bounded or not (fold or all(unchanged)):
        # Unbound, not indexed: an index made on the host would have to be copied to the device first.
        each = list(multiplier.unbind()) if config.per_tensor else [multiplier] * len(params)
        for i, factors in enumerate(of_units):
            if config.unit_rule is not None and len(factors):
                each[i] = unit_factor(config.unit_rule, factors, params[i].shape)
        chosen = [
            (grad, factor)
            for grad, factor, same in zip(
                gradients_to_change(optimizer, params), each, unchanged, strict=True
            )
            if grad is not None and (bounded or not same)
        ]
        transform_gradients([g for g, _ in chosen], [factor for _, factor in chosen], config.max_value)
    if not fold or all(unchanged):
        divisor = None
    elif divisor is None:
        divisor = 1.0 / multiplier
    step_folded(optimizer, divisor=divisor, found_inf=found_inf)
