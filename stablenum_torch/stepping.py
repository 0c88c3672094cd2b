"""One guarded step: measure the gradients, decide in the core, apply the decision or skip whole.

Two paths to the same decision. On a CPU the host sees the gradients for nothing, so it decides in NumPy
and branches. On an accelerator everything stays there; the host waits only for an optimizer that cannot
skip by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import array_api_compat.numpy as np_namespace
import array_api_compat.torch as torch_namespace
import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from stablenum.config import GuardConfig
from stablenum.guard import GuardState, Observation, decide, select
from stablenum_torch.apply import (
    can_skip_on_device,
    is_fused,
    moves_nothing,
    step_folded,
    transform_gradients,
)
from stablenum_torch.measure import norms_on_device, norms_on_host
from stablenum_torch.ranks import is_distributed, several_ranks
from stablenum_torch.readback import wait_for_bool
from stablenum_torch.state import host_view

__all__ = ["guarded_step"]

Gradients = Sequence[Tensor | None]


def guarded_step(
    optimizer: Optimizer,
    config: GuardConfig,
    state: GuardState,
    grads: Gradients,
    loss: Tensor | None,
    process_group: ProcessGroup | None,
) -> GuardState:
    """Step ``optimizer`` as the core decides, and return the guard's next state.

    Args:
        optimizer: the inner optimizer; its parameters hold the gradients.
        config: the guard's settings.
        state: the guard's tensors, not changed here.
        grads: the gradient of each parameter of the optimizer, in order, or None.
        loss: () the unscaled loss, if known.
        process_group: ranks over which plain gradients are sharded.
    """
    if several_ranks():
        # Each rank has a loss of its own. Decisions rest on the gradients alone then, which all
        # ranks share: otherwise one bad loss would make the ranks disagree.
        loss = None
    if _on_host(state, grads, process_group):
        return _step_on_host(optimizer, config, state, grads, loss)
    return _step_on_device(optimizer, config, state, grads, loss, process_group)


def _on_host(state: GuardState, grads: Gradients, process_group: ProcessGroup | None) -> bool:
    if torch.compiler.is_compiling() or not state.step.is_cpu:
        return False
    if several_ranks() and (process_group is not None or any(map(is_distributed, grads))):
        return False
    return all(g is None or g.is_cpu for g in grads)


def _step_on_host(
    optimizer: Optimizer, config: GuardConfig, state: GuardState, grads: Gradients, loss: Tensor | None
) -> GuardState:
    before = host_view(state)
    with np.errstate(all="ignore"):
        seen = Observation(norms_on_host(grads), None if loss is None else loss.cpu().float().numpy())
        decision, after = decide(config, before, seen, xp=np_namespace)
        if moves_nothing(optimizer):
            after = select(np.equal(decision.grad_norm, 0), before, after, xp=np_namespace)
    if decision.apply:
        unchanged = bool(np.all(decision.multiplier == 1))
        multiplier = torch.as_tensor(decision.multiplier)
        _apply(optimizer, config, grads, multiplier, unchanged=unchanged, found_inf=None)
    return after


def _step_on_device(
    optimizer: Optimizer,
    config: GuardConfig,
    state: GuardState,
    grads: Gradients,
    loss: Tensor | None,
    process_group: ProcessGroup | None,
) -> GuardState:
    device = state.step.device
    loss = None if loss is None else loss.to(device, torch.float32, non_blocking=True)
    seen = Observation(norms_on_device(grads, device, process_group), loss)
    decision, after = decide(config, state, seen, xp=torch_namespace)
    if moves_nothing(optimizer):
        after = select(decision.grad_norm == 0, state, after, xp=torch_namespace)
    unchanged = not config.changes_gradients
    if is_fused(optimizer) and can_skip_on_device(optimizer):
        # Exactly 1. or 0.: the kernels compare with 1.
        found_inf = torch.logical_not(decision.apply).float()
        _apply(optimizer, config, grads, decision.multiplier, unchanged=unchanged, found_inf=found_inf)
    elif wait_for_bool(decision.apply):
        _apply(optimizer, config, grads, decision.multiplier, unchanged=unchanged, found_inf=None)
    return after


def _apply(
    optimizer: Optimizer,
    config: GuardConfig,
    grads: Gradients,
    multiplier: Tensor,
    *,
    unchanged: bool,
    found_inf: Tensor | None,
) -> None:
    """Step the optimizer on gradients times ``multiplier``, in its own pass where it can."""
    fold = is_fused(optimizer) and not config.per_tensor and config.max_value is None
    if not fold and (config.max_value is not None or not unchanged):
        # Unbound, not indexed: an index made on the host would have to be copied to the device first.
        each = multiplier.unbind() if config.per_tensor else [multiplier] * len(grads)
        present = [(g, factor) for g, factor in zip(grads, each, strict=True) if g is not None]
        transform_gradients([g for g, _ in present], [factor for _, factor in present], config.max_value)
    divisor = 1.0 / multiplier if fold and not unchanged else None
    step_folded(optimizer, divisor=divisor, found_inf=found_inf)
