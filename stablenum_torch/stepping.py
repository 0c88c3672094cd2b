"""One guarded step: measure the gradients, decide in the core, apply the decision or skip whole.

Two paths to the same decision. On a CPU the host sees the gradients for nothing, so it decides in NumPy
and branches. On an accelerator everything stays there; the host waits only for an optimizer that cannot
skip by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from stablenum.trees import map_leaves
from stablenum_torch.apply import (
    can_skip_on_device,
    gradients_to_change,
    is_fused,
    moves_nothing,
    step_folded,
    transform_gradients,
)
from stablenum_torch.compiled import fewer_kernels
from stablenum_torch.deciding import HostGuard
from stablenum_torch.extremes import Extremes, extremes_on_device, extremes_on_host
from stablenum_torch.measure import gradient_norms_on_device, gradient_norms_on_host, saturated
from stablenum_torch.ranks import joins_ranks, several_ranks
from stablenum_torch.readback import wait_for_bool
from stablenum_torch.scalars import as_scalar
from stablenum_torch.state import copy_into, to_device
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
    *,
    host: Callable[[], HostGuard] | None = None,
) -> None:
    """Step ``optimizer`` as the core decides, and bring the guard's state up to date.

    The state is written last: an error in the inner step leaves it as it was.

    Args:
        optimizer: the inner optimizer; its parameters hold the gradients.
        config: the guard's settings.
        state: the guard's tensors.
        params: the parameters of the optimizer, in order; those without gradient count as zero.
        loss: () the unscaled loss, if known.
        process_group: ranks over which plain gradients are sharded.
        included: whether the rule for units, if there is one, applies to each parameter.
        host: gives what decides on ``state`` in the host's memory, where one is kept from step to step.
    """
    if several_ranks():
        # Each rank has a loss of its own. Decisions rest on the gradients alone then, which all
        # ranks share: otherwise one bad loss would make the ranks disagree.
        loss = None
    if _on_host(state, params):
        guard = HostGuard(config, state) if host is None else host()
        guard.write(_step_on_host(optimizer, guard, params, loss, process_group, included))
    else:
        after = _step_on_device(optimizer, config, state, params, loss, process_group, included)
        copy_into(state, after)


def _on_host(state: GuardState, params: Sequence[Tensor]) -> bool:
    """Whether all that a decision needs lies in this process's memory, but for other ranks' norms."""
    return not torch.compiler.is_compiling() and state.step.is_cpu and all(p.is_cpu for p in params)


def _step_on_host(
    optimizer: Optimizer,
    host: HostGuard,
    params: Sequence[Tensor],
    loss: Tensor | None,
    process_group: ProcessGroup | None,
    included: Sequence[bool],
) -> list[Any]:
    """The leaves of the guard's next state."""
    config = host.config
    with np.errstate(all="ignore"):
        seen = _observed_on_host(config, params, loss, process_group, included)
        decision, after = host.decide(seen)
    if moves_nothing(optimizer) and decision.apply and decision.grad_norm == 0:
        after = host.read()  # without a trace, see `_without_trace`
    if not decision.apply:
        return after
    rule = config.update_rule
    copied = None if rule is None else before_update(rule, optimizer)
    divisor = None
    if not _changes_nothing(config, decision):
        if _folds(optimizer, config):
            divisor = torch.tensor(float(1 / decision.multiplier), dtype=torch.float32, device="cpu")
        else:
            multiplier = torch.as_tensor(np.asarray(decision.multiplier), device="cpu")
            of_units = [torch.from_numpy(part) for part in decision.unit_multipliers]
            unchanged = _unchanged(decision, len(params))
            _transform(optimizer, config, params, multiplier, of_units, unchanged=unchanged)
    step_folded(optimizer, divisor=divisor, found_inf=None)
    if rule is not None and copied is not None:
        if joins_ranks(params, process_group):
            clip_update_on_device(rule, copied, torch.device("cpu"), process_group)
        else:
            with np.errstate(all="ignore"):
                clip_update_on_host(rule, copied)
    return after


def _changes_nothing(config: GuardConfig, decision: Decision) -> bool:
    """Whether one factor of 1 serves all gradients, as on most steps, and nothing is to be clamped."""
    factor = decision.multiplier
    one_for_all = not (isinstance(factor, np.ndarray) or decision.unit_multipliers)
    return one_for_all and bool(factor == 1) and config.max_value is None


def _unchanged(decision: Decision, n: int) -> list[bool]:
    """For each parameter whether its gradient stays as it is: a pass over it that can be left out."""
    same = decision.multiplier == 1
    whole = same.tolist() if np.ndim(same) else [bool(same)] * n
    if not decision.unit_multipliers:
        return whole
    return [
        bool(np.all(u == 1)) if len(u) else w for u, w in zip(decision.unit_multipliers, whole, strict=True)
    ]


def _observed_on_host(
    config: GuardConfig,
    params: Sequence[Tensor],
    loss: Tensor | None,
    process_group: ProcessGroup | None,
    included: Sequence[bool],
) -> Observation:
    rare = config.unit_rule is not None or config.needs
    if rare and joins_ranks(params, process_group):
        measured = _measured_on_device(config, params, loss, torch.device("cpu"), process_group, included)
        return map_leaves(lambda v: None if v is None else as_scalar(v.numpy()), _observation(measured))
    grads, units = [p.grad for p in params], None
    if config.unit_rule is None:
        norms = gradient_norms_on_host(params, process_group)
    else:
        norms, units = units_on_host(config.unit_rule, params, included)
    amax, tiny = extremes_on_host(grads, config.needs)
    return Observation(
        norms=norms,
        loss=None if loss is None else np.float32(float(_float32(loss))),
        units=units,
        amax=None if amax is None else as_scalar(amax),
        tiny=None if tiny is None else as_scalar(tiny),
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
    if not (config.changes_gradients and _folds(optimizer, config)):
        divisor = None
    if config.changes_gradients and divisor is None:
        unchanged, of_units = [False] * len(params), decision.unit_multipliers
        _transform(optimizer, config, params, decision.multiplier, of_units, unchanged=unchanged)
    step_folded(optimizer, divisor=divisor, found_inf=found_inf)
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
    seen = _observation(measured)
    decision, after = decide(config, state, seen, xp=torch_namespace)
    if still:
        after = _without_trace(decision, state, after)
    # Exactly 1. or 0.: the kernels compare with 1.
    return decision, after, 1.0 / decision.multiplier, torch.logical_not(decision.apply).float()


def _observation(measured: _Measured) -> Observation:
    amax, tiny = measured.extremes.joined()
    return Observation(
        norms=saturated(measured.norms),
        loss=None if measured.loss is None else _float32(measured.loss),
        units=measured.units,
        amax=amax,
        tiny=tiny,
    )


def _float32(loss: Tensor) -> Tensor:
    """The loss in float32; a finite float64 beyond its range saturates, for it is not an inf."""
    if loss.dtype == torch.float64:
        loss = torch.where(torch.isfinite(loss), loss.clamp(-FLOAT32_MAX, FLOAT32_MAX), loss)
    return loss.float()


def _without_trace(decision: Decision, before: GuardState, after: GuardState) -> GuardState:
    """The state after a step of learning rate 0: as before it, if its gradients were all zero."""
    return select((decision.grad_norm == 0) & decision.apply, before, after, xp=torch_namespace)


def _folds(optimizer: Optimizer, config: GuardConfig) -> bool:
    """Whether the optimizer's own kernel can apply the factor: one for all, and no bound on each."""
    several = config.per_tensor or config.unit_rule is not None
    return is_fused(optimizer) and not several and config.max_value is None


def _transform(
    optimizer: Optimizer,
    config: GuardConfig,
    params: Sequence[Tensor],
    multiplier: Tensor,
    of_units: Sequence[Tensor],
    *,
    unchanged: Sequence[bool],
) -> None:
    """Multiply the gradients in place, and clamp them if there is a bound.

    ``of_units``: as in :class:`Decision`. ``unchanged``: which gradients are known to have a factor of 1.
    """
    # Unbound, not indexed: an index made on the host would have to be copied to the device first.
    each = list(multiplier.unbind()) if config.per_tensor else [multiplier] * len(params)
    for i, factors in enumerate(of_units):
        if config.unit_rule is not None and len(factors):
            each[i] = unit_factor(config.unit_rule, factors, params[i].shape)
    grads = gradients_to_change(optimizer, params)
    chosen = [
        (grad, factor)
        for grad, factor, same in zip(grads, each, unchanged, strict=True)
        if grad is not None and (config.max_value is not None or not same)
    ]
    transform_gradients([g for g, _ in chosen], [factor for _, factor in chosen], config.max_value)
