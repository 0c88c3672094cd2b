"""AdaGC: clips each tensor's norm relative to its own moving mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.arrays import at_most
from stablenum.formats import FLOAT32_MAX
from stablenum.norms.wide import Wide, choose, recorded, shrink
from stablenum.rules.clipping.common import coefficient, shortening
from stablenum.rules.windows import OUTLIER_RATIO, is_informative

__all__ = ["AdaGC", "AdaGCState"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# A norm of the warm-up is left out if it is smaller than the third smallest by more than this factor. Such
# norms occur because a spike in one tensor shrinks all others in that step, and gamma would take thousands of
# steps to rise again.
_FAR_BELOW = 3.0
# One more than the number of such norms that a warm-up may contain without any effect on gamma.
_LOWEST = 3
# Beside ordinary tensors, a norm below this may be measured as 0 where float32 flushes: it may be that of
# 2**32 elements of 2**-63, whose squares are below float32's smallest normal number.
_FLUSHED = 2.0**-47


class AdaGCState(NamedTuple):
    """The statistics of each tensor: every array has one row per parameter (see ``PER_TENSOR_STATES``).

    Attributes:
        gamma: (n,) float32, the moving mean of the clipped norm; 0 before the end of the warm-up.
        lowest: (n, 3) float32 (fewer columns if the warm-up has fewer steps), the smallest clipped norms of
            the warm-up, ascending; the largest float32 number where there is no norm yet.
        seen: (n,) int32, the number of norms observed, up to ``warmup_steps``.
        far: (n,) int32, the number of observations in a row that were above 100 times gamma.
    """

    gamma: Array
    lowest: Array
    seen: Array
    far: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaGC:
    """Clip each tensor's norm at ``clip_ratio`` times the moving mean of its own clipped norm.

    For a norm n, ``h = min(1, clip_ratio * gamma / n)`` and ``gamma <- decay * gamma + (1 - decay) * h n``.
    In its first ``warmup_steps`` steps a tensor is clipped with all others at the joint norm ``max_norm``;
    gamma starts as the smallest norm after this clipping. The rule is that of Wang et al. 2025 (arXiv
    2502.11034).

    Skipped steps, and zero gradients of a tensor, do not count, so a tensor that starts late has its own
    warm-up. A norm below 2**-47 is taken for 0, unless the joint norm is below that too. Up to two norms of
    the warm-up that are less than a third of the third smallest are left out (one spike elsewhere shrinks all
    tensors in that step). A tensor whose norm is above 100 times gamma for
    ``warmup_steps`` observations in a row starts its warm-up again, because gamma itself grows by at most
    (1 - decay)(clip_ratio - 1), by default a thousandth, per step.

    Args:
        clip_ratio: above 0; 1.05 in the paper.
        decay: the decay of gamma, between 0 and 1.
        max_norm: the limit on the joint norm during the warm-up, above 0.
        warmup_steps: the length of the warm-up in observations, 1 or more.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> AdaGC(warmup_steps=50).decay
        0.98
    """

    clip_ratio: float = 1.05
    decay: float = 0.98
    max_norm: float = 1.0
    warmup_steps: int = 100
    per_tensor: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_field(self, "clip_ratio", above=0.0)
        check_field(self, "decay", above=0.0, below=1.0)
        check_field(self, "max_norm", above=0.0)
        check_field(self, "warmup_steps", whole=True, at_least=1)

    def init(self, n_tensors: int, *, xp: Namespace, device: Any = None) -> AdaGCState:
        """Return the state before the first step."""
        return AdaGCState(
            gamma=xp.zeros((n_tensors,), dtype=xp.float32, device=device),
            lowest=xp.full(
                (n_tensors, min(_LOWEST, self.warmup_steps)), FLOAT32_MAX, dtype=xp.float32, device=device
            ),
            seen=xp.zeros((n_tensors,), dtype=xp.int32, device=device),
            far=xp.zeros((n_tensors,), dtype=xp.int32, device=device),
        )

    def multiplier(
        self, state: AdaGCState, norms: Wide, total: Wide, *, applied: Array, xp: Namespace
    ) -> tuple[Wide, AdaGCState]:
        """Return the (n,) factors, one per tensor, and the next state."""
        warm = state.seen >= self.warmup_steps
        joint = coefficient(total, self.max_norm, xp=xp)
        limit = at_most(self.clip_ratio * state.gamma, FLOAT32_MAX, xp=xp)
        factor = choose(warm, shortening(norms, limit, xp=xp), joint, xp=xp)
        norm, clipped = recorded(norms, xp=xp), recorded(shrink(norms, factor, xp=xp), xp=xp)
        measured = (norm >= _FLUSHED) | (recorded(total, xp=xp) < _FLUSHED)
        counts = applied & measured & is_informative(norm, xp=xp)
        return factor, self._observe(state, norm, clipped, warm, counts, xp=xp)

    def _observe(
        self, state: AdaGCState, norms: Array, clipped: Array, warm: Array, counts: Array, *, xp: Namespace
    ) -> AdaGCState:
        """Return the state after a step, updated for the tensors where ``counts`` is True."""
        warming = counts & xp.logical_not(warm)
        seen = xp.where(warming, state.seen + 1, state.seen)
        smallest = xp.sort(xp.concat([state.lowest, clipped[:, None]], axis=1), axis=1)[:, :-1]
        lowest = xp.where(warming[:, None], smallest, state.lowest)
        begins = warming & (seen >= self.warmup_steps)
        # This is not written as decay * gamma + ..., because in float32 decay and 1 - decay do not add up
        # to 1, so gamma would drift.
        gamma = state.gamma + (1.0 - self.decay) * (clipped - state.gamma)
        gamma = xp.where(counts & warm, gamma, state.gamma)
        gamma = xp.where(begins, _smallest_kept(lowest, xp=xp), gamma)
        is_far = warm & (norms > OUTLIER_RATIO * state.gamma)
        far = xp.where(counts, xp.where(is_far, state.far + 1, xp.zeros_like(state.far)), state.far)
        again = far >= self.warmup_steps
        return AdaGCState(
            gamma=xp.where(again, xp.zeros_like(gamma), gamma),
            lowest=xp.where(again[:, None], xp.full_like(lowest, FLOAT32_MAX), lowest),
            seen=xp.where(again, xp.zeros_like(seen), seen),
            far=xp.where(again, xp.zeros_like(far), far),
        )


def _smallest_kept(lowest: Array, *, xp: Namespace) -> Array:
    """Return the smallest value of each row that is at least a third of the row's last value."""
    kept = lowest >= lowest[:, -1:] / _FAR_BELOW
    return xp.min(xp.where(kept, lowest, xp.full_like(lowest, FLOAT32_MAX)), axis=1)
