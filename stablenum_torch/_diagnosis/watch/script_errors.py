"""What an exception that ends a script says about numbers that are not finite."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import torch

from stablenum.diagnosis.watch import script_errors
from stablenum_torch._diagnosis.replay.recorder import rejects_numbers
from stablenum_torch._diagnosis.watch.by_hand import finite, unwrapped

__all__ = ["bad_in_frames", "is_about_a_closure", "is_about_numbers"]

# What torch.distributions says of a parameter; it shows a large one in part, perhaps without the NaN.
_CONSTRAINT = "to satisfy the constraint"


def is_about_numbers(error: BaseException, bad: Sequence[torch.Tensor]) -> bool:
    """Return whether an error is about NaN or inf, or about numbers that an operation refuses.

    ``bad`` are the tensors that are not finite.
    """
    said = str(error)
    constraint = bool(bad) and _CONSTRAINT in said
    return script_errors.is_about_numbers(said) or constraint or rejects_numbers(error)


def bad_in_frames(error: BaseException) -> list[torch.Tensor]:
    """Return the tensors that are not finite in the innermost function that has any; those with NaN first of
    all, because infinities may be masks."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):
        local = [unwrapped(x) for x in frame.f_locals.values() if isinstance(x, torch.Tensor)]
        bad = [t for t in local if not finite(t)]
        if bad:
            return [t for t in bad if bool(torch.isnan(t).any())] or bad
    return []


def is_about_a_closure(error: BaseException) -> bool:
    """Return whether an optimizer failed because its closure returned no loss."""
    if not isinstance(error, TypeError | AttributeError) or "NoneType" not in str(error):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (
        bool(frames)
        and "closure" in frames[-1].f_locals
        and isinstance(frames[-1].f_locals.get("self"), torch.optim.Optimizer)
    )
