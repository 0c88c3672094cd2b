"""The dynamic loss scale compared with torch's GradScaler and with an independent oracle."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from stablenum import DynamicLossScale, GuardConfig, Reason, StaticLossScale
from tests.backends import Backend, assert_bit_equal, to_numpy
from tests.oracles import LossScaleOracle

GOOD, OVERFLOW, BAD_LOSS = "good", "overflow", "bad_loss"


def observe(backend: Backend, event: str):
    norm = {GOOD: 1.0, OVERFLOW: math.inf, BAD_LOSS: math.nan}[event]
    return backend.observe([norm], loss=math.nan if event == BAD_LOSS else 0.5)


def scales(backend: Backend, rule: DynamicLossScale | StaticLossScale, events: list[str]) -> list[float]:
    """The scale after each event."""
    config = GuardConfig(loss_scale=rule)
    run, state, seen = backend.prepare(config), backend.init(config, 1), []
    for event in events:
        _, state = run(state, observe(backend, event))
        seen.append(float(to_numpy(state.loss_scale.scale)))
    return seen


def grad_scaler_scales(events: list[str], **settings: float) -> list[float]:
    """The same for torch's GradScaler in ordinary use."""
    scaler = torch.amp.GradScaler("cpu", **settings)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    seen = []
    for event in events:
        scaler.scale(weight.sum())
        weight.grad = torch.full((1,), math.inf if event == OVERFLOW else 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


@pytest.mark.parametrize(("growth", "backoff", "interval"), [(2.0, 0.5, 3), (4.0, 0.25, 5), (1.5, 0.75, 2)])
def test_the_scale_follows_grad_scaler_exactly(backend, growth, backoff, interval):
    events = random.Random(interval).choices([GOOD, OVERFLOW], weights=[3, 1], k=150)
    ours = scales(
        backend,
        DynamicLossScale(
            init_scale=2.0**10,
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=interval,
            min_scale=2.0**-90,
            max_scale=2.0**90,
        ),
        events,
    )
    theirs = grad_scaler_scales(
        events, init_scale=2.0**10, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    assert ours == theirs
    assert len(set(ours)) > 10


def test_the_defaults_are_grad_scalers():
    ours, theirs = DynamicLossScale(), torch.amp.GradScaler("cpu")
    assert ours.init_scale == theirs.get_scale()
    assert ours.growth_factor == theirs.get_growth_factor()
    assert ours.backoff_factor == theirs.get_backoff_factor()
    assert ours.growth_interval == theirs.get_growth_interval()


@pytest.mark.parametrize("refill", ["good_step", "growth"])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_floor_ceiling_and_hysteresis_follow_the_oracle(backend, refill, hysteresis):
    events = random.Random(hysteresis).choices([GOOD, OVERFLOW, BAD_LOSS], weights=[6, 3, 1], k=150)
    events += [OVERFLOW] * 8 + [GOOD] * 15
    rule = DynamicLossScale(
        init_scale=64.0,
        growth_interval=3,
        hysteresis=hysteresis,
        hysteresis_refill=refill,
        min_scale=16.0,
        max_scale=256.0,
    )
    oracle = LossScaleOracle(
        init=64.0, interval=3, hysteresis=hysteresis, refill=refill, floor=16.0, ceiling=256.0
    )
    expected = [oracle.step(event) for event in events]
    assert {16.0, 256.0} <= set(expected)  # both bounds are reached, so the test covers them
    assert scales(backend, rule, events) == expected


def test_trap_scale_collapse_after_128_bad_steps(backend):
    # torch's GradScaler reaches 2**-128 here: 1/S is inf, and one good batch puts -inf into the weights.
    config = GuardConfig(loss_scale="dynamic")
    bad = [observe(backend, OVERFLOW)] * 128
    decisions, state = backend.run(config, [*bad, observe(backend, GOOD)])
    assert not any(bool(d.apply) for d in decisions[:-1])
    assert float(to_numpy(state.loss_scale.scale)) == 1.0
    assert bool(decisions[-1].apply)
    assert decisions[-1].multiplier == 1.0


def test_trap_scale_collapse_after_2000_bad_steps(backend):
    rule = DynamicLossScale(min_scale=2.0**-100)
    events = [OVERFLOW] * 2000 + [GOOD]
    decisions, state = backend.run(
        GuardConfig(loss_scale=rule), [observe(backend, event) for event in events]
    )
    assert float(to_numpy(state.loss_scale.scale)) == 2.0**-100
    assert decisions[-1].apply
    assert decisions[-1].multiplier == 2.0**100


def test_a_count_loaded_past_the_interval_still_grows(backend):
    # With "==", as in flax and torch, the scale would never grow again.
    config = GuardConfig(loss_scale=DynamicLossScale(growth_interval=10))
    state = backend.init(config, 1)
    late = state.loss_scale._replace(good_steps=backend.asarray(5000, "int32"))
    _, after = backend.run(config, [observe(backend, GOOD)], state._replace(loss_scale=late))
    assert float(to_numpy(after.loss_scale.scale)) == 2.0**17
    assert int(to_numpy(after.loss_scale.good_steps)) == 0


def test_growth_comes_after_exactly_the_interval(backend):
    # flax grows one step late.
    rule = DynamicLossScale(init_scale=4.0, growth_interval=3)
    assert scales(backend, rule, [GOOD] * 7) == [4, 4, 8, 8, 8, 16, 16]


def test_an_overflow_on_the_growth_boundary_backs_off_and_starts_the_count_again(backend):
    rule = DynamicLossScale(init_scale=4.0, growth_interval=3)
    events = [GOOD, GOOD, OVERFLOW, GOOD, GOOD, GOOD]
    assert scales(backend, rule, events) == [4, 4, 2, 2, 2, 4]


@pytest.mark.parametrize(
    ("refill", "expected"), [("growth", [65536, 32768, 16384, 8192]), ("good_step", [65536] * 4)]
)
def test_the_refill_decides_whether_isolated_overflows_back_off(backend, refill, expected):
    # Megatron-LM and DeepSpeed document "consecutive" but back off at overflows hundreds of steps apart.
    overflows = (10, 500, 900, 1300)
    events = [OVERFLOW if step in overflows else GOOD for step in range(1301)]
    rule = DynamicLossScale(hysteresis=2, hysteresis_refill=refill)
    after = scales(backend, rule, events)
    assert [after[step] for step in overflows] == expected


def test_trap_min_scale_survives_compilation(every_backend):
    # jmp loses min_loss_scale when its state passes through jit.
    rule = DynamicLossScale(init_scale=64.0, min_scale=8.0)
    assert scales(every_backend, rule, [OVERFLOW] * 8) == [32, 16, 8, 8, 8, 8, 8, 8]


def test_growth_stops_at_max_scale_and_never_reaches_inf(backend):
    rule = DynamicLossScale(growth_interval=1, max_scale=2.0**100)
    assert max(scales(backend, rule, [GOOD] * 120)) == 2.0**100


def test_a_static_scale_never_changes(backend):
    events = [GOOD, OVERFLOW, BAD_LOSS] * 5
    assert scales(backend, StaticLossScale(scale=1024.0), events) == [1024.0] * 15


def test_a_nonfinite_loss_is_skipped_and_leaves_the_scale_state_unchanged(backend):
    config = GuardConfig(loss_scale="dynamic")
    _, before = backend.run(config, [observe(backend, GOOD)] * 3)
    for loss in (math.nan, math.inf, -math.inf):
        decisions, after = backend.run(config, [backend.observe([math.inf], loss=loss)], before)
        assert not decisions[0].apply
        assert Reason(int(decisions[0].reason)) is Reason.NONFINITE_LOSS
        assert_bit_equal(before.loss_scale, after.loss_scale)


def test_trap_the_unscaling_uses_the_scale_from_before_the_adjustment(backend):
    # mpx unscales with the adjusted scale: a step at which the scale grows then halves the gradients.
    config = GuardConfig(loss_scale=DynamicLossScale(init_scale=4.0, growth_interval=1))
    decisions, state = backend.run(config, [observe(backend, GOOD)])
    assert float(to_numpy(state.loss_scale.scale)) == 8.0
    assert decisions[0].multiplier == 0.25
    assert decisions[0].grad_norm == 0.25


def test_without_scaling_the_scale_is_one(backend):
    _, state = backend.run(GuardConfig(), [observe(backend, event) for event in (GOOD, OVERFLOW)])
    assert float(to_numpy(state.loss_scale.scale)) == 1.0
    assert to_numpy(state.loss_scale.scale).dtype == np.float32
