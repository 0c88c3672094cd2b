"""Stopping: a guard at its limit halts, and the host gets an error that says where, why and what to do."""

from __future__ import annotations

import math
import pickle

import pytest

from stablenum import (
    DynamicLossScale,
    GuardConfig,
    LogMaxLossScale,
    NonFiniteError,
    Reason,
    UnderflowAwareLossScale,
)
from stablenum.guard.halting import check_halted
from stablenum.guard.readout import history, metrics
from tests.backends import BACKENDS, Backend, assert_bit_equal, to_numpy

NAMES = ["embed.weight", "head.weight"]


def events(backend: Backend, pattern: str):
    """``g``: a good step; ``b``: a bad one, head.weight inf."""
    return [backend.observe([1.0, math.inf if letter == "b" else 2.0], loss=0.5) for letter in pattern]


def halted(backend: Backend, config: GuardConfig, pattern: str):
    decisions, state = backend.run(config, events(backend, pattern))
    return [bool(decision.apply) for decision in decisions], state


def test_the_limit_counts_skips_in_a_row(backend):
    config = GuardConfig(max_skips_in_a_row=3)
    applied, state = halted(backend, config, "bbgbbgbb")
    assert applied == [False, False, True, False, False, True, False, False]
    assert int(to_numpy(state.halted)) == 0
    check_halted(state, NAMES, config=config)
    _, state = halted(backend, config, "bbgbbb")
    assert int(to_numpy(state.halted)) == 1


def test_trap_bad_step_after_the_limit_is_never_applied_and_nothing_changes(backend):
    # optax.apply_if_finite applies the bad step N + 1, and each one after.
    config = GuardConfig(max_skips_in_a_row=3, loss_scale="dynamic", clip=1.0)
    _, frozen = halted(backend, config, "gbbb")
    decisions, after = backend.run(config, events(backend, "bgbgg"), frozen)
    assert not any(bool(decision.apply) for decision in decisions)
    assert all((decision.multiplier == 1).all() for decision in decisions)
    assert_bit_equal(frozen, after)


def test_raise_stops_at_the_first_bad_step(backend):
    config = GuardConfig(on_nonfinite="raise")
    applied, state = halted(backend, config, "gbg")
    assert applied == [True, False, False]
    with pytest.raises(
        NonFiniteError, match=r"1 step\(s\) in a row .* \(on_nonfinite=\"raise\"\), from step 1 on"
    ):
        check_halted(state, NAMES, config=config)


LOWERED_SCALES = [
    DynamicLossScale(init_scale=8.0),
    DynamicLossScale(init_scale=8.0, hysteresis=2),
    LogMaxLossScale(init_scale=8.0),
    UnderflowAwareLossScale(init_scale=8.0),
]


@pytest.mark.parametrize("rule", LOWERED_SCALES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_raise_lets_a_dynamic_scale_come_down_and_stops_at_its_floor(backend, rule, bad):
    # GradScaler skips these steps. An error at the first would end every run in float16 at its first step.
    config = GuardConfig(on_nonfinite="raise", loss_scale=rule)
    seen = backend.observe([1.0, bad], loss=0.5, amax=bad, tiny=0.0)
    state = backend.init(config, 2)
    scales = []
    while not int(to_numpy(state.halted)):
        scales.append(float(to_numpy(state.loss_scale.scale)))
        state = backend.run(config, [seen], state)[1]
        assert len(scales) < 10
    assert scales[-1] == 1.0
    assert sorted(set(scales)) == [1.0, 2.0, 4.0, 8.0]
    assert scales.count(1.0) == 1
    with pytest.raises(
        NonFiniteError, match=rf'{len(scales)} step\(s\) in a row .* \(on_nonfinite="raise"\)'
    ):
        check_halted(state, NAMES, config=config)


@pytest.mark.parametrize("scale", [None, 8.0, *LOWERED_SCALES], ids=str)
def test_raise_stops_at_the_first_bad_loss_whatever_the_scale(backend, scale):
    config = GuardConfig(on_nonfinite="raise", loss_scale=scale)
    seen = backend.observe([1.0, math.nan], loss=math.nan, amax=math.nan, tiny=0.0)
    assert int(to_numpy(backend.run(config, [seen])[1].halted)) == 1


def test_raise_stops_at_the_first_overflow_of_a_fixed_scale(backend):
    config = GuardConfig(on_nonfinite="raise", loss_scale=8.0)
    assert int(to_numpy(halted(backend, config, "b")[1].halted)) == 1


@pytest.mark.parametrize("n_bad", [50, 300])
def test_without_a_limit_nothing_halts(backend, n_bad):
    config = GuardConfig()
    applied, state = halted(backend, config, "b" * n_bad + "g")
    assert applied == [False] * n_bad + [True]
    check_halted(state, config=config)


def test_the_message_names_parameter_scale_history_cause_and_remedy(backend):
    config = GuardConfig(max_skips_in_a_row=3, loss_scale=DynamicLossScale(init_scale=1024.0))
    _, state = halted(backend, config, "gbbb")
    with pytest.raises(NonFiniteError) as caught:
        check_halted(state, NAMES, config=config)
    message = str(caught.value)
    assert "3 step(s) in a row" in message
    assert "the limit is 3" in message
    assert "from step 1 on" in message
    assert "First bad parameter: head.weight (gradient norm inf, loss 0.5)" in message
    assert "Loss scale over these steps: 1024, 512, 256" in message
    assert "Likely cause: overflow" in message
    assert "Remedy: " in message
    assert "parameters and optimizer state are those from before these steps" in message
    assert caught.value.metrics == metrics(state, NAMES)
    assert repr(caught.value.history) == repr(history(state, NAMES))  # repr: NaN differs from itself


def test_no_parameter_is_blamed_for_a_loss_that_makes_every_gradient_nan(backend):
    config = GuardConfig(on_nonfinite="raise")
    _, state = backend.run(config, [backend.observe([math.nan, math.nan], loss=math.nan)])
    with pytest.raises(NonFiniteError) as caught:
        check_halted(state, NAMES, config=config)
    assert "The loss was not finite, nor were the gradients (gradient norm nan, loss nan)" in str(
        caught.value
    )
    assert "First bad parameter" not in str(caught.value)


def test_the_message_shows_the_last_eight_scales():
    numpy = BACKENDS["numpy"]
    config = GuardConfig(max_skips_in_a_row=10, loss_scale=DynamicLossScale(init_scale=1024.0))
    _, state = halted(numpy, config, "g" + "b" * 10)
    with pytest.raises(NonFiniteError, match=r"over these steps: 256, 128, 64, 32, 16, 8, 4, 2\. "):
        check_halted(state, NAMES, config=config)


def test_a_parameter_without_a_name_is_named_by_its_index(backend):
    config = GuardConfig(on_nonfinite="raise")
    _, state = halted(backend, config, "b")
    for names in (None, ["only the first"]):
        with pytest.raises(NonFiniteError, match="First bad parameter: parameter 1 "):
            check_halted(state, names, config=config)


def test_an_empty_tree_with_a_bad_loss_names_no_parameter(backend):
    config = GuardConfig(on_nonfinite="raise")
    _, state = backend.run(config, [backend.observe([], loss=math.nan)])
    with pytest.raises(NonFiniteError, match="All gradients were finite"):
        check_halted(state, [], config=config)


def test_a_streak_longer_than_the_recorder_is_reported_with_its_first_step(backend):
    config = GuardConfig(max_skips_in_a_row=200)
    _, state = halted(backend, config, "gg" + "b" * 200)
    with pytest.raises(NonFiniteError, match=r"200 step\(s\) in a row .* from step 2 on"):
        check_halted(state, NAMES, config=config)


def test_the_error_survives_pickling(backend):
    config = GuardConfig(on_nonfinite="raise")
    _, state = halted(backend, config, "gb")
    with pytest.raises(NonFiniteError) as caught:
        check_halted(state, NAMES, config=config)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is NonFiniteError
    assert str(copy) == str(caught.value)
    assert copy.metrics == caught.value.metrics
    assert copy.history == caught.value.history
    assert copy.history[-1]["reason"] is Reason.INF_GRADIENT
