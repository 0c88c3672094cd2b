"""``torch.autocast`` in the format that a guard has decided on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from stablenum.guard.config import GuardConfig
from stablenum.precision.policy import Policy, as_policy

__all__ = ["AppliedPolicy", "autocast"]

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class AppliedPolicy(Protocol):
    """A policy that a model's modules follow, as :func:`stablenum_torch.precision` returns it."""

    policy: Policy

    def at_least(self, format: str | None) -> AbstractContextManager[Any]:  # noqa: A002
        """While the context lasts, no module computes in a narrower format; None changes nothing."""


def autocast(
    config: GuardConfig,
    level: Callable[[], int],
    device: str,
    dtype: torch.dtype | None,
    policy: Policy | AppliedPolicy | str | Any,
) -> AbstractContextManager[Any]:
    """See :meth:`stablenum_torch.GuardedOptimizer.autocast`.

    Args:
        config: the guard's settings.
        level: reads how many formats wider than the first the guard has decided on.
        device: the type of the device.
        dtype, policy: as given by the user.

    Raises:
        TypeError: ``dtype`` is not a floating-point format of torch.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating-point torch.dtype, such as torch.bfloat16; got {dtype!r}.")
    applied: Any = policy if hasattr(policy, "policy") else None  # an AppliedPolicy
    own = None if policy is None else applied.policy if applied is not None else as_policy(policy)
    escalate, above = config.escalate, 0
    if escalate is not None:
        if own is not None:
            escalate.check_begins_with(own.compute)
        above = level()
    if applied is not None:
        wider: AbstractContextManager[Any] = applied.at_least(config.compute_format(above) if above else None)
        return wider
    if above == 0 and dtype is not None:  # a dtype that the user gave goes to torch unchanged
        return torch.autocast(device, dtype=dtype)
    wanted = config.compute_format(above, None if own is None else own.compute)
    chosen = _AUTOCAST.get(Policy(compute=wanted).carrier)
    return torch.autocast(device, enabled=False) if chosen is None else torch.autocast(device, dtype=chosen)
