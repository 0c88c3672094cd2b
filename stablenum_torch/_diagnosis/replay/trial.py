"""Try the safe function that a report recommends, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from stablenum.diagnosis.replay import trials
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.replay.trials import Read, Trial
from stablenum_torch._devices.generators import rng_state, set_rng_state

__all__ = ["with_trial"]


def with_trial(evidence: Evidence, read: Read | None) -> Evidence:
    """Do what :func:`stablenum.diagnosis.replay.trials.with_trial` does, with torch's tensors."""
    return trials.with_trial(
        evidence,
        read,
        package="stablenum_torch",
        floating=_floating,
        finite=_finite,
        evaluate=_evaluate,
        exp=torch.exp,
    )


def _floating(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach() for t in tensors if t.is_floating_point() and t.layout is torch.strided]


def _evaluate(function: Callable[..., Any], tensors: list[Tensor], trial: Trial) -> list[Tensor]:
    words = {"axis": "dim", "keepdims": "keepdim"}
    options = {words.get(k, k): v for k, v in trial.options.items()}
    state = rng_state(torch_only=True)
    try:
        # Inside ``vmap`` or ``grad`` of torch.func, tensors that require a gradient are refused.
        with temporarily_clear_interpreter_stack(), torch.enable_grad():
            given = [t.clone().requires_grad_() for t in tensors]
            value = function(*given, *trial.numbers, **options)
            slopes = torch.autograd.grad(value.sum(), given, allow_unused=True)
    finally:
        set_rng_state(state)
    return [t for t in (value, *slopes) if t is not None]


def _finite(t: Tensor) -> bool:
    return bool(torch.isfinite(t).all())
