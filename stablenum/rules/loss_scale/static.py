"""A constant loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.rules.loss_scale.state import FIXED, LARGEST_SCALE, SMALLEST_SCALE, LossScaleState, scale_state

__all__ = ["StaticLossScale"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticLossScale:
    """Multiply the loss by a constant S and divide the gradients by S (arXiv 1710.03740).

    A step that overflows is skipped and does not change the scale.

    Args:
        scale: S, from 2**-100 to 2**100; a power of two costs no precision.

    Raises:
        ValueError: ``scale`` is not finite, or is outside [2**-100, 2**100].

    Example:
        >>> StaticLossScale(scale=1024.0)
        StaticLossScale(scale=1024.0)
    """

    scale: float
    needs: ClassVar[frozenset[str]] = frozenset()
    min_scale: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_field(self, "scale", at_least=SMALLEST_SCALE, at_most=LARGEST_SCALE)

    def init(self, *, xp: Namespace, device: Any = None) -> LossScaleState:
        """Return the state before the first step."""
        return scale_state(self.scale, FIXED, xp=xp, device=device)

    def update(
        self,
        state: LossScaleState,
        *,
        overflow: Array,
        good: Array,
        xp: Namespace,
    ) -> LossScaleState:
        """Return the unchanged state."""
        return state
