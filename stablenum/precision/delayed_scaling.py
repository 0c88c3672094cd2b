"""Delayed scaling for 8-bit formats: sets each tensor's scale from the largest elements of its last uses.

The formats are those of Micikevicius et al. 2022 (arXiv 2209.05433); the rule is that of NVIDIA's
TransformerEngine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from stablenum._support.settings_checks import check_choice, check_field
from stablenum.arrays import at_least, at_most
from stablenum.errors import bad_field
from stablenum.formats import FLOAT32_TINY, FORMATS

__all__ = ["DelayedScaling", "DelayedScalingState", "fits_hardware"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# Scales stay within these bounds, so that neither x * scale nor 1 / scale leaves float32's range.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


class DelayedScalingState(NamedTuple):
    """The state of the rule for n tensors.

    Attributes:
        history: (n, length) float32, the largest magnitude of each tensor in its last uses, newest last; 0
            where there is no use yet.
        scale: (n,) float32, the factor by which each tensor is multiplied at its next use, before it is
            rounded to 8 bits.
    """

    history: Array
    scale: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedScaling:
    """``scale = (largest number of the format) / amax * 2**-margin``, with amax from the last uses.

    A use whose largest magnitude is 0 or not finite does not enter the history and leaves the scale
    unchanged. Values beyond the scale's range saturate when they are rounded; the next scale takes them into
    account.

    Args:
        format: ``"float8_e4m3fn"`` (largest number 448; forward) or ``"float8_e5m2"`` (57344; gradients).
        history: the number of uses in the history, 1 to 100,000.
        margin: bits of headroom, -16 to 16.
        amax: ``"max"`` uses the largest value in the history, ``"most_recent"`` the last one.
        power_of_two: round the scale down to a power of two, so that it costs no precision and is the same
            number in every framework.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> import array_api_compat.numpy as np
        >>> rule = DelayedScaling(power_of_two=False)
        >>> state = rule.update(rule.init(1, xp=np), np.asarray([2.0], dtype=np.float32), xp=np)
        >>> state.scale
        array([224.], dtype=float32)
    """

    format: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn"
    history: int = 1024
    margin: int = 0
    amax: Literal["max", "most_recent"] = "max"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        check_choice("DelayedScaling.format", self.format, ("float8_e4m3fn", "float8_e5m2"))
        check_field(self, "history", whole=True, at_least=1, at_most=100_000)
        check_field(self, "margin", whole=True, at_least=-16, at_most=16)
        check_choice("DelayedScaling.amax", self.amax, ("max", "most_recent"))
        if not isinstance(self.power_of_two, bool):
            raise bad_field("DelayedScaling.power_of_two", "True or False", self.power_of_two)

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> DelayedScalingState:
        """Return the state before the first use: an empty history and scales of 1."""
        return DelayedScalingState(
            history=xp.zeros((n_tensors, self.history), dtype=xp.float32, device=device),
            scale=xp.ones((n_tensors,), dtype=xp.float32, device=device),
        )

    def update(self, state: DelayedScalingState, amax: Array, *, xp: Namespace) -> DelayedScalingState:
        """Return the state after one use of each tensor.

        Args:
            state: the state before.
            amax: (n,) float32, the largest magnitude of each tensor; 0 for a tensor that was not used.
            xp: the array namespace.
        """
        valid = xp.isfinite(amax) & (amax >= FLOAT32_TINY)
        seen = xp.where(valid, amax, xp.ones_like(amax))
        longer = xp.concat([state.history[:, 1:], seen[:, None]], axis=1)
        history = xp.where(valid[:, None], longer, state.history)
        largest = seen if self.amax == "most_recent" else xp.max(history, axis=1)
        top = FORMATS[self.format].max * 2.0**-self.margin
        scale = top / at_least(xp.where(valid, largest, xp.ones_like(amax)), FLOAT32_TINY, xp=xp)
        scale = at_most(at_least(scale, _SMALLEST, xp=xp), _LARGEST, xp=xp)
        if self.power_of_two:
            scale = _power_of_two_below(scale, xp=xp)
        return DelayedScalingState(history=history, scale=xp.where(valid, scale, state.scale))

    def use(
        self, state: DelayedScalingState, amax: Array, *, xp: Namespace
    ) -> tuple[Array, DelayedScalingState]:
        """Return the scales for a use, and the state after it. A tensor's first use is scaled by its own
        ``amax``.

        Args:
            state: the state before.
            amax: as in :meth:`update`.
            xp: the array namespace.
        """
        after = self.update(state, amax, xp=xp)
        unused = xp.max(state.history, axis=1) == 0
        return xp.where(unused, after.scale, state.scale), after


def _power_of_two_below(x: Array, *, xp: Namespace) -> Array:
    """Return the largest power of two up to ``x``, exactly in every framework, for x in [2**-100, 2**100]."""
    power = xp.ones_like(x)
    # Binary search: upwards for x >= 1, then downwards for x < 1.
    for k in (64, 32, 16, 8, 4, 2, 1):
        power = xp.where(power * 2.0**k <= x, power * 2.0**k, power)
    for k in (64, 32, 16, 8, 4, 2, 1):
        power = xp.where(power * 2.0 ** -(k - 1) > x, power * 2.0**-k, power)
    return power


def fits_hardware(*sizes: int) -> bool:
    """Return whether hardware multiplies 8-bit matrices of these sizes: multiples of 16 that are not 0.

    With others, ``torch._scaled_mm`` raises, and XLA gave NaN on an H200.

    Example:
        >>> fits_hardware(32, 64), fits_hardware(32, 24), fits_hardware(0, 16)
        (True, False, False)
    """
    return all(size > 0 and size % 16 == 0 for size in sizes)
