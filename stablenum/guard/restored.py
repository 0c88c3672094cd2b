"""States that were restored leaf by leaf, perhaps into a guard with other settings.

Orbax, msgpack and pickle know nothing of settings. A state in the JSON form of ``statedict`` is fitted to the
guard while it is read; a state restored in another way is checked and fitted here, at every step.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.arrays import at_least, at_most, leaves
from stablenum.guard.config import GuardConfig
from stablenum.guard.decide import GuardState, select
from stablenum.rules.clipping import PER_TENSOR_STATES
from stablenum.rules.loss_scale import LossScaleState, StaticLossScale, carried_over

__all__ = ["OtherSettingsError", "check_made_for", "follow_config", "foreign_scale", "learning_rules"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# What counts non-finite steps.
_COUNTED = ("halted", "nonfinite_in_a_row", "escalation")
_FIELDS = {"clip": "clip", "loss_scale": "loss_scale", "spike": "spike", "escalate": "escalation"}


class OtherSettingsError(ValueError):
    """A state has the statistics of other rules than those of the guard that uses it."""


def check_made_for(config: GuardConfig, state: GuardState, like: GuardState) -> None:
    """Check that every rule of ``config`` finds its own statistics in ``state``.

    Only structures and shapes are looked at, and the number of parameters is not.

    Args:
        config: the settings of the guard that uses the state.
        state: the state.
        like: a state of this guard, for any number of parameters.

    Raises:
        OtherSettingsError: the state was made under other settings; the message names the setting.
    """
    for setting, field in _FIELDS.items():
        if not _alike(getattr(state, field), getattr(like, field)):
            raise OtherSettingsError(
                "opt_state must be the state of a guard with the same settings; its statistics are not those "
                f"of {setting}={getattr(config, setting)!r}. Take the guard's part from tx.init(params), and "
                "carry over what fits: load_guard_state_dict(fresh, guard_state_dict(opt_state))."
            )


def _alike(state: Any, like: Any) -> bool:
    """Return whether the states of two rules have the same structure and shapes."""
    if not isinstance(like, tuple) or not isinstance(state, tuple):
        return not isinstance(like, tuple) and not isinstance(state, tuple) and state.shape == like.shape
    if type(state) is not type(like) or len(state) != len(like):
        return False
    if isinstance(like, PER_TENSOR_STATES):
        return all(a.shape[1:] == b.shape[1:] for a, b in zip(state, like, strict=True))
    return all(map(_alike, state, like))


def learning_rules(config: GuardConfig, state: GuardState) -> list[str]:
    """Return the names of the rules that learn from steps, so that a checkpoint without their state loses
    something.

    Args:
        config: the settings.
        state: a state of this guard.
    """
    rules: list[tuple[Any, Any]] = list(zip(config.clip_rules, state.clip, strict=True))
    rules += [(config.spike, state.spike), (config.escalate, state.escalation)]
    if not isinstance(config.loss_scale, StaticLossScale | None):
        rules.append((config.loss_scale, state.loss_scale))
    return [type(rule).__name__ for rule, kept in rules if leaves(kept)]


def foreign_scale(config: GuardConfig, state: GuardState) -> Array | None:
    """Return () bool, whether a guard without a loss scale was given the state of a guard with one.

    Such a step has to be skipped: its gradients are multiplied by that scale if the loss was scaled as the
    state says, and are not if the user's program took them without looking at the state. None is returned for
    a guard with a loss scale, which divides by the state's scale in any case.
    """
    return None if config.loss_scale is not None else state.loss_scale.scale != 1


def follow_config(
    config: GuardConfig, own: LossScaleState, before: GuardState, after: GuardState, *, xp: Namespace
) -> GuardState:
    """Return the state after a step, with what is a setting taken from ``config``.

    The loss scale is :func:`~stablenum.rules.loss_scale.carried_over`, within the bounds of a dynamic rule. A
    guard without a limit of skips is not halted. A step that was skipped because of a
    :func:`foreign_scale` is no evidence against the training: it neither halts a guard nor counts for
    ``max_skips_in_a_row`` or for an escalation.

    Args:
        config: the settings of the guard that uses the state.
        own: the state of this guard's loss scale before its first step.
        before, after: the state before and after the step.
        xp: the array namespace.
    """
    rule, scale = config.loss_scale, after.loss_scale
    if rule is not None and not isinstance(rule, StaticLossScale):
        within = at_most(at_least(scale.scale, rule.min_scale, xp=xp), rule.max_scale, xp=xp)
        scale = scale._replace(scale=within)
    after = after._replace(loss_scale=carried_over(own, before.loss_scale, scale, xp=xp))
    foreign = foreign_scale(config, before)
    if foreign is not None:
        held = {
            name: select(foreign, getattr(before, name), getattr(after, name), xp=xp) for name in _COUNTED
        }
        after = after._replace(**held)
    return after if config.skip_limit is not None else after._replace(halted=xp.zeros_like(after.halted))
