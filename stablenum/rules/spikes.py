"""Spike rules: refuse or shorten a step whose loss or gradient norm stands out.

A spike is finite. It comes of a bad batch, or of a batch that meets the parameters badly, and one such
step can throw a run back by hours. Both rules compare a step with the last ones; they differ in what they
call typical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from stablenum.arrays import at_least
from stablenum.errors import bad_field, check_choice
from stablenum.fields import check_field
from stablenum.rules.clipping.common import shortening
from stablenum.rules.windows import count, empty_window, mean_and_std, median, median_and_mad, push, tells

__all__ = [
    "SIGNALS",
    "MeanStdSpikeGuard",
    "SpikeGuard",
    "SpikeRule",
    "SpikeState",
    "Verdict",
    "as_spike_rule",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

SIGNALS = ("loss", "grad_norm")
# The standard deviation of a normal distribution over its median absolute deviation.
_NORMAL = 1.4826
# How many ordinary steps make up for one refusal.
_WEIGHT = 4


class SpikeState(NamedTuple):
    """What has been seen of both signals.

    Attributes:
        loss: (window,) float32, newest last; inf where nothing has come yet.
        grad_norm: (window,) float32, likewise.
        debt: () int32, what refusals weigh: 4 for each, less 1 for each step that was not refused.
    """

    loss: Array
    grad_norm: Array
    debt: Array


class Verdict(NamedTuple):
    """What a spike rule says of a step.

    Attributes:
        loss, grad_norm: () bool, which signal stands out.
        factor: () float32, what to shrink the gradients by, clipping aside; 1 where nothing stands out.
    """

    loss: Array
    grad_norm: Array
    factor: Array

    @property
    def any(self) -> Array:
        """() bool, whether one of them does."""
        return self.loss | self.grad_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    window: int = 128
    threshold: float = 6.0
    min_samples: int = 64
    watch: tuple[str, ...] = SIGNALS
    action: Literal["skip", "clip"] = "skip"

    def _check(self) -> None:
        name = type(self).__name__
        check_field(self, "window", whole=True, at_least=2, at_most=100_000)
        check_field(self, "threshold", above=0.0)
        check_field(self, "min_samples", whole=True, at_least=2, at_most=self.window)
        watch = (self.watch,) if isinstance(self.watch, str) else self.watch
        known = isinstance(watch, (tuple, list)) and len(watch) > 0 and all(w in SIGNALS for w in watch)
        if not known:
            raise bad_field(f"{name}.watch", "'loss', 'grad_norm' or both", self.watch)
        object.__setattr__(self, "watch", tuple(watch))
        check_choice(f"{name}.action", self.action, ("skip", "clip"))

    def init(self, *, xp: Namespace, device: Any = None) -> SpikeState:
        """Nothing seen yet."""
        return SpikeState(
            loss=empty_window(self.window, xp=xp, device=device),
            grad_norm=empty_window(self.window, xp=xp, device=device),
            debt=xp.asarray(0, dtype=xp.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeGuard(_Settings):
    """Refuse a step whose loss or gradient norm lies far above the median of the last steps.

    A value x is a spike if ``x > median + threshold * max(1.4826 MAD, min_spread |median|)``, over the last
    ``window`` values of applied steps; MAD is the median absolute deviation, and 1.4826 makes it the
    standard deviation of normal values (Rousseeuw & Croux 1993, doi 10.1080/01621459.1993.10476408). Only
    what lies above counts. Up to half the window may be spikes without hiding the next one, and the floor
    ``min_spread`` keeps a constant loss from making every change a spike.

    Nothing is refused before ``min_samples`` values. Non-finite and zero values are no evidence. After
    ``max_in_a_row`` refusals in a row the step is applied and the windows begin anew: that is no spike but
    a new level, and a rule may not stop a training. So too when more than one step in five goes on being
    refused, as where two kinds of batches alternate: refusals weigh 4, other steps -1, and
    ``4 * max_in_a_row`` is borne. Where no loss is given the norm alone is judged. Gradients are clipped
    after the verdict, not before.

    Args:
        window: applied steps remembered, 2 to 100,000.
        threshold: in robust standard deviations, above 0.
        min_samples: values needed for a verdict, 2 to ``window``.
        watch: ``("loss", "grad_norm")``, or one of them. Where several PyTorch ranks train together
            the loss is not seen.
        action: ``"skip"`` refuses the step whole; ``"clip"`` applies it with its gradients shrunk to the
            median norm, and takes its value into the window.
        min_spread: the floor on the spread, as a fraction of the median, 0 or more.
        max_in_a_row: of the action ``"skip"``, 1 or more.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> SpikeGuard(watch="grad_norm", action="clip").watch
        ('grad_norm',)
    """

    min_spread: float = 0.01
    max_in_a_row: int = 8

    def __post_init__(self) -> None:
        self._check()
        check_field(self, "min_spread", at_least=0.0)
        check_field(self, "max_in_a_row", whole=True, at_least=1)

    def judge(
        self, state: SpikeState, loss: Array | None, grad_norm: Array, *, finite: Array, xp: Namespace
    ) -> tuple[Verdict, SpikeState]:
        """The verdict on a step and the next state.

        Args:
            state: the state before.
            loss: () float32, the unscaled loss, or None.
            grad_norm: () float32, unscaled, before clipping.
            finite: () bool; a step that is not is refused by others and leaves no trace here.
            xp: the array namespace.
        """
        by_loss, by_norm = _standing_out(self, state, loss, grad_norm, finite=finite, xp=xp)
        spike, skips = by_loss | by_norm, self.action == "skip"
        anew = spike & (state.debt >= _WEIGHT * self.max_in_a_row) if skips else xp.zeros_like(spike)
        spike = spike & xp.logical_not(anew)
        refused = spike if skips else xp.zeros_like(spike)
        lighter = at_least(state.debt - 1, 0, xp=xp)
        debt = xp.where(refused, state.debt + _WEIGHT, xp.where(finite, lighter, state.debt))
        debt = xp.where(anew, xp.zeros_like(debt), debt)
        after = _observe(state, loss, grad_norm, finite & xp.logical_not(refused), debt, anew=anew, xp=xp)
        factor = _shrink(state, grad_norm, spike, action=self.action, xp=xp)
        return Verdict(by_loss & spike, by_norm & spike, factor), after

    def _limit(self, window: Array, *, xp: Namespace) -> Array:
        middle, mad = median_and_mad(window, xp=xp)
        spread = xp.maximum(_NORMAL * mad, self.min_spread * xp.abs(middle))
        return middle + self.threshold * spread


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStdSpikeGuard(_Settings):
    """Refuse a step whose loss or gradient norm lies far above the mean of the last steps.

    A value x is a spike if ``x > mean + threshold * sd`` over the last ``window`` values, skipped spikes
    among them; sd with n - 1. It is the rule of OLMo-core's ``SkipStepOptimizer`` and, but for n and a
    floor of 1e-6, of levanter's ``skip_step``, here for comparison: one spike raises mean and sd and so
    hides the next ones for ``window`` steps, and after constant values (sd = 0) any rise is a spike.
    Unlike theirs, non-finite and zero values do not enter. Prefer :class:`SpikeGuard`.

    Args:
        window: steps remembered, 2 to 100,000.
        threshold: in standard deviations, above 0.
        min_samples: values needed for a verdict, 2 to ``window``.
        watch: ``("loss", "grad_norm")``, or one of them.
        action: ``"skip"``, or ``"clip"`` to shrink the gradients to the median norm.

    Raises:
        ValueError: a field is out of its range.

    Example:
        >>> MeanStdSpikeGuard().threshold
        6.0
    """

    def __post_init__(self) -> None:
        self._check()

    def judge(
        self, state: SpikeState, loss: Array | None, grad_norm: Array, *, finite: Array, xp: Namespace
    ) -> tuple[Verdict, SpikeState]:
        """The verdict on a step and the next state, as :meth:`SpikeGuard.judge`."""
        by_loss, by_norm = _standing_out(self, state, loss, grad_norm, finite=finite, xp=xp)
        after = _observe(state, loss, grad_norm, finite, state.debt, anew=None, xp=xp)
        factor = _shrink(state, grad_norm, by_loss | by_norm, action=self.action, xp=xp)
        return Verdict(by_loss, by_norm, factor), after

    def _limit(self, window: Array, *, xp: Namespace) -> Array:
        mean, std = mean_and_std(window, ddof=1, xp=xp)
        return mean + self.threshold * std


SpikeRule: TypeAlias = SpikeGuard | MeanStdSpikeGuard


def as_spike_rule(value: object) -> SpikeRule | None:
    """``GuardConfig.spike`` in its one stored form: a rule or None.

    Args:
        value: None, a rule, or ``"skip"`` or ``"clip"`` for a :class:`SpikeGuard` with that action.

    Raises:
        ValueError: anything else.
    """
    if value is None or isinstance(value, (SpikeGuard, MeanStdSpikeGuard)):
        return value
    if isinstance(value, str) and value in ("skip", "clip"):
        return SpikeGuard(action=cast("Literal['skip', 'clip']", value))
    raise bad_field("spike", "None, 'skip', 'clip', SpikeGuard(...) or MeanStdSpikeGuard(...)", value)


def _standing_out(
    rule: SpikeRule, state: SpikeState, loss: Array | None, grad_norm: Array, *, finite: Array, xp: Namespace
) -> tuple[Array, Array]:
    """Whether the loss and whether the norm lies above its limit: two () bool."""

    def above(signal: str, value: Array | None, window: Array) -> Array:
        if value is None or signal not in rule.watch:
            return xp.zeros_like(finite)
        enough = count(window, xp=xp) >= rule.min_samples
        return finite & enough & (value > rule._limit(window, xp=xp))

    return above("loss", loss, state.loss), above("grad_norm", grad_norm, state.grad_norm)


def _observe(
    state: SpikeState,
    loss: Array | None,
    grad_norm: Array,
    enters: Array,
    debt: Array,
    *,
    anew: Array | None,
    xp: Namespace,
) -> SpikeState:
    """The next state: both values in their windows if the step ``enters``, which begin ``anew`` if so."""

    def next_window(window: Array, value: Array | None) -> Array:
        if anew is not None:
            window = xp.where(anew, xp.full_like(window, float("inf")), window)
        if value is None:
            return window
        return push(window, value, enters & tells(value, xp=xp), xp=xp)

    return SpikeState(next_window(state.loss, loss), next_window(state.grad_norm, grad_norm), debt)


def _shrink(state: SpikeState, grad_norm: Array, spike: Array, *, action: str, xp: Namespace) -> Array:
    """() float32: for the action ``"clip"``, what makes a spike's gradients as long as the median's."""
    if action == "skip":
        return xp.ones_like(grad_norm)
    typical = median(state.grad_norm, xp=xp)  # inf if none is known: nothing to shrink to
    return xp.where(spike, shortening(grad_norm, typical, xp=xp), xp.ones_like(grad_norm))
