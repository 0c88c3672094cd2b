"""Each rule over 1,000 random steps, compared with float64 Python written from its paper (tests/oracles)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipUpdateRMS,
    DynamicLossScale,
    GuardConfig,
    LogMaxLossScale,
    MeanStdSpikeGuard,
    Reason,
    SpikeGuard,
    UnderflowAwareLossScale,
    ZClip,
)
from tests.backends import BACKENDS, to_numpy
from tests.oracles import (
    AdaGCOracle,
    AdaptiveGradClipOracle,
    AutoClipOracle,
    GlobalNormOracle,
    GuardOracle,
    LogMaxOracle,
    LossScaleOracle,
    MeanStdSpikeOracle,
    SpikeGuardOracle,
    TensorNormOracle,
    UnderflowAwareOracle,
    ZClipOracle,
    clip_update_factor,
    global_norm,
)
from tests.selection import slow_unless

# Of three parameters, the first two have units and the last is excluded from AdaptiveGradClip.
WEIGHTS = ([1.0, 0.02, 0.0, 3.0], [0.5, 0.5], None)
BASES = (1.0, 0.1, 4.0)
# Uncompiled JAX is about a hundred times slower than compiled, so it runs fewer steps.
STEPS = {"numpy": 1000, "torch": 1000, "torch-compiled": 1000, "jax-jit": 1000, "jax": 60}


@dataclass(frozen=True)
class Step:
    """One step's true, unscaled measurements: units of three parameters, the loss, the largest element."""

    units: list[list[float]]
    loss: float
    amax: float


def random_steps(n: int, seed: int) -> list[Step]:
    """Lognormal norms with spikes, zeros (one tensor, all), NaN, inf, extremes and non-finite losses."""
    draw, steps = random.Random(seed), []
    for _ in range(n):
        units = [
            [base * draw.lognormvariate(0.0, 0.4) for _ in range(1 if w is None else len(w))]
            for base, w in zip(BASES, WEIGHTS, strict=True)
        ]
        loss, kind = 2.0 * draw.lognormvariate(0.0, 0.1), draw.random()
        if kind < 0.02:
            units = [[u * draw.choice([10.0, 50.0, 1e6]) for u in tensor] for tensor in units]
        elif kind < 0.04:
            units = [[0.0] * len(tensor) for tensor in units]
        elif kind < 0.07:
            units[draw.randrange(3)] = [0.0] * 2
            units = [t if len(t) == len(u) else [0.0] * len(u) for t, u in zip(units, WEIGHTS_OR_ONE)]
        elif kind < 0.09:
            units[draw.randrange(3)][0] = draw.choice([math.nan, math.inf])
        elif kind < 0.11:
            loss *= draw.choice([3.0, 20.0, math.nan, math.inf, -math.inf, 0.0])
        amax = 0.3 * max((u for tensor in units for u in tensor), default=0.0)
        if any(math.isnan(u) for tensor in units for u in tensor):
            amax = math.nan
        steps.append(Step(units, loss, amax))
    return steps


WEIGHTS_OR_ONE = [[0.0] if w is None else w for w in WEIGHTS]


def lost_fraction(scale: float) -> float:
    """The fraction of elements below float16's last bit, if half of them are below 2^-30 unscaled."""
    return 0.5 * min(1.0, 2.0**6 / scale)


CASES: dict[str, tuple[GuardConfig, Callable[[], GuardOracle]]] = {
    "AdaptiveGradClip": (
        GuardConfig(clip=AdaptiveGradClip()),
        lambda: GuardOracle(clip=[AdaptiveGradClipOracle(WEIGHTS)]),
    ),
    "AdaptiveGradClip between norms": (
        GuardConfig(clip=(ClipByNorm(2.0), AdaptiveGradClip(clipping=0.5), ClipByGlobalNorm(1.0))),
        lambda: GuardOracle(
            clip=[TensorNormOracle(2.0), AdaptiveGradClipOracle(WEIGHTS, 0.5), GlobalNormOracle(1.0)]
        ),
    ),
    "AutoClip": (
        GuardConfig(clip=AutoClip(window=100)),
        lambda: GuardOracle(clip=[AutoClipOracle(window=100)]),
    ),
    "AutoClip, the 90th percentile": (
        GuardConfig(clip=AutoClip(quantile=0.9, window=50)),
        lambda: GuardOracle(clip=[AutoClipOracle(0.9, 50)]),
    ),
    "ZClip": (GuardConfig(clip=ZClip()), lambda: GuardOracle(clip=[ZClipOracle()])),
    "ZClip, no cap": (
        GuardConfig(clip=ZClip(max_norm=None)),
        lambda: GuardOracle(clip=[ZClipOracle(max_norm=None)]),
    ),
    "AdaGC": (GuardConfig(clip=AdaGC()), lambda: GuardOracle(clip=[AdaGCOracle(3)])),
    "AdaGC, warm-up of 1": (
        GuardConfig(clip=AdaGC(warmup_steps=1)),
        lambda: GuardOracle(clip=[AdaGCOracle(3, warmup_steps=1)]),
    ),
    "AdaGC, ZClip, ClipByGlobalNorm": (
        GuardConfig(clip=(AdaGC(warmup_steps=20), ZClip(max_norm=None), ClipByGlobalNorm(2.0))),
        lambda: GuardOracle(
            clip=[AdaGCOracle(3, warmup_steps=20), ZClipOracle(max_norm=None), GlobalNormOracle(2.0)]
        ),
    ),
    "SpikeGuard": (GuardConfig(spike="skip"), lambda: GuardOracle(spike=SpikeGuardOracle())),
    "SpikeGuard clips": (
        GuardConfig(spike=SpikeGuard(action="clip", window=32, min_samples=8), clip=4.0),
        lambda: GuardOracle(
            spike=SpikeGuardOracle(action="clip", window=32, min_samples=8), clip=[GlobalNormOracle(4.0)]
        ),
    ),
    "MeanStdSpikeGuard": (
        GuardConfig(spike=MeanStdSpikeGuard(window=32, min_samples=16, threshold=4.0)),
        lambda: GuardOracle(spike=MeanStdSpikeOracle(window=32, min_samples=16, threshold=4.0)),
    ),
    "LogMaxLossScale": (
        GuardConfig(loss_scale=LogMaxLossScale(), clip=1.0),
        lambda: GuardOracle(scale=LogMaxOracle(init=2.0**16), clip=[GlobalNormOracle(1.0)]),
    ),
    "UnderflowAwareLossScale": (
        GuardConfig(loss_scale=UnderflowAwareLossScale(recovery_interval=40)),
        lambda: GuardOracle(scale=UnderflowAwareOracle(init=2.0**16, recovery=40)),
    ),
    "DynamicLossScale": (
        GuardConfig(
            loss_scale=DynamicLossScale(growth_interval=10, hysteresis=2, hysteresis_refill="growth")
        ),
        lambda: GuardOracle(scale=LossScaleOracle(init=2.0**16, interval=10, hysteresis=2, refill="growth")),
    ),
}
# Other settings of rules that run on all backends.
VARIANTS = ("AutoClip, the 90th percentile", "ZClip, no cap", "AdaGC, warm-up of 1")
VARIANTS_ON = ("numpy", "jax-jit")
# What must occur in the stream for the comparison to be meaningful.
EXPECTED_REASONS = {
    "SpikeGuard": {"SPIKE_LOSS", "SPIKE_GRAD_NORM"},
    "SpikeGuard clips": {"SPIKE_CLIPPED"},
    "MeanStdSpikeGuard": {"SPIKE_LOSS", "SPIKE_GRAD_NORM"},
}


def same_reason(actual: int, expected: str, coefficient: float) -> bool:
    """Close to a threshold, rounding decides whether a step counts as clipped."""
    if 1 - 1e-5 < coefficient <= 1 and expected in ("OK", "CLIPPED"):
        return Reason(actual) in (Reason.OK, Reason.CLIPPED)
    return Reason(actual).name == expected


# Tracing takes seconds per rule; ``make test-all`` compiles all of them.
COMPILED = {"AdaptiveGradClip between norms"}


def is_fast(rule: str, name: str) -> bool:
    return name in ("torch", "jax-jit") or (name == "torch-compiled" and rule in COMPILED)


@pytest.mark.parametrize(
    ("rule", "name"),
    slow_unless(
        lambda rule, name: name == "numpy" and rule not in VARIANTS,
        [(rule, name) for rule in CASES for name in (VARIANTS_ON if rule in VARIANTS else STEPS)],
    ),
)
def test_a_thousand_steps_agree_with_the_paper(rule, name):
    expected = agree(rule, name, STEPS[name])
    if STEPS[name] == 1000:
        reasons = {outcome.reason for _, outcome, _ in expected}
        assert reasons >= {"NONFINITE_LOSS", "NAN_GRADIENT", "INF_GRADIENT", *EXPECTED_REASONS.get(rule, ())}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("rule", "name"),
    [(rule, name) for rule in CASES for name in STEPS if rule not in VARIANTS and is_fast(rule, name)],
)
def test_each_backend_agrees_with_the_paper(rule, name):
    agree(rule, name, 150)


def agree(rule: str, name: str, n_steps: int):
    """Runs the rule and its oracle on the same steps, compares all results, and returns the oracle's."""
    config, make_oracle = CASES[rule]
    backend, oracle = BACKENDS[name], make_oracle()
    run, state = backend.prepare(config), backend.init(config, 3)
    expected, seen = [], []
    for step in random_steps(n_steps, seed=5):
        # The training loop: the loss times the scale, in float16's range.
        raw = [[u * oracle.scale for u in tensor] for tensor in step.units]
        amax = step.amax * oracle.scale
        if config.needs and amax > 65504:
            raw[0][0] = math.inf
        tiny = lost_fraction(oracle.scale)
        units = ([u if w else [] for u, w in zip(raw, WEIGHTS, strict=True)], [w or [] for w in WEIGHTS])
        observation = backend.observe(
            [global_norm(tensor) for tensor in raw],
            step.loss,
            units=units if config.unit_rule else None,
            amax=amax if config.needs else None,
            tiny=tiny if config.needs else None,
        )
        before = oracle.scale
        decision, state = run(state, observation)
        outcome = oracle.step(raw, step.loss, amax, tiny)
        expected.append((before, outcome, oracle.scale))
        seen.append((decision, state.loss_scale.scale))
    for i, ((before, outcome, after), (decision, scale)) in enumerate(zip(expected, seen, strict=True)):
        decision = to_numpy(decision)
        assert bool(decision.apply) is outcome.apply, i
        assert same_reason(int(decision.reason), outcome.reason, outcome.coefficient), (i, outcome)
        assert float(to_numpy(scale)) == after, i
        np.testing.assert_allclose(
            whole_multipliers(config, decision),
            [f for tensor in outcome.multipliers for f in tensor],
            rtol=1e-5,
            err_msg=str(i),
        )
        np.testing.assert_allclose(decision.clip_coefficient, outcome.coefficient, rtol=1e-5)
        np.testing.assert_allclose(decision.grad_norm, outcome.grad_norm, rtol=1e-5)
        assert before > 0
    return expected


def whole_multipliers(config: GuardConfig, decision) -> list[float]:
    """One factor per unit: those of the units, or the parameter's if it is excluded from the rule."""
    per_tensor = np.broadcast_to(decision.multiplier, 3)
    factors = []
    for i, weights in enumerate(WEIGHTS):
        if config.unit_rule is None or weights is None:
            factors += [per_tensor[i]] * len(WEIGHTS_OR_ONE[i])
        else:
            factors += decision.unit_multipliers[i].tolist()
    return factors


@pytest.mark.parametrize("lr", [1e-3, [1e-3, 0.1, 1.0, 3e-4]], ids=["one rate", "a rate a tensor"])
def test_clip_update_rms_agrees_with_the_paper(backend, lr):
    draw, rule = random.Random(3), ClipUpdateRMS(1.5)
    rates = lr if isinstance(lr, list) else [lr] * 4
    for _ in range(50):
        rms = [rate * draw.lognormvariate(0.5, 1.5) for rate in rates]
        rms[draw.randrange(4)] = draw.choice([0.0, 1e30, math.nan, math.inf, 1e-30])
        given = backend.asarray(lr) if isinstance(lr, list) else lr
        with np.errstate(all="ignore"):
            first, second = rule.update_factors(backend.asarray(rms), given, xp=backend.xp)
            factors = to_numpy(first) * to_numpy(second)
        expected = [clip_update_factor(*pair, 1.5) for pair in zip(rms, rates, strict=True)]
        np.testing.assert_allclose(factors, expected, rtol=1e-5)
