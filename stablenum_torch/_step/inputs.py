"""What one step is about: the parameters whose gradients are measured, and what is known before that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stablenum.guard.config import GuardConfig
from stablenum.guard.observation import Fault
from stablenum_torch._devices.joint import Joint

__all__ = ["StepInputs"]


class StepInputs(NamedTuple):
    """What measuring, deciding and applying a step have in common. It does not change during the step.

    Attributes:
        config: the guard's settings, which say what is measured.
        params: all parameters of the optimizer; a missing gradient counts as zero.
        included: for each of them, whether the rule for units, if there is one, applies to it.
        device: where to decide, and where what is measured is put.
        joint: the ranks that decide together; None if this process decides alone.
        loss: () this process's unscaled loss, if known.
        found_inf: () bool, whether something besides these gradients was not finite: a gradient before it was
            unscaled for the user to change, or a buffer; None if unknown.
        fault: what else forbids the step, as far as the host knows.
        bad_at_first: returns the ``id`` of each parameter that was not finite when the guard first saw it;
            None where parameters are not looked at.
    """

    config: GuardConfig
    params: Sequence[Tensor]
    included: Sequence[bool]
    device: torch.device
    joint: Joint | None = None
    loss: Tensor | None = None
    found_inf: Tensor | None = None
    fault: Fault | None = None
    bad_at_first: Callable[[], set[int]] | None = None
