"""Random streams with everything in them: nothing becomes non-finite, and all backends agree."""

from __future__ import annotations

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
from stablenum.compare import BACKENDS
from stablenum.compare.agreement import compare_traces
from stablenum.compare.backends import Backend
from stablenum.compare.runner import run_guarded
from stablenum.compare.spec import Event, OptimizerSpec, Stream, TensorSpec, Tolerance

STEPS = 25
VALUES = (math.nan, math.inf, -math.inf, 0.0, 1.0, -2.5, 1e-45, 1e-38, 1e-20, 300.0, 65504.0, 7e4, 1e20, 3e38)

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
optimizers = st.sampled_from(
    [OptimizerSpec(lr=0.01), OptimizerSpec(lr=0.01, momentum=0.9), OptimizerSpec(name="adam", eps=1e-6)]
)


@st.composite
def streams(draw: Any) -> Stream:
    """A stream in which anything may happen to any tensor or the loss at any step."""
    shapes = draw(tensors)
    events = st.builds(
        Event,
        step=st.integers(0, STEPS - 1),
        tensor=st.one_of(st.integers(0, len(shapes) - 1), st.just("loss")),
        value=st.sampled_from(VALUES),
        everywhere=st.booleans(),
    )
    return Stream(
        name="random",
        steps=STEPS,
        seed=draw(st.integers(0, 1000)),
        tensors=shapes,
        magnitude=draw(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4, 1e20])),
        events=tuple(draw(st.lists(events, max_size=12))),
        optimizer=draw(optimizers),
        guard=draw(guards),
        tolerance=Tolerance(params=3e-2, why="half-precision parameters among them"),
    )


def check(stream: Stream, backends: list[Backend]) -> None:
    traces = {b.name: run_guarded(stream, b) for b in backends}
    for trace in traces.values():
        assert all(np.isfinite(p.astype(np.float64)).all() for p in trace.params), trace.backend
        for row in trace.rows:
            assert math.isfinite(row.loss_scale)
            assert 0 < row.clip_coefficient <= 1 or row.clip_coefficient < 1e-37  # flushed where subnormal
            assert math.isfinite(row.grad_norm) or not row.applied
    reference = traces.pop("numpy")
    for trace in traces.values():
        assert compare_traces("random", reference, trace, stream.tolerance).disagreement is None


@hypothesis.given(stream=streams())
@hypothesis.settings(max_examples=40)
def test_eager_torch(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "torch", "torch-foreach")])


@hypothesis.given(stream=streams())
@hypothesis.settings(max_examples=10)
def test_jax(stream: Stream) -> None:
    check(stream, [BACKENDS[name] for name in ("numpy", "jax", "jax-jit")])


@hypothesis.given(stream=streams())
@hypothesis.settings(max_examples=4)
def test_compiled_torch(stream: Stream) -> None:
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
