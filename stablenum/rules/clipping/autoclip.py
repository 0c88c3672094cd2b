"""AutoClip: clips the norm at a quantile of the norms so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.norms.wide import Wide, recorded
from stablenum.rules.clipping.common import shortening
from stablenum.rules.windows import empty_window, is_informative, push, quantile

__all__ = ["AutoClip", "AutoClipState"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


class AutoClipState(NamedTuple):
    """The last norms.

    Attributes:
        norms: (window,) float32, newest last; ``EMPTY`` where there is no norm yet.
    """

    norms: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoClip:
    """Clip the joint norm at a quantile of the joint norms of the last steps, this one included.

    The factor is ``c = min(1, q / norm)``, where q is the ``quantile`` (linear between ranks) of the
    last ``window`` norms before clipping. Seetharaman et al. 2020 (arXiv 2007.14469) use the tenth
    percentile of all norms so far: nine steps in ten are clipped, and the length of the update hardly
    varies.

    Only applied steps with a non-zero gradient enter the window, so skipped steps do not change the
    threshold; a norm of 1e30 counts as one large norm among many.

    Args:
        quantile: between 0 and 1.
        window: the number of norms to keep, 1 to 100,000.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> AutoClip(quantile=0.5).window
        1000
    """

    quantile: float = 0.1
    window: int = 1000
    per_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_field(self, "quantile", above=0.0, below=1.0)
        check_field(self, "window", whole=True, at_least=1, at_most=100_000)

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> AutoClipState:
        """Return an empty window."""
        return AutoClipState(empty_window(self.window, xp=xp, device=device))

    def multiplier(
        self, state: AutoClipState, norms: Wide, total: Wide, *, applied: Array, xp: Namespace
    ) -> tuple[Wide, AutoClipState]:
        """Return the () factor for all tensors, and the next state."""
        norm = recorded(total, xp=xp)
        window = push(state.norms, norm, applied & is_informative(norm, xp=xp), xp=xp)
        # The quantile of an empty window (zero gradients from the start) is inf, which clips nothing.
        factor = shortening(total, quantile(window, self.quantile, xp=xp), xp=xp)
        return factor, AutoClipState(window)
