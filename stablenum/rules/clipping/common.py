"""What clip rules share: factors that shrink a gradient to a norm, and the base class of stateless rules."""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.arrays import at_most
from stablenum.norms.wide import Wide, choose, exceeds, quotient

__all__ = ["Stateless", "coefficient", "no_change", "shortening"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6. The same constant is used here.
_EPS = 1e-6


def coefficient(norm: Wide, max_norm: Array | float, *, xp: Namespace) -> Wide:
    """Return ``min(1, max_norm / (norm + 1e-6))``, or 1 for a non-finite norm (such a step is skipped)."""
    value = xp.where(xp.isfinite(norm.value), norm.value, xp.zeros_like(norm.value))
    factor = quotient(max_norm, Wide(value + _EPS, norm.power), xp=xp)
    return Wide(at_most(factor.value, 1.0, xp=xp), factor.power)


def shortening(norm: Wide, limit: Array, *, xp: Namespace) -> Wide:
    """Return ``limit / norm`` where the norm is finite and above its limit, otherwise 1.

    The formula omits torch's 1e-6, which would be far too large for norms, and hence limits, of about 1e-8.
    """
    above = exceeds(norm, limit, xp=xp)
    one = no_change(norm, xp=xp)
    return choose(above, quotient(limit, choose(above, norm, one, xp=xp), xp=xp), one, xp=xp)


def no_change(like: Wide, *, xp: Namespace) -> Wide:
    """Return the factor 1 in the shape of ``like``."""
    return Wide(xp.ones_like(like.value), None if like.power is None else xp.zeros_like(like.power))


class Stateless:
    """The base class of clip rules without state. Its multiplier is 1, for rules that do not act on norms."""

    __slots__ = ()

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> tuple[Array, ...]:
        """Return no state."""
        return ()

    def multiplier(
        self, state: tuple[Array, ...], norms: Wide, total: Wide, *, applied: Array, xp: Namespace
    ) -> tuple[Wide, tuple[Array, ...]]:
        """Return a factor of 1, and no state."""
        return no_change(total, xp=xp), state
