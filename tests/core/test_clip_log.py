"""The log message about gradients that other code clips before the guard sees them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from stablenum import AutoClip, DynamicLossScale, GuardConfig, GuardState, SpikeGuard, ZClip
from stablenum.guard.clip_log import ClipLog, ceiling
from stablenum.guard.reasons import Reason
from stablenum.guard.recorder import Row, read_rows
from tests.backends import BACKENDS


@pytest.fixture(autouse=True)
def _all_messages(caplog):
    caplog.set_level(logging.DEBUG, logger="stablenum")


def batches(steps: int, size: int = 30) -> list[np.ndarray]:
    """Unscaled gradients as those of a training: another one in each step."""
    rng = np.random.default_rng(5)
    return [rng.normal(size=size).astype(np.float32) * rng.uniform(0.02, 2.0) for _ in range(steps)]


def clipped(gradient: np.ndarray, bound: float) -> np.ndarray:
    """What torch.nn.utils.clip_grad_norm_ leaves, in float32."""
    norm = np.float32(np.linalg.norm(gradient))
    return gradient * np.minimum(np.float32(bound) / (norm + np.float32(1e-6)), np.float32(1))


def run(
    config: GuardConfig,
    gradients: Iterable[np.ndarray],
    touch: Callable[[np.ndarray], np.ndarray] = lambda gradient: gradient,
    log: ClipLog | None = None,
) -> GuardState:
    """Run the guard on scaled gradients that ``touch`` has changed, and let the log look at each step."""
    numpy = BACKENDS["numpy"]
    step, state = numpy.prepare(config), numpy.init(config, 1)
    log = log or ClipLog()
    for gradient in gradients:
        found = touch(gradient * np.float32(state.loss_scale.scale))
        _, state = step(state, numpy.observe([np.linalg.norm(found.astype(np.float64))], loss=0.5))
        log.after_step(int(state.step), state)
    return state


@pytest.mark.parametrize("scale", ["dynamic", 1024.0, 1000.0])
@pytest.mark.parametrize("bound", [1.0, 0.5, 5.0])
def test_clipping_of_scaled_gradients_is_logged_with_the_remedy(caplog, scale, bound):
    state = run(GuardConfig(loss_scale=scale), batches(16), lambda g: clipped(g, bound))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("stablenum", logging.WARNING)
    message = record.getMessage()
    assert f"the joint norm {bound:g}, and in none with a larger one" in message
    assert f"the loss scale {float(state.loss_scale.scale):g}." in message
    assert f"give the guard clip={bound:g}; or" in message
    assert "call opt.unscale_() first" in message


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("SpikeGuard", {"spike": "skip"}),
        ("ZClip", {"clip": ZClip()}),
        ("AutoClip", {"clip": [1.0, AutoClip()]}),
    ],
)
def test_clipping_without_a_scale_is_logged_for_rules_that_compare_norms(caplog, name, rule):
    run(GuardConfig(**rule), batches(200), lambda g: clipped(g, 1.0))
    assert f"{name} can notice no gradient that is larger than usual" in caplog.messages[0]
    assert "loss scale" not in caplog.messages[0]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_clipping_without_a_scale_does_no_harm_to_other_rules(caplog, clip):
    run(GuardConfig(clip=clip), batches(200), lambda g: clipped(g, 1.0))
    assert not caplog.records


def test_clipping_at_an_odd_bound_shows_when_the_scale_changes(caplog):
    config = GuardConfig(loss_scale=DynamicLossScale(init_scale=1024.0, growth_interval=20))
    run(config, batches(16), lambda g: clipped(g, 0.777))
    assert not caplog.records
    run(config, batches(64), lambda g: clipped(g, 0.777))
    assert "the joint norm 0.777, " in caplog.messages[0]


def _constant(steps: int) -> list[np.ndarray]:
    return [batches(1)[0]] * steps


def _unit(gradient: np.ndarray) -> np.ndarray:
    return gradient / np.linalg.norm(gradient)


SOUND = {
    "a training": batches(300),
    "a linear loss": _constant(300),
    "the mean of 2^20 weights": [np.full(1, 2.0**-10, np.float32)] * 300,
    "the mean of 2^32 weights": [np.full(1, 2.0**-16, np.float32)] * 300,
    "zeros": [np.zeros(3, np.float32)] * 300,
    "a loss whose gradient is of length 1": [_unit(g) for g in batches(300)],
    "a gradient normalized in the model": [_unit(g) / 8 for g in batches(300)],
    "signs": [np.sign(g) for g in batches(300, size=100)],
    "a run that stands still": batches(20) + _constant(300),
    "nothing finite": [np.full(3, math.nan, np.float32)] * 300,
}


@pytest.mark.sampled
@pytest.mark.parametrize("gradients", SOUND)
@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"clip": 1.0},
        {"loss_scale": 8.0},
        {"loss_scale": 100.0, "clip": 0.5},
        {"loss_scale": "dynamic"},
        {"loss_scale": DynamicLossScale(growth_interval=50), "clip": ZClip()},
    ],
    ids=["plain", "clip", "8", "100", "dynamic", "growing"],
)
def test_a_sound_run_is_not_accused(caplog, gradients, setting):
    run(GuardConfig(**setting), SOUND[gradients])
    assert not caplog.records


@pytest.mark.parametrize("gradients", sorted(SOUND.keys() - {"a loss whose gradient is of length 1"}))
def test_nor_is_one_with_a_rule_that_compares_norms(caplog, gradients):
    run(GuardConfig(spike=SpikeGuard(min_samples=8), clip=AutoClip()), SOUND[gradients])
    assert not caplog.records


def test_normalizing_on_purpose_is_named_where_a_rule_then_has_nothing_to_compare(caplog):
    gradients = SOUND["a loss whose gradient is of length 1"]
    run(GuardConfig(spike="skip"), gradients)
    assert "clips or normalizes them" in caplog.messages[0]


def test_messages_are_rare(caplog):
    seen = []
    numpy, config = BACKENDS["numpy"], GuardConfig(loss_scale=1024.0)
    step, state, log = numpy.prepare(config), numpy.init(config, 1), ClipLog()
    for i, gradient in enumerate(batches(2000)):
        found = clipped(gradient * np.float32(1024), 1.0)
        _, state = step(state, numpy.observe([np.linalg.norm(found.astype(np.float64))]))
        log.after_step(int(state.step), state)
        seen += [i] * (len(caplog.records) - len(seen))
    assert seen == [15, 159, 1599]
    run(config, batches(16), lambda g: clipped(g, 1.0), log)  # another training
    assert len(caplog.records) == 4


def test_clipping_that_begins_later_is_found(caplog):
    steps = iter(range(10_000))
    run(GuardConfig(loss_scale=1024.0), batches(700), lambda g: clipped(g, 1.0) if next(steps) > 400 else g)
    assert len(caplog.records) == 1


def test_another_training_of_as_many_steps_is_looked_at(caplog):
    config, log = GuardConfig(loss_scale=1024.0), ClipLog()
    sound, found = run(config, batches(20)), run(config, batches(20), lambda g: clipped(g, 1.0))
    caplog.clear()
    for state in (sound, found, found, sound):
        log.after_step(20, state)
    assert len(caplog.records) == 1


def test_bounds_that_only_some_steps_reach_are_found(caplog):
    """HF Trainer at the end of a training: most norms are below its bound."""
    config = GuardConfig(spike="skip")
    state = run(config, batches(128), lambda g: clipped(g, 5.0))
    reached = sum(row.grad_norm > 4.99 for row in read_rows(state.recorder))
    assert 32 <= reached < 100
    assert caplog.records


def row(norm: float, scale: float = 1024.0, reason: Reason = Reason.OK) -> Row:
    return Row(0, 0.5, norm, scale, 1.0, reason, 0)


def test_skipped_steps_are_no_evidence():
    rows = [row(1 / 1024), row(1.0000001 / 1024)] * 8
    assert ceiling(rows) is not None
    assert ceiling(rows + [row(math.inf, reason=Reason.INF_GRADIENT)] * 50) == ceiling(rows)
    assert ceiling(rows[:-1]) is None
    assert ceiling([*rows, row(1.1 / 1024)]) is None
    assert ceiling([]) is None


@pytest.mark.parametrize(
    ("largest", "reached", "scale", "logged"),
    [
        (1.0, 2, 1024.0, True),
        (0.5, 10**9, 65536.0, True),
        (1.0, 1, 1024.0, False),  # one element may have any size
        (1.234, 2, 1024.0, False),
        (1.0, 2, 8.0, False),
        (0.0, 100, 1024.0, False),
        (math.inf, 100, 1024.0, False),
        (math.nan, 0, 1024.0, False),
    ],
)
def test_elements_that_share_a_largest_size_are_a_sign_of_clipping(caplog, largest, reached, scale, logged):
    ClipLog().after_change(largest, reached, scale)
    assert len(caplog.records) == logged
    assert not logged or f"clip=ClipByValue({largest:g})" in caplog.messages[0]
