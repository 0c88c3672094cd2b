"""A loss scale that rises while gradients underflow and there is headroom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.arrays import at_least, at_most
from stablenum.rules.loss_scale.state import LossScaleState, check_scale_range, next_hold, scale_state

__all__ = ["UnderflowAwareLossScale", "UnderflowStatistics"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


class UnderflowStatistics(NamedTuple):
    """The statistics that the rule keeps.

    Attributes:
        highest: () float32, the largest scale at which a step was good; 0 before the first good step.
        hold: () int32, the number of good steps with the last of which underflow may raise the scale again.
    """

    highest: Array
    hold: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderflowAwareLossScale:
    """Double the scale while float16 would lose gradients, and halve it when they overflow.

    Let u be the fraction of the non-zero elements of the scaled gradients that are at most 2^-24, the
    smallest float16. After a good step ``S <- 2 S`` if u > ``max_tiny`` and amax < ``headroom``. After an
    overflow ``S <- S / 2``, and underflow raises S again after 100 good steps at the earliest (with the
    hundredth, as ``growth_interval`` counts in a dynamic scale). After ``recovery_interval`` good steps at an
    S below the highest one at which a step was good, ``S <- 2 S``, so that one overflow does not lower S
    permanently. Otherwise S stays the same. Where the backward pass ran in float16, elements below 2^-24 have
    already become zero; the elements at the last bit are then the only sign of underflow. An all-zero
    gradient changes nothing.

    The rule follows Zhao et al. 2019 (arXiv 1910.12385), who choose a scale by the probability of underflow.
    A dynamic scale, in contrast, grows after an interval whether or not anything underflows.

    The rule needs the largest element and two counts, which take one more pass over the gradients.

    Args:
        init_scale: S at the first step.
        max_tiny: the fraction u above which S doubles, in [0, 1).
        headroom: S doubles because of underflow only while the largest scaled element is below this.
        recovery_interval: the number of good steps after which a lowered S doubles, 1 or more.
        min_scale: the smallest S.
        max_scale: the largest S.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> UnderflowAwareLossScale(max_tiny=0.01).headroom
        32768.0
    """

    init_scale: float = 2.0**16
    max_tiny: float = 1e-3
    headroom: float = 2.0**15
    recovery_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    needs: ClassVar[frozenset[str]] = frozenset({"amax", "tiny"})

    def __post_init__(self) -> None:
        check_scale_range(self)
        check_field(self, "max_tiny", at_least=0.0, below=1.0)
        check_field(self, "headroom", above=0.0)
        check_field(self, "recovery_interval", whole=True, at_least=1)

    def init(self, *, xp: Namespace, device: Any = None) -> LossScaleState:
        """Return the state before the first step."""
        highest = xp.asarray(0.0, dtype=xp.float32, device=device)
        statistics = UnderflowStatistics(highest, xp.asarray(0, dtype=xp.int32, device=device))
        return scale_state(self.init_scale, 0, statistics, xp=xp, device=device)

    def update(
        self,
        state: LossScaleState,
        *,
        overflow: Array,
        good: Array,
        amax: Array,
        tiny: Array,
        xp: Namespace,
    ) -> LossScaleState:
        """Return the state after one step.

        Args:
            state: the state before.
            overflow: () bool, whether the scaled gradients were not finite.
            good: () bool, whether everything was finite.
            amax: () float32, the largest magnitude among the scaled gradients' elements.
            tiny: () float32, the fraction u.
            xp: the array namespace.
        """
        scale, highest = state.scale, state.statistics.highest
        good = good & (amax > 0)  # a gradient of zeros carries no information
        hold = next_hold(state.statistics.hold, overflow=overflow, good=good, xp=xp)
        steps = xp.where(good, state.good_steps + 1, state.good_steps)
        recovered = (steps >= self.recovery_interval) & (scale < highest)
        lost = (tiny > self.max_tiny) & (amax < self.headroom) & (hold == 0)
        rise = good & (lost | recovered)
        doubled = at_most(scale * 2.0, self.max_scale, xp=xp)
        halved = at_least(scale * 0.5, self.min_scale, xp=xp)
        return LossScaleState(
            scale=xp.where(overflow, halved, xp.where(rise, doubled, scale)),
            good_steps=xp.where(overflow | rise, xp.zeros_like(steps), steps),
            hysteresis_left=state.hysteresis_left,
            statistics=UnderflowStatistics(
                highest=xp.where(good, xp.maximum(highest, scale), highest),
                hold=hold,
            ),
        )
