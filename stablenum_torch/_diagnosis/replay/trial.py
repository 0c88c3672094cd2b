"""Try the safe function that a report recommends, on what the failing operation read."""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch

from stablenum.diagnosis.replay.judge import Evidence, judge
from stablenum.diagnosis.replay.trials import Read, trial_of
from stablenum_torch._devices.generators import rng_state, set_rng_state

__all__ = ["with_trial"]


def with_trial(evidence: Evidence, read: Read | None) -> Evidence:
    """Return the evidence with what came of the safe function, in value and derivative; as it is, if the
    function cannot be tried.

    Args:
        evidence: what a replay found.
        read: what the first finding's operation read; None if it was not kept.
    """
    verdict = judge(evidence)
    if read is None or not verdict.safe_function or evidence.first is None:
        return evidence
    arrays = [t.detach() for t in read.arrays if t.is_floating_point() and t.layout is torch.strided]
    part, name = verdict.safe_function.split(".")[-2:]
    trial = trial_of(f"{part}.{name}", evidence.first, read.primitive, [tuple(t.shape) for t in arrays])
    # What is not finite already (a mask) has no finite derivative to look for.
    if trial is None or not all(bool(torch.isfinite(t).all()) for t in arrays[: trial.arrays]):
        return evidence
    function = getattr(importlib.import_module(f"stablenum_torch.{part}"), name)
    options = {"dim" if k == "axis" else k: v for k, v in trial.options.items()}
    state = rng_state(torch_only=True)
    try:
        with torch.enable_grad():
            given = [t.clone().requires_grad_() for t in arrays[: trial.arrays]]
            value = function(*given, *trial.numbers, **options)
            slopes = torch.autograd.grad(value.sum(), given, allow_unused=True)
    except (TypeError, ValueError, RuntimeError):
        return replace(evidence, tried="raises")
    finally:
        set_rng_state(state)
    finite = all(bool(torch.isfinite(t).all()) for t in (value, *slopes) if t is not None)
    return replace(evidence, tried="finite" if finite else "not finite")
