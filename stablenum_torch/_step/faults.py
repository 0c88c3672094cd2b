"""What forbids a step besides its gradients: settings and parameters that are not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum.guard.faults import BadSetting, bad_setting
from stablenum.guard.observation import Fault
from stablenum.guard.reasons import MAY_SPOIL_PARAMETERS, SPIKES, Reason
from stablenum.guard.recorder import Recorder
from stablenum_torch._step.first_look import finiteness_of
from stablenum_torch._step.inputs import StepInputs

__all__ = ["bad_setting_of", "fault", "fault_of_parameters"]


def bad_setting_of(optimizer: Optimizer) -> BadSetting | None:
    """Return the first setting that is not finite, of those that the host knows without asking a device."""
    for i, group in enumerate(optimizer.param_groups):
        found = bad_setting(group, f"param_groups[{i}]", _number)
        if found is not None:
            return found
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Tensor):
        known = value.is_cpu and value.numel() == 1 and not value.is_complex()
        return float(value) if known else None
    return float(value) if getattr(value, "shape", None) == () else None  # a number of NumPy


def fault(reason: Reason, worst: int = -1, *, device: torch.device | None = None) -> Fault:
    """Return a fault that the host knows, as tensors on ``device``."""
    return Fault(*(torch.tensor(int(part), dtype=torch.int32, device=device) for part in (reason, worst)))


def fault_of_parameters(inputs: StepInputs, before: Recorder, reason: int) -> Fault | None:
    """Return the fault that a parameter is not finite, for a step that is skipped; None if there is none.

    This reads all parameters with a gradient, and waits for their device. A parameter that was not finite
    when the guard first saw it, as a mask of -inf is, does not count. Ranks that decide together would have
    to look together, and do not.

    Args:
        inputs: the step.
        before: the steps before it.
        reason: why it is skipped.
    """
    step, previous = before.ints[-1, :2].tolist()
    if inputs.bad_at_first is None or inputs.fault is not None or reason in SPIKES:
        return None
    if step < 0 or previous not in MAY_SPOIL_PARAMETERS:
        return None
    moved = [(i, p) for i, p in enumerate(inputs.params) if p.grad is not None]
    bad: list[int] = []
    for members, finite in finiteness_of([p for _, p in moved]):
        bad += [moved[at][0] for at, yes in zip(members, finite.tolist(), strict=True) if not yes]
    at_first = inputs.bad_at_first() if bad else ()
    bad = [i for i in bad if id(inputs.params[i]) not in at_first]
    return fault(Reason.NONFINITE_UPDATE, min(bad), device=inputs.device) if bad else None
