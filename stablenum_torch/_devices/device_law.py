"""What a step on a device decides, from what was measured to the next state, in any array namespace."""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import Decision, GuardState, Observation, decide, select

__all__ = ["decide_on_device"]

Namespace: TypeAlias = Any


def decide_on_device(
    config: GuardConfig, still: bool, state: GuardState, seen: Observation, *, xp: Namespace
) -> tuple[Decision, GuardState]:
    """Return the decision and the next state.

    Args:
        config: the settings.
        still: whether the step moves nothing, see ``moves_nothing``.
        state: the state before the step.
        seen: what was measured.
        xp: the array namespace of both.
    """
    decision, after = decide(config, state, seen, xp=xp)
    if still:
        # A step with learning rate 0 leaves the state unchanged if its gradients were all zero.
        after = select((decision.grad_norm == 0) & decision.apply, state, after, xp=xp)
    if seen.ranks is not None:  # no rank may have a gradient, which the host knows of its own alone
        after = select(xp.max(seen.ranks.worst) < 0, state, after, xp=xp)
    return decision, after
