"""One guarded step on an accelerator: measured, decided and applied there, with nothing read on the host.

The host waits only if the optimizer itself cannot skip a step on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum._support.interrupts import finish
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import Decision, GuardState, decide, select
from stablenum.guard.observation import Fault
from stablenum_torch._devices.compiled_decide import fewer_kernels
from stablenum_torch._devices.fused_optimizers import can_skip_on_device, is_fused, moves_nothing, step_folded
from stablenum_torch._devices.waits import wait_for_bool
from stablenum_torch._step.apply import gradients_to_change, transform
from stablenum_torch._step.clip_update import before_update, clip_update_without_wait
from stablenum_torch._step.faults import fault_of_parameters
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.observe import Measured, measured_without_wait, observation

__all__ = ["apply_on_device", "decided_on_device", "decided_without_wait"]

# The decision, the next state, and two () float32 for fused kernels: a divisor and the skip flag.
Decided: TypeAlias = tuple[Decision, GuardState, Tensor, Tensor]


def decided_on_device(optimizer: Optimizer, state: GuardState, inputs: StepInputs) -> Decided:
    """Measure the gradients and decide.

    This is a function of its own, apart from :func:`apply_on_device`, for ``torch.compile``: it traces the
    latter twice, because torch breaks the graph in ``optimizer.step()``, and once more when the optimizer has
    created its state. Measuring and deciding are most of what there is to trace.
    """
    measured = measured_without_wait(inputs)
    config, still = inputs.config, moves_nothing(optimizer)
    if inputs.fault is not None:  # too rare to be compiled
        return decided_without_wait(config, still, state, measured, inputs.fault)
    if config.unit_rule is not None:  # each unit adds further operations: compiling them would take minutes
        return decided_without_wait(config, still, state, measured)
    decide_fast = fewer_kernels(decided_without_wait, config, still, on=state.step, shape=len(inputs.params))
    return decide_fast(state, measured)


def apply_on_device(
    optimizer: Optimizer,
    state: GuardState,
    inputs: StepInputs,
    decided: Decided,
    commit: Callable[[GuardState], None],
) -> None:
    """Step ``optimizer`` as :func:`decided_on_device` has decided.

    ``commit`` completes the step with the guard's next state: it is called last, and again if an exception
    stops it.
    """
    divisor: Tensor | None
    found_inf: Tensor | None
    decision, after, divisor, found_inf = decided
    if not (is_fused(optimizer) and can_skip_on_device(optimizer)):
        if not wait_for_bool(decision.apply):
            if not torch.compiler.is_compiling():
                fault = fault_of_parameters(inputs, state.recorder, int(decision.reason))
                if fault is not None:
                    after = decided_on_device(optimizer, state, inputs._replace(fault=fault))[1]
            finish(functools.partial(commit, after))
            return
        found_inf = None
    config, params = inputs.config, inputs.params
    rule = config.update_rule
    copied = None if rule is None else before_update(rule, optimizer)
    if not (config.changes_gradients and is_fused(optimizer) and config.one_factor):
        divisor = None
    if config.changes_gradients and divisor is None:
        unchanged, of_units = [False] * len(params), decision.unit_multipliers
        grads = gradients_to_change(optimizer, params)
        transform(grads, inputs, decision.multiplier, of_units, unchanged=unchanged)

    def complete() -> None:
        if rule is not None and copied is not None:
            clip_update_without_wait(rule, copied, inputs)
        commit(after)

    step_folded(optimizer, divisor=divisor, found_inf=found_inf, then=complete)


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
    decision, after = decide(config, state, seen, xp=torch_namespace)
    if still:
        after = _without_trace(decision, state, after)
    if measured.rows is not None:  # no rank may have a gradient, which the host knows of its own alone
        after = select((measured.rows[:, 1] < 0).all(), state, after, xp=torch_namespace)
    # The flag is exactly 1.0 or 0.0, because the kernels compare it with 1.
    return decision, after, 1.0 / decision.multiplier, torch.logical_not(decision.apply).float()


def _without_trace(decision: Decision, before: GuardState, after: GuardState) -> GuardState:
    """Return the state after a step with learning rate 0: unchanged if its gradients were all zero."""
    return select((decision.grad_norm == 0) & decision.apply, before, after, xp=torch_namespace)
