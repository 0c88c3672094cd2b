"""Spike rules: skip or clip a step whose loss or gradient norm is far above the typical value.

A spike is finite. It is caused by a bad batch, or by a batch that is bad for the current parameters, and one
such step can set a run back by hours. Both rules compare a step with the steps before it; they differ in the
statistics they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from stablenum._support.settings_checks import check_choice, check_field
from stablenum.arrays import at_least
from stablenum.errors import bad_field
from stablenum.rules.windows import (
    EMPTY,
    count,
    empty_window,
    is_informative,
    mean_and_std,
    median,
    median_and_mad,
    push,
)

__all__ = [
    "SIGNALS",
    "MeanStdSpikeGuard",
    "SpikeGuard",
    "SpikeRule",
    "SpikeState",
    "Verdict",
    "as_spike_rule",
    "forget_norms",
    "joined",
    "watches_norms",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

SIGNALS = ("loss", "grad_norm")
# The standard deviation of a normal distribution divided by its median absolute deviation.
_NORMAL = 1.4826
# How many ordinary steps offset one skip.
_WEIGHT = 4


class SpikeState(NamedTuple):
    """The past values of both signals, and a count of skips.

    Attributes:
        loss: (window,) float32, newest last; ``EMPTY`` where there is no value yet.
        grad_norm: (window,) float32, in the same form.
        debt: () int32, a counter that never falls below 0: each skip adds 4, and each other
            finite step subtracts 1.
    """

    loss: Array
    grad_norm: Array
    debt: Array


class Verdict(NamedTuple):
    """The verdict of a spike rule on a step.

    Attributes:
        loss, grad_norm: () bool, whether this signal is a spike.
        limit: () float32, the norm to which gradients are shrunk before the clip rules; inf for no shrinking.
    """

    loss: Array
    grad_norm: Array
    limit: Array

    @property
    def any(self) -> Array:
        """() bool, whether at least one signal is a spike."""
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
        """Return the state before the first step: empty windows."""
        return SpikeState(
            loss=empty_window(self.window, xp=xp, device=device),
            grad_norm=empty_window(self.window, xp=xp, device=device),
            debt=xp.asarray(0, dtype=xp.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeGuard(_Settings):
    """Skip a step whose loss or gradient norm is far above the median of the last steps.

    A value x is a spike if ``x > median + threshold * max(1.4826 MAD, min_spread |median|)``, where the
    median and the median absolute deviation (MAD) are those of the last ``window`` values of applied steps.
    The factor 1.4826 turns the MAD of normal values into their standard deviation (Rousseeuw & Croux 1993,
    doi 10.1080/01621459.1993.10476408). Only values above the median can be spikes. Up to half of the window
    may be spikes without hiding the next one, and ``min_spread`` prevents every change after a constant loss
    from counting as a spike.

    No step is skipped before ``min_samples`` values are in the window. Non-finite and zero values never enter
    the window. If the step after ``max_in_a_row`` skips in a row is also too high, it is applied and the
    windows are emptied, because this is a new level and not a spike, and a rule must not stop the training.
    The same happens if more than one step in five keeps being skipped, for example where two kinds of batches
    alternate: a counter rises by 4 at each skip and falls by 1 at each other step, and the rule resets when
    the counter reaches ``4 * max_in_a_row``. If no loss is given, only the norm is judged. Gradients are
    clipped after the verdict, not before.

    Args:
        window: the number of applied steps to compare with, 2 to 100,000.
        threshold: in robust standard deviations, above 0.
        min_samples: the number of values needed for a verdict, 2 to ``window``.
        watch: ``("loss", "grad_norm")``, or one of them. Where several ranks decide together, the loss is the
            mean of theirs.
        action: ``"skip"`` skips the step entirely; ``"clip"`` applies it with its gradients shrunk to the
            median norm, and its values enter the windows.
        min_spread: the smallest spread, as a fraction of the median; 0 or more.
        max_in_a_row: for the action ``"skip"``, the number of skips in a row before the rule resets; 1 or
            more.

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
        """Return the verdict on a step and the next state.

        Args:
            state: the state before.
            loss: () float32, the unscaled loss, or None.
            grad_norm: () float32, unscaled, before clipping.
            finite: () bool; a non-finite step is skipped anyway and does not change the state.
            xp: the array namespace.
        """
        by_loss, by_norm = _standing_out(self, state, loss, grad_norm, finite=finite, xp=xp)
        spike, skips = by_loss | by_norm, self.action == "skip"
        restart = spike & (state.debt >= _WEIGHT * self.max_in_a_row) if skips else xp.zeros_like(spike)
        spike = spike & xp.logical_not(restart)
        skipped = spike if skips else xp.zeros_like(spike)
        reduced = at_least(state.debt - 1, 0, xp=xp)
        debt = xp.where(skipped, state.debt + _WEIGHT, xp.where(finite, reduced, state.debt))
        debt = xp.where(restart, xp.zeros_like(debt), debt)
        enters = finite & xp.logical_not(skipped)
        after = _observe(state, loss, grad_norm, enters, debt, restart=restart, xp=xp)
        limit = _shrinks_to(state, spike, action=self.action, xp=xp)
        return Verdict(by_loss & spike, by_norm & spike, limit), after

    def _limit(self, window: Array, *, xp: Namespace) -> Array:
        middle, mad = median_and_mad(window, xp=xp)
        spread = xp.maximum(_NORMAL * mad, self.min_spread * xp.abs(middle))
        return middle + self.threshold * spread


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStdSpikeGuard(_Settings):
    """Skip a step whose loss or gradient norm is far above the mean of the last steps.

    A value x is a spike if ``x > mean + threshold * sd``, where mean and sd are those of the last ``window``
    values, including the values of skipped spikes; sd divides by n - 1. This is the rule of OLMo-core's
    ``SkipStepOptimizer``. It is also the rule of levanter's ``skip_step``, except that levanter divides by n
    and has a minimum of 1e-6. The rule is included for comparison: one spike raises mean and sd and so hides
    the next ones for ``window`` steps, and after constant values (sd = 0) any increase is a spike. Unlike in
    those libraries, non-finite and zero values do not enter the window. Prefer :class:`SpikeGuard`.

    Args:
        window: the number of steps to compare with, 2 to 100,000.
        threshold: in standard deviations, above 0.
        min_samples: the number of values needed for a verdict, 2 to ``window``.
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
        """Return the verdict on a step and the next state, as :meth:`SpikeGuard.judge` does."""
        by_loss, by_norm = _standing_out(self, state, loss, grad_norm, finite=finite, xp=xp)
        after = _observe(state, loss, grad_norm, finite, state.debt, restart=None, xp=xp)
        limit = _shrinks_to(state, by_loss | by_norm, action=self.action, xp=xp)
        return Verdict(by_loss, by_norm, limit), after

    def _limit(self, window: Array, *, xp: Namespace) -> Array:
        mean, std = mean_and_std(window, ddof=1, xp=xp)
        return mean + self.threshold * std


SpikeRule: TypeAlias = SpikeGuard | MeanStdSpikeGuard


def as_spike_rule(value: object) -> SpikeRule | None:
    """Return a value of ``GuardConfig.spike`` in the form in which it is stored: a rule or None.

    Args:
        value: None, a rule, or ``"skip"`` or ``"clip"`` for a :class:`SpikeGuard` with that action.

    Raises:
        ValueError: ``value`` is anything else.
    """
    if value is None or isinstance(value, (SpikeGuard, MeanStdSpikeGuard)):
        return value
    if isinstance(value, str) and value in ("skip", "clip"):
        return SpikeGuard(action=cast("Literal['skip', 'clip']", value))
    raise bad_field("spike", "None, 'skip', 'clip', SpikeGuard(...) or MeanStdSpikeGuard(...)", value)


def _standing_out(
    rule: SpikeRule, state: SpikeState, loss: Array | None, grad_norm: Array, *, finite: Array, xp: Namespace
) -> tuple[Array, Array]:
    """Return whether the loss and the norm are above their limits: two () bool."""

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
    restart: Array | None,
    xp: Namespace,
) -> SpikeState:
    """Return the next state: the windows are emptied first if ``restart`` is True, and the values enter if
    ``enters`` is True."""

    def next_window(window: Array, value: Array | None) -> Array:
        if restart is not None:
            window = xp.where(restart, xp.full_like(window, EMPTY), window)
        if value is None:
            return window
        return push(window, value, enters & is_informative(value, xp=xp), xp=xp)

    return SpikeState(next_window(state.loss, loss), next_window(state.grad_norm, grad_norm), debt)


def _shrinks_to(state: SpikeState, spike: Array, *, action: str, xp: Namespace) -> Array:
    """Return () float32: for the action ``"clip"``, the median norm, to which a spike is shrunk; otherwise
    inf."""
    none = xp.full_like(state.debt, float("inf"), dtype=xp.float32)
    if action == "skip":
        return none
    return xp.where(spike, median(state.grad_norm, xp=xp), none)  # the median of an empty window is inf


def forget_norms(state: SpikeState, *, xp: Namespace) -> SpikeState:
    """Return the state without past norms of gradients, for a step in which other parameters take part."""
    return SpikeState(state.loss, xp.full_like(state.grad_norm, EMPTY), state.debt)


def joined(rule: SpikeRule, names: Sequence[str]) -> str:
    """Return what is said when parameters join whose gradients no value in the window includes.

    Args:
        rule: the rule, which watches the norm.
        names: the parameters', at least one.
    """
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"Parameters have joined the training: {names[0]}{others}. The norms of earlier gradients are those "
        f"of fewer parameters, so {type(rule).__name__} starts that statistic afresh: none of the next "
        f"{rule.min_samples} steps is skipped for its gradient norm."
    )


def watches_norms(rule: SpikeRule | None) -> bool:
    """Return whether a rule compares the norms of gradients."""
    return rule is not None and "grad_norm" in rule.watch
