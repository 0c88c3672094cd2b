"""For any norms, the rules' states stay finite and no multiplier is 0, infinite or NaN."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    AutoClip,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    ClipUpdateRMS,
    DynamicLossScale,
    EscalatePrecision,
    GuardConfig,
    LogMaxLossScale,
    MeanStdSpikeGuard,
    SpikeGuard,
    StaticLossScale,
    UnderflowAwareLossScale,
    ZClip,
)
from tests.backends import BACKENDS, leaves, to_numpy
from tests.oracles import FLOAT32_MAX, global_norm
from tests.selection import REPEATS, one_in_three

# The limits of float32, subnormals (which some hardware flushes to zero) and ordinary numbers.
EXTREMES = (0.0, 1e-45, 1e-40, 2e-38, 1e-30, 1e-10, 1.0, 3.0, 1e10, 1e30, 1e38, FLOAT32_MAX)
BAD = (math.nan, math.inf)
N_UNITS = (2, 1, 0)  # the third parameter is excluded from AdaptiveGradClip

CLIPS = [
    AdaptiveGradClip(),
    AutoClip(window=4, quantile=0.5),
    ZClip(warmup_steps=3),
    ZClip(warmup_steps=2, max_norm=None),
    AdaGC(warmup_steps=3),
    AdaGC(warmup_steps=1),
    ClipByGlobalNorm(1.0),
    ClipByNorm(1e-30),
]
SCALES = [
    None,
    StaticLossScale(scale=2.0**-20),
    DynamicLossScale(growth_interval=2),
    LogMaxLossScale(),
    LogMaxLossScale(std_factor=100.0, log2_max=-100.0, mean_decay=0.5, std_decay=0.1, min_scale=2.0**-100),
    UnderflowAwareLossScale(),
]
SPIKES = [
    None,
    SpikeGuard(window=4, min_samples=2, max_in_a_row=2),
    SpikeGuard(window=4, min_samples=2, action="clip"),
    MeanStdSpikeGuard(window=4, min_samples=2),
    MeanStdSpikeGuard(window=4, min_samples=2, action="clip", threshold=0.1),
]
# Every rule alone, and some together, on the backends that compile.
CONFIGS = [
    *(GuardConfig(clip=rule) for rule in CLIPS),
    *(GuardConfig(loss_scale=rule) for rule in SCALES[1:]),
    *(GuardConfig(spike=rule) for rule in SPIKES[1:]),
    GuardConfig(clip=(AdaptiveGradClip(), ClipByGlobalNorm(1.0)), loss_scale=LogMaxLossScale()),
    GuardConfig(clip=(AdaGC(warmup_steps=2), ZClip(warmup_steps=2), AutoClip(window=3)), spike=SPIKES[2]),
]


def describe(config: GuardConfig) -> str:
    rules = [*config.clip, config.loss_scale, config.spike]
    return " ".join(type(rule).__name__ for rule in rules if rule is not None)


def observe(backend, config: GuardConfig, norms: list[float], loss: float, amax: float):
    share = [norm / math.sqrt(n) if n else 0.0 for norm, n in zip(norms, N_UNITS, strict=True)]
    units = ([[s] * n for s, n in zip(share, N_UNITS, strict=True)], [[1e-20, 1.0][:n] for n in N_UNITS])
    return backend.observe(
        norms,
        loss,
        units=units if config.unit_rule else None,
        amax=amax if config.needs else None,
        tiny=0.5 if config.needs else None,
    )


def check_sound(config: GuardConfig, decision, state, norms: list[float]) -> None:
    """Check what must hold after any step."""
    decision, state = to_numpy(decision), to_numpy(state)
    for path, leaf in leaves(state._replace(recorder=())):
        assert np.isfinite(leaf).all(), (path, leaf)
    factors = [*np.broadcast_to(decision.multiplier, 3)]
    for part in (*factors, *decision.unit_multipliers, decision.clip_coefficient):
        assert np.isfinite(part).all(), decision
        assert (part > 0).all(), decision
    if decision.apply:
        assert all(math.isfinite(float(f) * n) for f, n in zip(factors, norms, strict=True)), decision
    assert 0 < float(state.loss_scale.scale) < math.inf


def random_stream(seed: int, n: int):
    draw = random.Random(seed)
    for _ in range(n):
        norms = draw.choices(EXTREMES, k=3)
        if draw.random() < 0.1:
            norms[draw.randrange(3)] = draw.choice(BAD)
        loss = draw.choice([*EXTREMES, -1.0, -FLOAT32_MAX, *BAD])
        yield norms, loss, draw.choice([global_norm(norms), *norms])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(config, name, id=f"{describe(config)}-{name}", marks=[] if fast else REPEATS)
        for config in CONFIGS
        for name in ("numpy", "torch", "jax-jit")
        for fast in [name != "torch" or " " in describe(config) or one_in_three(describe(config))]
    ],
)
def test_extreme_norms_leave_every_state_finite(name, config):
    backend = BACKENDS[name]
    run, state = backend.prepare(config), backend.init(config, 3)
    for norms, loss, amax in random_stream(1, 250):
        decision, state = run(state, observe(backend, config, norms, loss, amax))
        check_sound(config, decision, state, norms)


steps = st.tuples(
    st.lists(st.sampled_from(EXTREMES + BAD) | st.floats(0, FLOAT32_MAX, width=32), min_size=3, max_size=3),
    st.sampled_from([*EXTREMES, -1.0, -FLOAT32_MAX, *BAD]),
)
on_norms = st.lists(st.sampled_from(CLIPS), max_size=4).filter(
    lambda rules: sum(isinstance(rule, AdaptiveGradClip) for rule in rules) < 2
)
last = st.sampled_from(
    [(), (ClipByValue(1.0),), (ClipUpdateRMS(1.0),), (ClipByValue(1.0), ClipUpdateRMS(1.0))]
)
configs = st.builds(
    lambda clip, last, **fields: GuardConfig(clip=(*clip, *last), **fields),
    on_norms,
    last,
    loss_scale=st.sampled_from(SCALES),
    spike=st.sampled_from(SPIKES),
    escalate=st.sampled_from([None, EscalatePrecision(after=2, for_steps=3)]),
)


@given(config=configs, stream=st.lists(steps, min_size=1, max_size=25))
@settings(max_examples=max(150, settings().max_examples))
def test_any_rules_together_stay_finite_on_any_stream(config, stream):
    backend = BACKENDS["numpy"]
    run, state = backend.prepare(config), backend.init(config, 3)
    for norms, loss in stream:
        decision, state = run(state, observe(backend, config, norms, loss, global_norm(norms)))
        check_sound(config, decision, state, norms)
