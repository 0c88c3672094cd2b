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
from stablenum_torch._devices.finiteness import which_are_finite
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.norms import dense_values

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

    This reads all parameters, and waits for their device. Ranks that decide together would have to look
    together, and do not.

    Args:
        inputs: the step.
        before: the steps before it.
        reason: why it is skipped.
    """
    step, previous = before.ints[-1, :2].tolist()
    known = inputs.fault is not None or inputs.joint is not None or reason in SPIKES
    if known or step < 0 or previous not in MAY_SPOIL_PARAMETERS:
        return None
    bad: list[int] = []
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for i, p in enumerate(inputs.params):
        values = dense_values(local_part(p.detach()))
        if values.is_floating_point() and values.numel():
            kinds.setdefault((values.device, values.dtype), []).append((i, values))
    for members in kinds.values():
        finite = which_are_finite([values for _, values in members]).tolist()
        bad += [i for (i, _), yes in zip(members, finite, strict=True) if not yes]
    return fault(Reason.NONFINITE_UPDATE, min(bad), device=inputs.device) if bad else None
