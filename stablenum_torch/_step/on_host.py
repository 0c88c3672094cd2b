"""One guarded step in the host's memory: the host reads the gradients at no cost, and branches on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from stablenum._support.interrupts import finish
from stablenum.guard.decide import Decision
from stablenum_torch._devices.fused_optimizers import is_fused, moves_nothing, step_folded
from stablenum_torch._devices.host_decide import HostGuard
from stablenum_torch._step.apply import gradients_to_change, shift_gradients, transform
from stablenum_torch._step.clip_update import before_update, clip_update_on_host, clip_update_without_wait
from stablenum_torch._step.faults import fault_of_parameters
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.observe import observed_beyond_float32, observed_on_host, with_fault

__all__ = ["step_on_host"]


def step_on_host(
    optimizer: Optimizer, host: HostGuard, inputs: StepInputs, commit: Callable[[list[Any]], None]
) -> None:
    """Step ``optimizer`` as the core decides.

    ``commit`` completes the step with the leaves of the guard's next state: it is called last, and again if
    an exception stops it.
    """
    with np.errstate(all="ignore"):
        seen = observed_on_host(host, inputs)
        if seen.ranks is not None and (seen.ranks.worst < 0).all():
            return  # no rank has a gradient
        seen = with_fault(seen, inputs.fault)
        decision, after = host.decide(seen)
        if host.saturates(seen, decision):
            seen = observed_beyond_float32(seen, inputs)
            decision, after = host.decide(seen)
        if not decision.apply:
            fault = fault_of_parameters(inputs, host.state.recorder, decision.reason)
            if fault is not None:
                decision, after = host.decide(with_fault(seen, fault))
    if decision.grad_norm == 0 and decision.apply and moves_nothing(optimizer):
        after = host.read()  # zero gradients at rate 0 are no evidence, see `moves_nothing`
    if not decision.apply:
        finish(functools.partial(commit, after))
        return
    rule = host.update_rule
    copied = None if rule is None else before_update(rule, optimizer)
    divisor = None
    same = host.one_factor and decision.multiplier == 1
    folded = not same and host.one_factor and is_fused(optimizer)
    change = seen.exponents is not None or not (same or folded)
    grads = gradients_to_change(optimizer, inputs.params) if change else []
    if seen.exponents is not None:
        shift_gradients(grads, inputs, decision)
    if not same:
        if folded:
            divisor = host.divisor(decision.multiplier)
        else:
            multiplier = torch.as_tensor(np.asarray(decision.multiplier), device="cpu")
            of_units = [torch.from_numpy(part) for part in decision.unit_multipliers]
            unchanged = _unchanged(decision, len(grads))
            transform(grads, inputs, multiplier, of_units, unchanged=unchanged)

    def complete() -> None:
        if rule is not None and copied is not None:
            if inputs.joint is not None:
                clip_update_without_wait(rule, copied, inputs)
            else:
                with np.errstate(all="ignore"):
                    clip_update_on_host(rule, copied)
        commit(after)

    step_folded(optimizer, divisor=divisor, found_inf=None, then=complete)


def _unchanged(decision: Decision, n: int) -> list[bool]:
    """Return, for each parameter, whether its gradient stays unchanged, which saves a pass over the
    gradient."""
    same = decision.multiplier == 1
    whole = same.tolist() if np.ndim(same) else [bool(same)] * n
    if not decision.unit_multipliers:
        return whole
    return [
        bool(np.all(u == 1)) if len(u) else w for u, w in zip(decision.unit_multipliers, whole, strict=True)
    ]
