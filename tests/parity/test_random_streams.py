"""Random streams with everything in them: nothing becomes non-finite, and all backends agree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from stablenum import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DynamicLossScale,
    GuardConfig,
    StaticLossScale,
)
from stablenum.commands.compare.agreement import compare_traces
from stablenum.commands.compare.backends import BACKENDS, Backend
from stablenum.commands.compare.runner import run_guarded
from stablenum.commands.compare.scenarios import Event, OptimizerSpec, Stream, TensorSpec, Tolerance
from stablenum.formats import FLOAT32_MAX
from stablenum.rules.clipping import AdaGC, AdaptiveGradClip, AutoClip, ClipUpdateRMS, ZClip
from stablenum.rules.loss_scale import LogMaxLossScale, UnderflowAwareLossScale
from stablenum.rules.spikes import MeanStdSpikeGuard, SpikeGuard
from tests.selection import REPEATS

STEPS = 25
VALUES = (math.nan, math.inf, -math.inf, 0.0, 1.0, -2.5, 1e-45, 1e-38, 1e-20, 300.0, 65504.0, 7e4, 1e20, 3e38)
# XLA treats a subnormal number as 0, which does not enter a rule's statistics.
NORMAL = tuple(value for value in VALUES if value not in (1e-45, 1e-38))

tensors = st.lists(
    st.builds(
        TensorSpec,
        shape=st.sampled_from([(3, 2), (5,), (0, 4), (1,)]),
        dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16"]),
    ),
    min_size=1,
    max_size=4,
).map(tuple)
# Every guard here bounds the update: an unclipped finite gradient of 1e38 may well overflow a parameter.
guards = st.builds(
    GuardConfig,
    clip=st.sampled_from(
        [
            1.0,
            (ClipByNorm(0.5),),
            (ClipByNorm(2.0), ClipByGlobalNorm(1.0)),
            (ClipByGlobalNorm(1.0), ClipByValue(0.3)),
        ]
    ),
    loss_scale=st.sampled_from(
        [
            None,
            StaticLossScale(scale=1024.0),
            DynamicLossScale(growth_interval=3),
            DynamicLossScale(init_scale=4.0, growth_interval=2, hysteresis=2, max_scale=2.0**40),
        ]
    ),
)
# Windows and warm-ups of a few steps, so that a short stream reaches every phase of a rule.
unbounded = st.lists(
    st.sampled_from(
        [
            AdaptiveGradClip(clipping=0.05, output_axis="last"),
            AdaptiveGradClip(clipping=0.05, output_axis="first", exclude="0"),
            AdaGC(warmup_steps=4),
            AutoClip(quantile=0.3, window=8),
            AutoClip(quantile=0.9, window=8),
            ZClip(max_norm=None, warmup_steps=4),
            ClipByNorm(3.0),
        ]
    ),
    max_size=3,
    unique_by=type,
)
last = st.sampled_from(
    [(), (ClipByValue(0.3),), (ClipUpdateRMS(0.5),), (ClipByValue(0.3), ClipUpdateRMS(0.5))]
)
spikes = st.sampled_from([SpikeGuard, MeanStdSpikeGuard])
rule_guards = st.builds(
    GuardConfig,
    clip=st.builds(lambda rules, bound: (*rules, ClipByGlobalNorm(1.0), *bound), unbounded, last),
    loss_scale=st.sampled_from(
        [
            None,
            LogMaxLossScale(),
            LogMaxLossScale(std_factor=0.0, mean_decay=0.5, std_decay=0.5, min_scale=2.0**-20),
            UnderflowAwareLossScale(init_scale=4.0),
            DynamicLossScale(growth_interval=5, hysteresis=2, hysteresis_refill="growth"),
            DynamicLossScale(init_scale=4.0, growth_interval=3, min_scale=2.0),
        ]
    ),
    spike=st.one_of(
        st.none(),
        st.builds(
            lambda rule, watch, action: rule(window=8, min_samples=4, watch=watch, action=action),
            spikes,
            st.sampled_from([("loss", "grad_norm"), ("loss",), ("grad_norm",)]),
            st.sampled_from(["skip", "clip"]),
        ),
        st.just(SpikeGuard(window=8, min_samples=4, max_in_a_row=2)),
    ),
)
optimizers = st.sampled_from(
    [OptimizerSpec(lr=0.01), OptimizerSpec(lr=0.01, momentum=0.9), OptimizerSpec(name="adam", eps=1e-6)]
)


@st.composite
def streams(
    draw: Any,
    guards: st.SearchStrategy[GuardConfig] = guards,
    values: tuple[float, ...] = VALUES,
    length: int = STEPS,
) -> Stream:
    """A stream with any event on any tensor or the loss at any step."""
    shapes = draw(tensors)
    steps, targets = st.integers(0, length - 1), st.one_of(st.integers(0, len(shapes) - 1), st.just("loss"))
    events = st.one_of(
        st.builds(Event, step=steps, tensor=targets, value=st.sampled_from(values), everywhere=st.booleans()),
        st.builds(Event, step=steps, tensor=st.just("all"), factor=st.sampled_from([0.0, 20.0, 1e4, 1e30])),
        st.builds(
            lambda step, tensor, factor, lasts: Event(
                step=step, until=step + lasts, tensor=tensor, factor=factor
            ),
            steps,
            st.one_of(targets, st.just("all")),
            st.sampled_from([0.0, 0.01, 10.0]),
            st.integers(0, STEPS),
        ),
    )
    guard = draw(guards)
    # A rule that uses the weights depends on how they were rounded.
    norm = 1e-6 if guard.unit_rule is None else 3e-2
    return Stream(
        name="random",
        steps=length,
        seed=draw(st.integers(0, 1000)),
        tensors=shapes,
        magnitude=draw(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e20])),
        jitter=draw(st.sampled_from([0.0, 0.3])),
        events=tuple(draw(st.lists(events, min_size=length // 50, max_size=12 + length // 20))),
        optimizer=draw(optimizers),
        guard=guard,
        tolerance=Tolerance(norm=norm, params=3e-2, why="half-precision parameters among them"),
    )


def check(stream: Stream, backends: list[Backend]) -> None:
    traces = {b.name: run_guarded(stream, b) for b in backends}
    for trace in traces.values():
        assert all(np.isfinite(p.astype(np.float64)).all() for p in trace.params), trace.backend
        for row in trace.rows:
            assert math.isfinite(row.loss_scale)
            assert 0 < row.clip_coefficient <= 1 or row.clip_coefficient < 1e-37  # flushed if subnormal
            assert math.isfinite(row.grad_norm) or not row.applied
    reference = traces.pop("numpy")
    for trace in traces.values():
        assert compare_traces("random", reference, trace, stream.tolerance).disagreement is None


@hypothesis.given(stream=streams())
@hypothesis.settings(max_examples=40)
def test_eager_torch(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "torch", "torch-foreach")])


@hypothesis.given(stream=streams())
@hypothesis.settings(max_examples=2)
def test_jax(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "jax", "jax-jit")])


@REPEATS  # each stream is compiled for seconds
@hypothesis.given(stream=streams())
@hypothesis.settings(max_examples=10)
def test_jax_on_more_streams(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "jax", "jax-jit")])


@REPEATS  # the rules below are also compiled by ``make test``
@hypothesis.given(stream=streams())
@hypothesis.settings(max_examples=2)
def test_compiled_torch(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "torch-compiled")])


@hypothesis.given(stream=streams(rule_guards, NORMAL))
@hypothesis.settings(max_examples=20)
def test_rules_on_eager_torch(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "torch", "torch-foreach")])


@hypothesis.given(stream=streams(rule_guards, NORMAL))
@hypothesis.settings(max_examples=2)
def test_rules_on_jax(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "jax", "jax-jit")])


@REPEATS
@hypothesis.given(stream=streams(rule_guards, NORMAL))
@hypothesis.settings(max_examples=6)
def test_rules_on_jax_on_more_streams(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "jax", "jax-jit")])


@hypothesis.given(stream=streams(rule_guards, NORMAL))
@hypothesis.settings(max_examples=1)
def test_rules_on_compiled_torch(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "torch-compiled")])


def test_the_check_can_fail() -> None:
    """An unclipped gradient of 3e38 with a learning rate of 10 does overflow a parameter."""
    stream = Stream(
        name="fails",
        steps=2,
        events=(Event(step=0, value=3e38),),
        optimizer=OptimizerSpec(lr=10.0),
    )
    with pytest.raises(AssertionError, match="numpy"):
        check(stream, [BACKENDS["numpy"]])


LONG, LIVES = 1000, 10


@REPEATS  # 200,000 steps
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_long_streams(seed: int) -> None:
    """Every decision, reason and scale of torch and JAX is that of the reference, over 1,000 steps each.

    Parameters in 16 bits, and what a rule takes from them, are rounded differently in each step. The variance
    of logarithms is a small difference of large numbers: of about 16, to 1e-6, where they vary by 0.1.
    """

    @hypothesis.seed(seed)
    @hypothesis.given(stream=streams(st.one_of(guards, rule_guards), NORMAL, LONG))
    @hypothesis.settings(max_examples=LIVES, phases=[hypothesis.Phase.generate], database=None)
    def lives(stream: Stream) -> None:
        norm = 1e-4 if stream.guard.unit_rule is None else FLOAT32_MAX
        rounded = Tolerance(norm=norm, params=FLOAT32_MAX, why="parameters in 16 bits over 1,000 steps")
        backends = [BACKENDS[name] for name in ("numpy", "torch", "jax-jit")]
        check(dataclasses.replace(stream, tolerance=rounded), backends)

    lives()
