"""What clip rules share: factors that shorten a gradient to a norm, and the base of rules without state."""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.arrays import at_least, at_most
from stablenum.formats import FLOAT32_TINY

__all__ = ["Stateless", "coefficient", "floored", "shortening"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; we keep its constant.
_EPS = 1e-6


def coefficient(norm: Array, max_norm: Array | float, *, xp: Namespace) -> Array:
    """``min(1, max_norm / (norm + 1e-6))``; 1 where the norm is not finite (such a step is skipped)."""
    norm = xp.where(xp.isfinite(norm), norm, xp.zeros_like(norm))
    return at_most(max_norm / (norm + _EPS), 1.0, xp=xp)


def shortening(norm: Array, limit: Array, *, xp: Namespace) -> Array:
    """``limit / norm`` where a finite norm lies above its limit, else 1.

    Without the 1e-6: a limit taken from norms of 1e-8 would be far off with it.
    """
    above = xp.isfinite(norm) & (norm > limit)
    return xp.where(above, limit / xp.where(above, norm, xp.ones_like(norm)), xp.ones_like(norm))


def floored(factor: Array, *, xp: Namespace) -> Array:
    """The factor, but not below float32's smallest normal number.

    A factor that flushed to zero would silently zero finite gradients.
    """
    return at_least(factor, FLOAT32_TINY, xp=xp)


class Stateless:
    """A clip rule without state. By itself it leaves all gradients alone: some rules act elsewhere."""

    __slots__ = ()

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> tuple[Array, ...]:
        """No state."""
        return ()

    def multiplier(
        self, state: tuple[Array, ...], norms: Array, total: Array, *, applied: Array, xp: Namespace
    ) -> tuple[Array, tuple[Array, ...]]:
        """1, and no state."""
        return xp.ones_like(total), state
