"""Passes a recorded stream through the real ``decide``, on NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import array_api_compat.numpy as xp
import numpy as np

from benchmarks.recorded import RecordedStream
from stablenum import Decision, GuardConfig, GuardState, Observation, Reason, decide, init_guard
from stablenum.reference.guarded import measure, measure_extremes, measure_loss, measure_units

__all__ = ["Drawn", "Step", "norms_only", "replay", "with_elements"]

Array: TypeAlias = Any
Observe: TypeAlias = Callable[[GuardState, int], Observation]


class Step(NamedTuple):
    """One step: the observation, the state before, the decision, the state after."""

    seen: Observation
    before: GuardState
    decision: Decision
    after: GuardState

    @property
    def applied(self) -> bool:
        """Whether the step was applied."""
        return bool(self.decision.apply)

    @property
    def reason(self) -> Reason:
        """Why the step was applied or skipped."""
        return Reason(int(self.decision.reason))

    @property
    def scale(self) -> float:
        """The loss scale of the step."""
        return float(self.before.loss_scale.scale)

    @property
    def factor(self) -> Array:
        """() or (n,), the clipping factor of each gradient; NaN for a skipped step."""
        factor = np.asarray(self.decision.multiplier, np.float64) * self.scale
        return factor if self.applied else factor * np.nan

    @property
    def norms(self) -> Array:
        """(n,), of the unscaled gradients."""
        return np.asarray(self.seen.norms, np.float64) / self.scale

    @property
    def norm_after(self) -> float:
        """The joint norm that the optimizer got; NaN for a skipped step."""
        return float(np.sqrt(np.sum((self.factor * self.norms) ** 2)))


def replay(
    config: GuardConfig, observe: Observe, steps: Any, *, state: GuardState | None = None
) -> list[Step]:
    """Run the steps one after another, beginning with ``state`` (None: the initial state)."""
    done = []
    with np.errstate(all="ignore"):  # rules compute with inf and NaN, and select afterwards
        for t in steps:
            if state is None:
                n = observe(init_guard(config, 0, xp=xp), t).norms.shape[0]
                state = init_guard(config, n, xp=xp)
            seen = observe(state, t)
            decision, after = decide(config, state, seen, xp=xp)
            done.append(Step(seen, state, decision, after))
            state = after
    return done


def norms_only(stream: RecordedStream) -> Observe:
    """The recorded norms and losses; with a loss scale, the norms are multiplied by it."""

    def observe(state: GuardState, t: int) -> Observation:
        scale = float(state.loss_scale.scale)
        return Observation(
            norms=np.asarray(stream.norms[t] * scale, np.float32), loss=measure_loss(stream.loss[t])
        )

    return observe


@dataclass(frozen=True)
class Drawn:
    """Gradients with the recorded norms, for rules that look at more than norms.

    The recordings hold no elements, so these are drawn at random: log-normal magnitudes of a given ``spread``
    (in powers of e) with random signs, each tensor scaled to its recorded norm.
    """

    stream: RecordedStream
    shapes: tuple[tuple[int, ...], ...]
    spread: float = 1.0
    seed: int = 0

    def gradients(self, t: int) -> list[Array]:
        """The float32 gradients of step ``t``, the same at every call."""
        rng = np.random.default_rng((self.seed, t))
        made = []
        for shape, norm in zip(self.shapes, self.stream.norms[t], strict=True):
            elements = np.exp(self.spread * rng.standard_normal(shape)) * rng.choice([-1.0, 1.0], shape)
            if np.isfinite(norm):
                made.append((elements * (norm / np.linalg.norm(elements))).astype(np.float32))
            else:  # in practice, a single element is bad
                elements.flat[0] = norm
                made.append(elements.astype(np.float32))
        return made

    def weights(self) -> list[Array]:
        """Random weights, as layers are initialised: standard deviation 1/sqrt(inputs)."""
        rng = np.random.default_rng(self.seed)
        return [rng.standard_normal(s).astype(np.float32) / np.float32(np.sqrt(s[0])) for s in self.shapes]


def with_elements(config: GuardConfig, drawn: Drawn, *, half: bool = False) -> Observe:
    """What the NumPy adapter measures of random gradients; ``half``: after a backward pass in float16."""
    weights, names = drawn.weights(), list(drawn.stream.names)
    gradients_of = functools.cache(drawn.gradients)

    def observe(state: GuardState, t: int) -> Observation:
        scale = float(state.loss_scale.scale)
        gradients = [g * np.float32(scale) for g in gradients_of(t)]
        if half:
            gradients = [g.astype(np.float16) for g in gradients]
        rule = config.unit_rule
        amax, tiny = measure_extremes(gradients)
        return Observation(
            norms=measure(gradients),
            loss=measure_loss(drawn.stream.loss[t]),
            units=None if rule is None else measure_units(rule, names, gradients, weights),
            amax=amax,
            tiny=tiny,
        )

    return observe
