"""One guarded step on an accelerator: measured, decided and applied there, with nothing read on the host.

The host waits only if the optimizer itself cannot skip a step on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum._support.interrupts import finish
from stablenum.guard.decide import GuardState
from stablenum.guard.recorder import Recorder
from stablenum_torch._devices.compiled_decide import fewer_kernels
from stablenum_torch._devices.fused_optimizers import can_skip_on_device, is_fused, moves_nothing, step_folded
from stablenum_torch._devices.kernels.device_guard import DeviceGuard
from stablenum_torch._devices.waits import wait_for_bool
from stablenum_torch._step.apply import gradients_to_change, transform
from stablenum_torch._step.by_kernels import decided_by_kernels
from stablenum_torch._step.clip_update import before_update, clip_update_without_wait
from stablenum_torch._step.faults import fault_of_parameters
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.observe import Measured, measured_without_wait
from stablenum_torch._step.plain_decision import Decided, decided_without_wait

__all__ = ["apply_on_device", "decided_on_device", "step_by_kernels"]


def decided_on_device(
    optimizer: Optimizer, state: GuardState, inputs: StepInputs, measured: Measured | None = None
) -> Decided:
    """Measure the gradients, unless they have been ``measured``, and decide.

    This is a function of its own, apart from :func:`apply_on_device`, for ``torch.compile``: it traces the
    latter twice, because torch breaks the graph in ``optimizer.step()``, and once more when the optimizer has
    created its state. Measuring and deciding are most of what there is to trace.
    """
    measured = measured_without_wait(inputs) if measured is None else measured
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
    commit: Callable[[GuardState | None], None],
) -> None:
    """Step ``optimizer`` as :func:`decided_on_device` has decided.

    ``commit`` completes the step with the guard's next state: it is called last, and again if an exception
    stops it.
    """
    may_skip = _folds(optimizer)
    if not may_skip and wait_for_bool(decided.skip):
        _skip(optimizer, state, inputs, decided, commit)
        return
    _apply(optimizer, inputs, decided, commit, may_skip=may_skip)


def _apply(
    optimizer: Optimizer,
    inputs: StepInputs,
    decided: Decided,
    commit: Callable[[GuardState | None], None],
    *,
    may_skip: bool,
) -> None:
    """Step ``optimizer``, which skips the step by itself if it ``may_skip``."""
    divisor: Tensor | None = decided.divisor
    config, params = inputs.config, inputs.params
    rule = config.update_rule
    copied = None if rule is None else before_update(rule, optimizer)
    if not (config.changes_gradients and is_fused(optimizer) and config.one_factor):
        divisor = None
    if config.changes_gradients and divisor is None:
        unchanged, of_units = [False] * len(params), decided.unit_multipliers
        grads = gradients_to_change(optimizer, params)
        transform(grads, inputs, decided.multiplier, of_units, unchanged=unchanged)

    def complete() -> None:
        if rule is not None and copied is not None:
            clip_update_without_wait(rule, copied, inputs)
        commit(decided.after)

    skip, applied = (decided.skip, decided.applied) if may_skip else (None, None)
    step_folded(optimizer, divisor=divisor, found_inf=skip, applied=applied, then=complete)


def step_by_kernels(
    optimizer: Optimizer,
    kernels: DeviceGuard,
    inputs: StepInputs,
    commit: Callable[[GuardState | None], None],
) -> tuple[bool, Measured | None]:
    """Take a step of which the guard's own kernels decide.

    Return False if they cannot, and then nothing is done; and what has been measured by then.

    ``commit`` is that of :func:`apply_on_device`. The kernels have written the next state by then; an
    exception before that takes it back.
    """

    def kept(after: GuardState | None) -> None:
        kernels.keep()
        commit(after)

    try:
        decided, measured = decided_by_kernels(kernels, inputs, still=moves_nothing(optimizer))
        if decided is None:
            return False, measured
        may_skip = _folds(optimizer)
        if not may_skip and wait_for_bool(decided.skip):
            rows, reasons = kernels.state.recorder
            before = Recorder(rows[:-1], reasons[:-1])
            if fault_of_parameters(inputs, before, int(reasons[-1, 1])) is not None:
                kernels.undo()
                return False, measured
            finish(functools.partial(kept, None))
            return True, measured
        _apply(optimizer, inputs, decided, kept, may_skip=may_skip)
    except BaseException:
        finish(kernels.undo)
        raise
    return True, measured


def _folds(optimizer: Optimizer) -> bool:
    """Return whether the optimizer skips a step by itself, on the device."""
    return is_fused(optimizer) and can_skip_on_device(optimizer)


def _skip(
    optimizer: Optimizer,
    state: GuardState,
    inputs: StepInputs,
    decided: Decided,
    commit: Callable[[GuardState | None], None],
) -> None:
    """Complete a step that is skipped, after a look at whether a parameter is at fault."""
    if not torch.compiler.is_compiling() and decided.reason is not None:
        fault = fault_of_parameters(inputs, state.recorder, int(decided.reason))
        if fault is not None:
            decided = decided_on_device(optimizer, state, inputs._replace(fault=fault))
    finish(functools.partial(commit, decided.after))
