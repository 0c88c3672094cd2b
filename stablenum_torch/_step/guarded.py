"""One guarded step: measure the gradients, decide in the core, apply the decision or skip whole.

Two paths to the same decision. On a CPU the host sees the gradients for nothing, so it decides in NumPy
and branches (``host_step.py``). On an accelerator everything stays there (``device_step.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum_torch._devices.host_decide import HostGuard
from stablenum_torch._devices.ranks import several_ranks
from stablenum_torch._devices.state import copy_into
from stablenum_torch._step.on_device import step_on_device
from stablenum_torch._step.on_host import step_on_host

__all__ = ["guarded_step"]


def guarded_step(
    optimizer: Optimizer,
    config: GuardConfig,
    state: GuardState,
    params: Sequence[Tensor],
    loss: Tensor | None,
    process_group: ProcessGroup | None,
    included: Sequence[bool] = (),
    *,
    host: Callable[[], HostGuard] | None = None,
) -> None:
    """Step ``optimizer`` as the core decides, and bring the guard's state up to date.

    The state is written last: an error in the inner step leaves it as it was.

    Args:
        optimizer: the inner optimizer; its parameters hold the gradients.
        config: the guard's settings.
        state: the guard's tensors.
        params: the parameters of the optimizer, in order; those without gradient count as zero.
        loss: () the unscaled loss, if known.
        process_group: ranks over which plain gradients are sharded.
        included: whether the rule for units, if there is one, applies to each parameter.
        host: gives what decides on ``state`` in the host's memory, where one is kept from step to step.
    """
    if several_ranks():
        # Each rank has a loss of its own. Decisions rest on the gradients alone then, which all
        # ranks share: otherwise one bad loss would make the ranks disagree.
        loss = None
    if _on_host(state, params):
        guard = HostGuard(config, state) if host is None else host()
        guard.write(step_on_host(optimizer, guard, params, loss, process_group, included))
    else:
        after = step_on_device(optimizer, config, state, params, loss, process_group, included)
        copy_into(state, after)


def _on_host(state: GuardState, params: Sequence[Tensor]) -> bool:
    """Whether all that a decision needs lies in this process's memory, but for other ranks' norms."""
    return not torch.compiler.is_compiling() and state.step.is_cpu and all(p.is_cpu for p in params)
