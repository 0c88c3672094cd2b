"""A million random decisions under random settings: what holds for every guard holds after each of them.

Settings and measurements are drawn from all that is allowed, extremes included. ``make test`` runs one life.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest

import stablenum
from stablenum import Decision, GuardConfig, GuardState, Observation, decide, init_guard
from stablenum.arrays import leaves
from stablenum.formats import FLOAT32_MAX, FLOAT32_TINY
from stablenum.guard.statedict import state_from_dict, state_to_dict
from tests.backends import BACKENDS

NUMPY = BACKENDS["numpy"]
LIVES, STEPS = 1000, 1000  # each life is that of a guard with settings of its own
CALM, KEPT = 300, 100  # ordinary steps at the end of a life, and those of them that must be applied
SAVED_EVERY = 100
EXTREMES = (0.0, 1e-45, 1e-38, 1e-20, 1e19, 3e38, FLOAT32_MAX, math.inf, math.nan)


class Draw(random.Random):
    """Random settings and measurements."""

    def size(self, low: float = -38.0, high: float = 38.0) -> float:
        """A number above 0 of any order of magnitude."""
        return float(10.0 ** self.uniform(low, high))

    def maybe(self, make: Any) -> Any:
        return make() if self.random() < 0.5 else None

    def clip(self) -> tuple[Any, ...]:
        rules = [
            stablenum.AdaptiveGradClip(clipping=self.size(-4, 2), eps=self.size(-6, 2), output_axis="last"),
            stablenum.AdaGC(
                clip_ratio=self.size(-2, 2),
                decay=self.uniform(0.01, 0.999),
                max_norm=self.size(-3, 3),
                warmup_steps=self.randint(1, 40),
            ),
            stablenum.AutoClip(quantile=self.uniform(0.01, 0.99), window=self.randint(1, 40)),
            stablenum.ZClip(
                alpha=self.uniform(0.01, 0.99),
                z_threshold=self.size(-2, 6),
                max_norm=self.maybe(self.size),
                warmup_steps=self.randint(2, 40),
            ),
            stablenum.ClipByNorm(self.size()),
            stablenum.ClipByGlobalNorm(self.size()),
        ]
        last = self.choice(
            [(), (stablenum.ClipByValue(self.size()),), (stablenum.ClipUpdateRMS(self.size()),)]
        )
        return (*self.sample(rules, self.randint(0, 3)), *last)

    def loss_scale(self) -> Any:
        floor = 2.0 ** self.randint(-20, 4)
        bounds = {
            "init_scale": floor * 2.0 ** self.randint(0, 10),
            "min_scale": floor,
            "max_scale": floor * 2.0 ** self.randint(10, 40),
        }
        return self.choice(
            [
                None,
                stablenum.StaticLossScale(scale=self.size(-9, 30)),
                stablenum.DynamicLossScale(
                    growth_factor=self.choice([1.1, 2.0, 16.0]),
                    backoff_factor=self.choice([0.1, 0.5, 0.99]),
                    growth_interval=self.randint(1, 50),
                    hysteresis=self.randint(1, 4),
                    hysteresis_refill=self.choice(["good_step", "growth"]),
                    **bounds,
                ),
                stablenum.LogMaxLossScale(
                    std_factor=self.uniform(0.0, 5.0),
                    mean_decay=self.uniform(0.0, 0.99),
                    std_decay=self.uniform(0.0, 0.999),
                    **bounds,
                ),
                stablenum.UnderflowAwareLossScale(
                    max_tiny=self.uniform(0.0, 0.9), recovery_interval=self.randint(1, 50), **bounds
                ),
            ]
        )

    def spike(self) -> Any:
        kind = self.choice([None, stablenum.SpikeGuard, stablenum.MeanStdSpikeGuard])
        if kind is None:
            return None
        window = self.randint(2, 40)
        return kind(
            window=window,
            min_samples=self.randint(2, window),
            threshold=self.size(-2, 3),
            watch=self.choice([("loss", "grad_norm"), ("loss",), ("grad_norm",)]),
            action=self.choice(["skip", "clip"]),
        )

    def config(self) -> GuardConfig:
        return GuardConfig(
            clip=self.clip(),
            loss_scale=self.loss_scale(),
            spike=self.spike(),
            escalate=self.maybe(
                lambda: stablenum.EscalatePrecision(after=self.randint(1, 5), for_steps=self.randint(1, 20))
            ),
            max_skips_in_a_row=self.choice([None, None, None, 30]),
        )

    def norm(self, wild: float, typical: float) -> float:
        """A norm of about a typical size, or, with probability ``wild``, any."""
        if self.random() >= wild:
            return min(typical * self.lognormvariate(0.0, 0.3), FLOAT32_MAX)
        return self.choice([self.choice(EXTREMES), self.size(-44, 38)])

    def observation(self, config: GuardConfig, n: int, wild: float, typical: float) -> Observation:
        norms = [self.norm(wild, typical) for _ in range(n)]
        units = None
        if config.unit_rule is not None:
            sides = [[self.norm(wild, typical), self.size(-6, 6)] for _ in range(n)]
            units = ([[part] for part, _ in sides], [[weight] for _, weight in sides])
            norms = [part for part, _ in sides]
        loss = self.choice([None, self.norm(wild, 2.0) * self.choice([1, 1, 1, -1] if wild else [1])])
        return NUMPY.observe(
            norms,
            loss,
            self.choice([None, self.random() < wild / 10]),
            units=units,
            amax=max([0.0, *(norm for norm in norms if not math.isnan(norm))]),
            tiny=self.random() ** 8,
        )


def is_finite(seen: Observation) -> bool:
    parts = [*seen.norms.tolist(), 0.0 if seen.loss is None else float(seen.loss)]
    return all(map(math.isfinite, parts)) and not (seen.found_inf is not None and bool(seen.found_inf))


def check_decision(decision: Decision, seen: Observation) -> None:
    applied = bool(decision.apply)
    assert is_finite(seen) or not applied
    factors = [decision.multiplier, *decision.unit_multipliers]
    for factor in factors:
        assert factor.dtype == np.float32
        assert np.all(np.isfinite(factor) & (factor >= FLOAT32_TINY))
        assert applied or np.all(factor == 1)
    assert 0 < decision.clip_coefficient <= 1
    assert applied == (stablenum.Reason(int(decision.reason)).name in ("OK", "CLIPPED", "SPIKE_CLIPPED"))


def check_state(config: GuardConfig, before: GuardState, decision: Decision, after: GuardState) -> None:
    if before.halted:
        assert all(
            np.array_equal(a, b, equal_nan=True) for a, b in zip(leaves(before), leaves(after), strict=True)
        )
        return
    skipped = not decision.apply
    assert after.step == before.step + 1
    assert after.skipped_total == before.skipped_total + skipped
    assert after.skipped_in_a_row == (before.skipped_in_a_row + 1 if skipped else 0)
    assert bool(after.halted) == (
        config.skip_limit is not None and after.nonfinite_in_a_row >= config.skip_limit
    )
    scale, rule = float(after.loss_scale.scale), config.loss_scale
    if rule is not None and rule.min_scale is not None:
        assert np.float32(rule.min_scale) <= scale <= np.float32(rule.max_scale)
    else:
        assert scale == before.loss_scale.scale


def check_saved(config: GuardConfig, state: GuardState, n: int) -> None:
    """What a guard has written, it reads."""
    text = json.dumps(state_to_dict(state), allow_nan=False)
    loaded = state_from_dict(json.loads(text), init_guard(config, n, xp=np), xp=np)
    for kept, read in zip(leaves(state), leaves(loaded), strict=True):
        np.testing.assert_array_equal(kept, read)


def live(draw: Draw) -> None:
    """One guard's life: wild steps, then calm ones, in which the wild ones must have no effect any more."""
    config, n = draw.config(), draw.randint(1, 4)
    state = init_guard(config, n, xp=np)
    wild, before_calm = draw.choice([0.01, 0.1, 0.5, 1.0]), draw.choice([draw.size(), 3 * FLOAT32_MAX])
    typical = draw.size(-3, 3)
    applied = 0
    for step in range(STEPS):
        calm = step >= STEPS - CALM
        seen = draw.observation(config, n, *((0.0, typical) if calm else (wild, before_calm)))
        decision, after = decide(config, state, seen, xp=np)
        if not state.halted:
            check_decision(decision, seen)
        check_state(config, state, decision, after)
        state = after
        if step % SAVED_EVERY == 0 or step == STEPS - 1:
            check_saved(config, state, n)
        applied += step >= STEPS - KEPT and bool(decision.apply)
    # A rule that skips spikes skips ordinary steps too if its threshold is low, but not all of them.
    skips = config.spike_rule is not None and not config.shrinks_spikes
    assert state.halted or applied >= (KEPT // 10 if skips else KEPT), applied


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, LIVES))])
def test_a_random_life(seed: int) -> None:
    with np.errstate(all="ignore"):
        live(Draw(seed))
