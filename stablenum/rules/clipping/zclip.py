"""ZClip: clips norms that are far above their moving mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.arrays import at_most, combine_norms
from stablenum.formats import FLOAT32_MAX
from stablenum.norms.wide import Wide, recorded
from stablenum.rules.clipping.common import shortening
from stablenum.rules.windows import empty_window, is_informative, mean_and_std, push, without_outliers

__all__ = ["ZClip", "ZClipState"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_EPS = 1e-6
_LEAST_SPREAD = 0.01  # of the mean


class ZClipState(NamedTuple):
    """The moving statistics of the norm.

    Attributes:
        mean, std: () float32, the mean and the standard deviation. (The variance would be infinite for norms
            of 1e20.)
        first: (warmup_steps,) float32, the norms of the warm-up; ``EMPTY`` where there is none yet.
        seen: () int32, the number of norms observed, up to ``warmup_steps``.
    """

    mean: Array
    std: Array
    first: Array
    seen: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ZClip:
    """Clip a joint norm that lies more than ``z_threshold`` standard deviations above its moving mean.

    Let z = (n - m) / (s + 1e-6) for a norm n, a moving mean m and a moving standard deviation s. Where
    z > ``z_threshold``, the norm is clipped to ``n* = m + z_threshold^2 s / z``, which is lower for larger z,
    and n* replaces n in the statistics: ``m <- alpha m + (1 - alpha) n``, then
    ``s^2 <- alpha s^2 + (1 - alpha) (n - m)^2`` with the new m. They start as the mean and standard deviation
    of the first ``warmup_steps`` norms. In addition, the norm is clipped to ``max_norm``, during the warm-up
    too. The rule is that of Kumar et al. 2025 (arXiv 2504.02507).

    Only applied steps with a nonzero gradient enter the statistics. Norms of the warm-up above 100 times
    their median are left out, because the moving mean would take thousands of steps to forget 1e30. The
    spread s is at least a hundredth of m; otherwise, after norms that are constant for a while, all later
    norms would be clipped to that value permanently. As in the paper, the rule follows a lasting increase
    slowly: gradients are clipped to about the old level.

    Args:
        alpha: the decay of mean and variance, between 0 and 1.
        z_threshold: above 0.
        max_norm: the largest norm at any time, above 0; or None.
        warmup_steps: the length of the warm-up in steps, 2 to 100,000.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> ZClip(max_norm=None).z_threshold
        2.5
    """

    alpha: float = 0.97
    z_threshold: float = 2.5
    max_norm: float | None = 1.0
    warmup_steps: int = 25
    per_tensor: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_field(self, "alpha", above=0.0, below=1.0)
        check_field(self, "z_threshold", above=0.0, at_most=1e6)
        if self.max_norm is not None:
            check_field(self, "max_norm", above=0.0)
        check_field(self, "warmup_steps", whole=True, at_least=2, at_most=100_000)

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> ZClipState:
        """Return the state before the first step."""
        return ZClipState(
            mean=xp.asarray(0.0, dtype=xp.float32, device=device),
            std=xp.asarray(0.0, dtype=xp.float32, device=device),
            first=empty_window(self.warmup_steps, xp=xp, device=device),
            seen=xp.asarray(0, dtype=xp.int32, device=device),
        )

    def multiplier(
        self, state: ZClipState, norms: Wide, total: Wide, *, applied: Array, xp: Namespace
    ) -> tuple[Wide, ZClipState]:
        """Return the () factor for all tensors, and the next state."""
        warm = state.seen >= self.warmup_steps
        norm = recorded(total, xp=xp)
        limit = self._limit(state, norm, xp=xp)
        limit = xp.where(warm, limit, xp.full_like(limit, math.inf))
        bound = limit if self.max_norm is None else at_most(limit, self.max_norm, xp=xp)
        factor = shortening(total, bound, xp=xp)
        counts = applied & is_informative(norm, xp=xp)
        return factor, self._observe(state, xp.minimum(norm, limit), warm, counts, xp=xp)

    def _limit(self, state: ZClipState, norm: Array, *, xp: Namespace) -> Array:
        """Return n* where z is above the threshold, otherwise inf."""
        std = xp.maximum(state.std, _LEAST_SPREAD * state.mean)
        z = (norm - state.mean) / (std + _EPS)
        stands_out = z > self.z_threshold
        # In this order no intermediate result overflows, even for the largest norms.
        beyond = self.z_threshold / xp.where(stands_out, z, xp.ones_like(z))
        limit = at_most(state.mean + self.z_threshold * (beyond * std), FLOAT32_MAX, xp=xp)
        return xp.where(stands_out, limit, xp.full_like(limit, math.inf))

    def _observe(
        self, state: ZClipState, norm: Array, warm: Array, counts: Array, *, xp: Namespace
    ) -> ZClipState:
        """Return the state after a step; it changes only where ``counts`` is True."""
        first = push(state.first, norm, counts & xp.logical_not(warm), xp=xp)
        begun_mean, begun_std = mean_and_std(without_outliers(first, xp=xp), xp=xp)
        # This is not written as alpha * mean + ..., because in float32 alpha and 1 - alpha do not add up to
        # 1, so the mean would drift.
        mean = state.mean + (1.0 - self.alpha) * (norm - state.mean)
        off = math.sqrt(1.0 - self.alpha) * xp.abs(norm - mean)
        std = combine_norms(xp.stack([math.sqrt(self.alpha) * state.std, off]), xp=xp)
        seen = xp.where(counts, at_most(state.seen + 1, self.warmup_steps, xp=xp), state.seen)
        begins = counts & xp.logical_not(warm) & (seen >= self.warmup_steps)
        goes_on = counts & warm
        return ZClipState(
            mean=xp.where(begins, begun_mean, xp.where(goes_on, mean, state.mean)),
            std=xp.where(begins, begun_std, xp.where(goes_on, std, state.std)),
            first=first,
            seen=seen,
        )
