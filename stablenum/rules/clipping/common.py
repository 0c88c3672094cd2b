"""What clip rules share: factors that shrink a gradient to a norm, and the base class of stateless rules."""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.arrays import at_least, at_most
from stablenum.formats import FLOAT32_TINY

__all__ = ["Stateless", "coefficient", "floored", "shortening"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6. The same constant is used here.
_EPS = 1e-6


def coefficient(norm: Array, max_norm: Array | float, *, xp: Namespace) -> Array:
    """Return ``min(1, max_norm / (norm + 1e-6))``, or 1 for a non-finite norm (such a step is skipped)."""
    norm = xp.where(xp.isfinite(norm), norm, xp.zeros_like(norm))
    return at_most(max_norm / (norm + _EPS), 1.0, xp=xp)


def shortening(norm: Array, limit: Array, *, xp: Namespace) -> Array:
    """Return ``limit / norm`` where the norm is finite and above its limit, otherwise 1.

    The formula omits torch's 1e-6, which would be far too large for norms, and hence limits, of about 1e-8.
    """
    above = xp.isfinite(norm) & (norm > limit)
    return xp.where(above, limit / xp.where(above, norm, xp.ones_like(norm)), xp.ones_like(norm))


def floored(factor: Array, *, xp: Namespace) -> Array:
    """Return the factor, raised to at least float32's smallest normal number.

    A factor that was flushed to zero would silently turn finite gradients into zeros.
    """
    return at_least(factor, FLOAT32_TINY, xp=xp)


class Stateless:
    """The base class of clip rules without state. Its multiplier is 1, for rules that do not act on norms."""

    __slots__ = ()

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> tuple[Array, ...]:
        """Return no state."""
        return ()

    def multiplier(
        self, state: tuple[Array, ...], norms: Array, total: Array, *, applied: Array, xp: Namespace
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return a factor of 1, and no state."""
        return xp.ones_like(total), state
