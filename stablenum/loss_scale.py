"""Loss-scale rules: multiply the loss by a scale so that small half-precision gradients survive.

Each rule is a frozen config with ``init`` and ``update``; what varies in training is
:class:`LossScaleState`. Both rules share that structure, so a checkpoint may change rule.

Sources: Micikevicius et al. 2018 (arXiv 1710.03740); torch ``GradScaler`` for the dynamic law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from stablenum.bounds import at_least, at_most
from stablenum.errors import check_choice, check_int, check_number

__all__ = [
    "LARGEST_SCALE",
    "SMALLEST_SCALE",
    "DynamicLossScale",
    "LossScale",
    "LossScaleState",
    "StaticLossScale",
    "may_load",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# 1/scale and scale x loss must stay far from float32's ends.
LARGEST_SCALE, SMALLEST_SCALE = 2.0**100, 2.0**-100
_FIXED = -1


class LossScaleState(NamedTuple):
    """What a loss-scale rule carries from step to step.

    Attributes:
        scale: () float32, the factor on the loss of the next step.
        good_steps: () int32, steps without overflow since the scale last changed.
        hysteresis_left: () int32, overflows still tolerated before the scale backs off; -1 for a scale
            that never moves, by which a loaded state tells the two kinds apart.
    """

    scale: Array
    good_steps: Array
    hysteresis_left: Array


def may_load(saved: LossScaleState, like: LossScaleState) -> bool:
    """Whether the saved scale has a meaning here: only where both sides scale dynamically.

    A fixed scale (none at all is 1) is a setting, and the setting of the guard that loads holds.
    Makes the host wait.
    """
    return bool(min(saved.hysteresis_left.tolist(), like.hysteresis_left.tolist()) > _FIXED)


def _state(scale: float, hysteresis: int, *, xp: Namespace, device: Any) -> LossScaleState:
    return LossScaleState(
        scale=xp.asarray(scale, dtype=xp.float32, device=device),
        good_steps=xp.asarray(0, dtype=xp.int32, device=device),
        hysteresis_left=xp.asarray(hysteresis, dtype=xp.int32, device=device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticLossScale:
    """A constant loss scale: the loss times S, the gradients over S (arXiv 1710.03740).

    An overflow skips the step and leaves the scale alone.

    Args:
        scale: S, a positive finite number; powers of two cost no precision.

    Raises:
        ValueError: ``scale`` is not finite, or is outside [2**-100, 2**100].

    Example:
        >>> StaticLossScale(scale=1024.0)
        StaticLossScale(scale=1024.0)
    """

    scale: float

    def __post_init__(self) -> None:
        number = check_number(
            "StaticLossScale.scale", self.scale, at_least=SMALLEST_SCALE, at_most=LARGEST_SCALE
        )
        object.__setattr__(self, "scale", number)

    def init(self, *, xp: Namespace, device: Any = None) -> LossScaleState:
        """The state before the first step."""
        return _state(float(self.scale), _FIXED, xp=xp, device=device)

    def update(
        self, state: LossScaleState, *, overflow: Array, applied: Array, xp: Namespace
    ) -> LossScaleState:
        """The unchanged state."""
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicLossScale:
    """Back off when the gradients overflow, grow after a run of good steps.

    The law of torch's ``GradScaler``: on overflow ``S <- S x backoff_factor`` and the count of
    good steps returns to 0; after ``growth_interval`` good steps ``S <- S x growth_factor``.
    In addition S stays within [``min_scale``, ``max_scale``], so that neither 1/S nor S can
    become infinite however long the trouble lasts.

    Args:
        init_scale: S at the first step.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: good steps in a row before S grows.
        hysteresis: overflows tolerated before S backs off; 1 backs off at the first.
        hysteresis_refill: ``"good_step"`` restores the tolerance at each good step (apex), so
            that only overflows *in a row* count; ``"growth"`` restores it only when S grows
            (Megatron-LM, DeepSpeed).
        min_scale: the floor.
        max_scale: the ceiling.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> DynamicLossScale(init_scale=2.0**14, growth_interval=500).backoff_factor
        0.5
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    hysteresis_refill: Literal["good_step", "growth"] = "good_step"
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        self._check("min_scale", at_least=SMALLEST_SCALE, at_most=LARGEST_SCALE)
        self._check(
            "max_scale",
            at_least=self.min_scale,
            at_most=LARGEST_SCALE,
            hint="max_scale may not lie below min_scale.",
        )
        self._check(
            "init_scale",
            at_least=self.min_scale,
            at_most=self.max_scale,
            hint="It lies between min_scale and max_scale.",
        )
        self._check("growth_factor", above=1.0, at_most=LARGEST_SCALE)
        self._check("backoff_factor", above=0.0, below=1.0)
        for name in ("growth_interval", "hysteresis"):
            number = check_int(f"DynamicLossScale.{name}", getattr(self, name), at_least=1)
            object.__setattr__(self, name, number)
        check_choice("DynamicLossScale.hysteresis_refill", self.hysteresis_refill, ("good_step", "growth"))

    def _check(self, name: str, **bounds: Any) -> None:
        """Check a number and store it as a plain float."""
        number = check_number(f"DynamicLossScale.{name}", getattr(self, name), **bounds)
        object.__setattr__(self, name, number)

    def init(self, *, xp: Namespace, device: Any = None) -> LossScaleState:
        """The state before the first step."""
        return _state(float(self.init_scale), self.hysteresis, xp=xp, device=device)

    def update(
        self, state: LossScaleState, *, overflow: Array, applied: Array, xp: Namespace
    ) -> LossScaleState:
        """The state after one step.

        Args:
            state: the state before.
            overflow: () bool, the scaled gradients were not finite.
            applied: () bool, the step was good. A step that is neither (the unscaled loss was
                already non-finite) says nothing about the scale and changes nothing.
            xp: the array namespace.
        """
        scale, good, left = state
        left_after = xp.where(overflow, at_least(left - 1, 0, xp=xp), left)
        back_off = overflow & (left_after == 0)
        good = xp.where(overflow, xp.zeros_like(good), xp.where(applied, good + 1, good))
        # ">=": a count restored from another interval may already lie beyond this one.
        grow = applied & (good >= self.growth_interval)
        full = xp.full_like(left, self.hysteresis)
        refill = grow if self.hysteresis_refill == "growth" else applied
        smaller = at_least(scale * self.backoff_factor, self.min_scale, xp=xp)
        larger = at_most(scale * self.growth_factor, self.max_scale, xp=xp)
        return LossScaleState(
            scale=xp.where(back_off, smaller, xp.where(grow, larger, scale)),
            good_steps=xp.where(grow, xp.zeros_like(good), good),
            hysteresis_left=xp.where(refill, full, left_after),
        )


LossScale: TypeAlias = StaticLossScale | DynamicLossScale
