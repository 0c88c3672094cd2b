"""The recorder, and the history and metrics read from it."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest

from stablenum import GuardConfig, Reason
from stablenum.formats import FLOAT32_MAX
from stablenum.guard.readout import Worst, history, metrics
from stablenum.guard.recorder import CAPACITY, read_rows

KEYS = {
    "precision_level",
    "worst_rank",
    "step",
    "loss",
    "grad_norm",
    "loss_scale",
    "clip_coefficient",
    "reason",
    "applied",
    "worst",
}


def test_the_last_128_steps_are_kept_in_order(backend):
    config = GuardConfig()
    _, state = backend.run(config, [backend.observe([float(i)], loss=float(-i)) for i in range(300)])
    rows = read_rows(state.recorder)
    assert len(rows) == CAPACITY == 128
    assert [row.step for row in rows] == list(range(172, 300))
    assert [row.grad_norm for row in rows] == [float(i) for i in range(172, 300)]
    assert [row.loss for row in rows] == [-float(i) for i in range(172, 300)]


def test_a_short_run_shows_only_its_own_steps(backend):
    _, state = backend.run(GuardConfig(), [backend.observe([1.0])] * 3)
    assert [row["step"] for row in history(state)] == [0, 1, 2]


def test_every_field_of_a_row(backend):
    config = GuardConfig(clip=1.0, loss_scale="dynamic")
    steps = [
        backend.observe([0.0, 131072.0], loss=0.25),
        backend.observe([math.nan, 1.0], loss=0.5),
        backend.observe([1.0, 2.0]),
    ]
    _, state = backend.run(config, steps)
    first, second, third = history(state, ["a", "b"])
    assert set(first) == KEYS
    assert first == {
        "step": 0,
        "loss": 0.25,
        "grad_norm": 2.0,
        "loss_scale": 65536.0,
        "clip_coefficient": pytest.approx(0.5, rel=2e-6),
        "reason": Reason.CLIPPED,
        "applied": True,
        "worst": Worst(1, "b"),
        "precision_level": 0,
        "worst_rank": None,
    }
    assert (second["reason"], second["applied"], second["worst"]) == (
        Reason.NAN_GRADIENT,
        False,
        Worst(0, "a"),
    )
    assert math.isnan(second["grad_norm"])
    assert second["clip_coefficient"] == 1.0
    assert (third["step"], third["loss_scale"], third["applied"]) == (2, 32768.0, True)
    assert math.isnan(third["loss"])


def test_metrics_are_the_last_row_and_the_counters(backend):
    _, state = backend.run(
        GuardConfig(), [backend.observe([norm], loss=1.0) for norm in (math.inf, 1.0, math.inf, math.inf)]
    )
    found = metrics(state, ["w"])
    assert found == history(state, ["w"])[-1] | {"skipped_total": 3, "skipped_in_a_row": 2}
    assert all(type(found[key]) in (int, float, bool) for key in KEYS - {"reason", "worst", "worst_rank"})


def test_metrics_before_the_first_step(backend):
    state = backend.init(GuardConfig(loss_scale=512.0), 2)
    found = metrics(state, ["a", "b"])
    assert found["reason"] is Reason.NO_STEP_YET
    assert found["applied"] is False
    assert math.isnan(found["grad_norm"])
    assert math.isnan(found["loss"])
    assert found["loss_scale"] == 512.0
    assert found["worst"] == Worst(-1, None)
    assert (found["skipped_total"], found["skipped_in_a_row"]) == (0, 0)
    assert history(state) == []


@pytest.mark.parametrize("loss", [-FLOAT32_MAX, -3.4028232635611926e38, FLOAT32_MAX, -math.inf, 0.0])
def test_a_loss_at_the_edge_of_float32_is_a_loss_that_was_given(backend, loss):
    _, state = backend.run(GuardConfig(), [backend.observe([1.0], loss=loss)])
    np.testing.assert_allclose(metrics(state)["loss"], loss, rtol=1e-7)
    assert history(state)[0]["loss"] == metrics(state)["loss"]
    _, state = backend.run(GuardConfig(), [backend.observe([1.0])])
    assert math.isnan(metrics(state)["loss"])


def test_a_reason_is_printed_by_its_name_and_stays_a_number():
    reason = Reason.NONFINITE_LOSS
    assert (str(reason), f"{reason}", f"{reason:>16}", f"{reason!s}") == (
        "NONFINITE_LOSS",
        "NONFINITE_LOSS",
        "  NONFINITE_LOSS",
        "NONFINITE_LOSS",
    )
    assert "%s %d" % (reason, reason) == "NONFINITE_LOSS 4"  # noqa: UP031
    assert (f"{reason:d}", f"{reason:03d}", f"{reason:.1f}", f"{reason:n}") == ("4", "004", "4.0", "4")
    assert (reason == 4, reason + 0, hash(reason), int(np.asarray(reason))) == (True, 4, hash(4), 4)
    assert json.dumps({"reason": reason}) == '{"reason": 4}'
    assert pickle.loads(pickle.dumps(reason)) is reason
    assert repr(reason) == "<Reason.NONFINITE_LOSS: 4>"
