"""``torch.autocast`` in the format that a guard has decided on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from stablenum.guard.config import GuardConfig
from stablenum.precision.policy import Policy
from stablenum_torch._precision.casts import as_policy, dtype_of
from stablenum_torch._precision.model import PolicyHandle

__all__ = ["autocast"]


def autocast(
    config: GuardConfig,
    level: Callable[[], int],
    device: str,
    dtype: torch.dtype | None,
    policy: Policy | PolicyHandle | str | Any,
) -> AbstractContextManager[Any]:
    """See :meth:`stablenum_torch.GuardedOptimizer.autocast`.

    Args:
        config: the guard's.
        level: tells how much wider than at first the guard wants the format.
        device: the type of the device.
        dtype, policy: as given by the user.
    """
    escalate = config.escalate
    if policy is not None and escalate is not None:
        own = policy.policy if isinstance(policy, PolicyHandle) else as_policy(policy)
        escalate.check_begins_with(own.compute)
    above = 0 if escalate is None else level()
    wider = None if escalate is None or above == 0 else escalate.formats[above]
    if isinstance(policy, PolicyHandle):
        return policy.at_least(wider)
    if wider is None and dtype is not None:  # a dtype given by hand goes to torch as it is
        return torch.autocast(device, dtype=dtype)
    if wider is None and policy is not None:
        carrier = as_policy(policy).carrier
    else:
        default = "bfloat16" if config.loss_scale is None else "float16"
        first = default if escalate is None else escalate.formats[0]
        carrier = Policy(compute=wider or first).carrier
    chosen = dtype_of(carrier)
    if chosen in (torch.bfloat16, torch.float16):
        return torch.autocast(device, dtype=chosen)
    return torch.autocast(device, enabled=False)
