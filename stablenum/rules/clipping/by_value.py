"""Clamping each element. The rule needs the elements and not only their norms, so the adapter applies it,
after all other rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.rules.clipping.common import Stateless

__all__ = ["ClipByValue"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class ClipByValue(Stateless):
    """Clamp each element of the unscaled gradients to [-max_value, max_value].

    The rule is the same as ``torch.nn.utils.clip_grad_value_`` and ``optax.clip``, and costs one pass
    over the gradients. It does not remove NaN, and it would hide an overflow if it ran before the
    finiteness check. The guard therefore checks first, and skips a non-finite step.

    Args:
        max_value: above 0, in the units of the unscaled gradients.

    Raises:
        ValueError: ``max_value`` is not a positive finite number.

    Example:
        >>> ClipByValue(0.1)
        ClipByValue(max_value=0.1)
    """

    max_value: float
    per_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_field(self, "max_value", above=0.0)
