"""The state of loss-scale rules, and what the rules share."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.arrays import at_least, map_leaves

__all__ = [
    "FIXED",
    "HOLD",
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "LossScaleState",
    "carried_over",
    "check_scale_range",
    "next_hold",
    "scale_state",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# These bounds keep 1/scale and scale x loss far from the ends of float32's range.
LARGEST_SCALE, SMALLEST_SCALE = 2.0**100, 2.0**-100
FIXED = -1
# The number of good steps after an overflow during which a rule that adjusts the scale at every step does not
# raise it.
HOLD = 100


class LossScaleState(NamedTuple):
    """The state that a loss-scale rule carries from step to step. It can also be loaded under another rule.

    Attributes:
        scale: () float32, the factor on the loss of the next step.
        good_steps: () int32, the number of steps without overflow since the scale last changed (since the
            last overflow for the rules that adjust the scale at every step).
        hysteresis_left: () int32, the number of overflows still tolerated before the scale is lowered; -1
            marks a scale that never changes, so that a loaded state shows which kind it is.
        statistics: what else the rule remembers; ``()`` for most rules.
    """

    scale: Array
    good_steps: Array
    hysteresis_left: Array
    statistics: Any = ()


def carried_over(
    own: LossScaleState, before: LossScaleState, after: LossScaleState, *, xp: Namespace
) -> LossScaleState:
    """Return the state with which a guard goes on after it was given another guard's: ``after`` or ``own``.

    A fixed scale (1 without scaling) is a setting, and the setting of the guard that goes on takes
    precedence. Only a dynamic one goes on with the saved scale, and only if that was dynamic too.

    Args:
        own: the guard's own state, before its first step. It is read on the host.
        before: the state that the guard was given.
        after: the state after the next step, or ``before`` again.
        xp: the array namespace of the result, which is on the device of ``after``.
    """
    first = map_leaves(lambda leaf, value: xp.full_like(leaf, value.item()), after, own)
    if own.hysteresis_left.item() == FIXED:
        return first
    was_fixed = before.hysteresis_left == FIXED
    return map_leaves(lambda mine, saved: xp.where(was_fixed, mine, saved), first, after)


def scale_state(
    scale: float, hysteresis: int, statistics: Any = (), *, xp: Namespace, device: Any
) -> LossScaleState:
    """Return the state before the first step."""
    return LossScaleState(
        scale=xp.asarray(scale, dtype=xp.float32, device=device),
        good_steps=xp.asarray(0, dtype=xp.int32, device=device),
        hysteresis_left=xp.asarray(hysteresis, dtype=xp.int32, device=device),
        statistics=statistics,
    )


def next_hold(hold: Array, *, overflow: Array, good: Array, xp: Namespace) -> Array:
    """Return () int32, the number of good steps still to come before the scale may rise; an overflow sets
    this number to ``HOLD``.

    Rules compare the number *after* the step with 0: the scale rises with the last of these good steps, as
    it does with the last one of ``growth_interval`` in a dynamic scale.
    """
    left = xp.where(good, at_least(hold - 1, 0, xp=xp), hold)
    return xp.where(overflow, xp.full_like(hold, HOLD), left)


def check_scale_range(rule: Any) -> None:
    """Check that ``min_scale <= init_scale <= max_scale`` in a rule that adjusts its scale.

    Raises:
        ValueError: one of the three is out of its range.
    """
    check_field(rule, "min_scale", at_least=SMALLEST_SCALE, at_most=LARGEST_SCALE)
    hint = "max_scale may not be below min_scale."
    check_field(rule, "max_scale", at_least=rule.min_scale, at_most=LARGEST_SCALE, hint=hint)
    hint = "init_scale must be between min_scale and max_scale."
    check_field(rule, "init_scale", at_least=rule.min_scale, at_most=rule.max_scale, hint=hint)
