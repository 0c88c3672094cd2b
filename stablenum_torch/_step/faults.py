"""What forbids a step besides its gradients: settings and parameters that are not finite."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum.guard.faults import NO_SETTINGS, BadSetting, bad_setting
from stablenum.guard.observation import Fault
from stablenum.guard.reasons import MAY_SPOIL_PARAMETERS, SPIKES, Reason
from stablenum.guard.recorder import Recorder
from stablenum_torch._step.first_look import finiteness_of
from stablenum_torch._step.inputs import StepInputs

__all__ = ["Settings", "fault", "fault_of_parameters"]


class Settings:
    """Looks at an optimizer's settings in each step, of which most are the same as in the step before."""

    def __init__(self) -> None:
        self._sound: list[list[Any]] = []  # of each group, if no setting can change by itself

    def first_bad(self, optimizer: Optimizer) -> BadSetting | None:
        """Return the first setting that is not finite, of those that the host knows without a device."""
        for i, group in enumerate(optimizer.param_groups):
            values = list(group.values())
            known = self._sound[i] if i < len(self._sound) else ()
            if len(known) == len(values) and all(map(is_, known, values)):
                continue
            found = bad_setting(group, f"param_groups[{i}]", _number)
            if found is not None:
                return found
            keeps = all(_is_constant(v) for name, v in group.items() if name not in NO_SETTINGS)
            self._sound[i : i + 1] = [values if keeps else []]
        return None


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (int, float, str))


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
