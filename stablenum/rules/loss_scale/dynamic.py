"""The dynamic loss scale: halve on overflow, double after a run of good steps.

The rule is that of torch's ``GradScaler``; the two kinds of hysteresis are those of apex, and of Megatron-LM
and DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from stablenum._support.settings_checks import check_choice, check_field
from stablenum.arrays import at_least, at_most
from stablenum.rules.loss_scale.state import LARGEST_SCALE, LossScaleState, check_scale_range, scale_state

__all__ = ["DynamicLossScale"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicLossScale:
    """Lower the scale when the gradients overflow, raise it after a run of good steps.

    The rule is that of torch's ``GradScaler``: on overflow, ``S <- S x backoff_factor`` and the count
    of good steps returns to 0; after ``growth_interval`` good steps, ``S <- S x growth_factor``.
    In addition, S stays within [``min_scale``, ``max_scale``], so that neither 1/S nor S becomes
    infinite, however many steps overflow.

    Args:
        init_scale: S at the first step.
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: the number of good steps in a row after which S grows; the last of them raises it.
        hysteresis: the number of overflows at which S is lowered; 1 lowers it at the first overflow.
        hysteresis_refill: ``"good_step"`` starts the count of overflows again at each good step (apex),
            so that only overflows *in a row* count; ``"growth"`` starts it again only when S grows
            (Megatron-LM, DeepSpeed).
        min_scale: the smallest S.
        max_scale: the largest S.

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
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_scale_range(self)
        check_field(self, "growth_factor", above=1.0, at_most=LARGEST_SCALE)
        check_field(self, "backoff_factor", above=0.0, below=1.0)
        check_field(self, "growth_interval", whole=True, at_least=1)
        check_field(self, "hysteresis", whole=True, at_least=1)
        check_choice("DynamicLossScale.hysteresis_refill", self.hysteresis_refill, ("good_step", "growth"))

    def init(self, *, xp: Namespace, device: Any = None) -> LossScaleState:
        """Return the state before the first step."""
        return scale_state(self.init_scale, self.hysteresis, xp=xp, device=device)

    def update(
        self,
        state: LossScaleState,
        *,
        overflow: Array,
        good: Array,
        xp: Namespace,
    ) -> LossScaleState:
        """Return the state after one step.

        Args:
            state: the state before.
            overflow: () bool, whether the scaled gradients were not finite.
            good: () bool, whether everything was finite. A step that is neither (because the unscaled loss
                was already non-finite) carries no information about the scale and changes nothing.
            xp: the array namespace.
        """
        scale, steps, left = state.scale, state.good_steps, state.hysteresis_left
        left_after = xp.where(overflow, at_least(left - 1, 0, xp=xp), left)
        back_off = overflow & (left_after == 0)
        steps = xp.where(overflow, xp.zeros_like(steps), xp.where(good, steps + 1, steps))
        # ">=": a count loaded from a run with another interval may already be beyond this one.
        grow = good & (steps >= self.growth_interval)
        refill = grow if self.hysteresis_refill == "growth" else good
        smaller = at_least(scale * self.backoff_factor, self.min_scale, xp=xp)
        larger = at_most(scale * self.growth_factor, self.max_scale, xp=xp)
        return LossScaleState(
            scale=xp.where(back_off, smaller, xp.where(grow, larger, scale)),
            good_steps=xp.where(grow, xp.zeros_like(steps), steps),
            hysteresis_left=xp.where(refill, xp.full_like(left, self.hysteresis), left_after),
        )
