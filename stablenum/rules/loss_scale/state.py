"""What every loss-scale rule carries from step to step."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from stablenum.arrays import at_least
from stablenum.fields import check_field

__all__ = [
    "FIXED",
    "HOLD",
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "LossScaleState",
    "check_scale_range",
    "held",
    "may_load",
    "scale_state",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# 1/scale and scale x loss must stay far from float32's ends.
LARGEST_SCALE, SMALLEST_SCALE = 2.0**100, 2.0**-100
FIXED = -1
# Rules that move the scale at every step do not raise it for so many good steps after an overflow.
HOLD = 100


class LossScaleState(NamedTuple):
    """What a loss-scale rule carries from step to step. A checkpoint may change the rule.

    Attributes:
        scale: () float32, the factor on the loss of the next step.
        good_steps: () int32, steps without overflow since the scale last changed (since the last overflow
            for the rules that move at every step).
        hysteresis_left: () int32, overflows still tolerated before the scale backs off; -1 for a scale
            that never moves, by which a loaded state tells the two kinds apart.
        statistics: what else the rule remembers; ``()`` for most.
    """

    scale: Array
    good_steps: Array
    hysteresis_left: Array
    statistics: Any = ()


def may_load(saved: LossScaleState, like: LossScaleState) -> bool:
    """Whether the saved scale has a meaning here: only where both sides scale dynamically.

    A fixed scale (none at all is 1) is a setting, and the setting of the guard that loads holds.
    Makes the host wait.
    """
    return bool(min(saved.hysteresis_left.tolist(), like.hysteresis_left.tolist()) > FIXED)


def scale_state(
    scale: float, hysteresis: int, statistics: Any = (), *, xp: Namespace, device: Any
) -> LossScaleState:
    """The state before the first step."""
    return LossScaleState(
        scale=xp.asarray(scale, dtype=xp.float32, device=device),
        good_steps=xp.asarray(0, dtype=xp.int32, device=device),
        hysteresis_left=xp.asarray(hysteresis, dtype=xp.int32, device=device),
        statistics=statistics,
    )


def held(hold: Array, *, overflow: Array, good: Array, xp: Namespace) -> Array:
    """() int32, the good steps for which the scale may still not rise: all of them again at an overflow."""
    left = xp.where(good, at_least(hold - 1, 0, xp=xp), hold)
    return xp.where(overflow, xp.full_like(hold, HOLD), left)


def check_scale_range(rule: Any) -> None:
    """Check ``min_scale <= init_scale <= max_scale`` of a rule that moves its scale.

    Raises:
        ValueError: one of them is out of its range.
    """
    check_field(rule, "min_scale", at_least=SMALLEST_SCALE, at_most=LARGEST_SCALE)
    hint = "max_scale may not lie below min_scale."
    check_field(rule, "max_scale", at_least=rule.min_scale, at_most=LARGEST_SCALE, hint=hint)
    hint = "It lies between min_scale and max_scale."
    check_field(rule, "init_scale", at_least=rule.min_scale, at_most=rule.max_scale, hint=hint)
