"""Clipping by a fixed norm: of all gradients together, or of each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.norms.wide import Wide
from stablenum.rules.clipping.common import Stateless, coefficient

__all__ = ["ClipByGlobalNorm", "ClipByNorm"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class ClipByGlobalNorm(Stateless):
    """Shrink all gradients by one factor so that their joint L2 norm is at most ``max_norm``.

    The factor is ``c = min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``
    (Pascanu et al. 2013, arXiv 1211.5063). The norm is computed so that finite gradients of any size
    have a norm: they are clipped to ``max_norm``, whatever their size, never zeroed. A zero gradient stays
    zero. Only in PyTorch on an accelerator or inside ``torch.compile`` do norms saturate at float32's
    largest number, 3.4e38, before the loss scale S is taken out, and the factor divided by S is at least
    the smallest normal number, 1.2e-38; at these limits the resulting norm is above ``max_norm``.

    Args:
        max_norm: above 0, in the units of the unscaled gradients.

    Raises:
        ValueError: ``max_norm`` is not a positive finite number.

    Example:
        >>> ClipByGlobalNorm(1.0)
        ClipByGlobalNorm(max_norm=1.0)
    """

    max_norm: float
    per_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_field(self, "max_norm", above=0.0)

    def multiplier(
        self, state: tuple[Array, ...], norms: Wide, total: Wide, *, applied: Array, xp: Namespace
    ) -> tuple[Wide, tuple[Array, ...]]:
        """Return the () factor for all tensors, and the next state."""
        return coefficient(total, self.max_norm, xp=xp), state


@dataclass(frozen=True, slots=True)
class ClipByNorm(Stateless):
    """Shrink each tensor's gradient on its own so that its L2 norm is at most ``max_norm``.

    The formula of :class:`ClipByGlobalNorm` is applied to each tensor separately, so the direction of the
    joint gradient changes.

    Args:
        max_norm: above 0, in the units of the unscaled gradients.

    Raises:
        ValueError: ``max_norm`` is not a positive finite number.

    Example:
        >>> ClipByNorm(0.5).max_norm
        0.5
    """

    max_norm: float
    per_tensor: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_field(self, "max_norm", above=0.0)

    def multiplier(
        self, state: tuple[Array, ...], norms: Wide, total: Wide, *, applied: Array, xp: Namespace
    ) -> tuple[Wide, tuple[Array, ...]]:
        """Return the (n,) factors, one per tensor, and the next state."""
        return coefficient(norms, self.max_norm, xp=xp), state
