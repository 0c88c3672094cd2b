"""Each symptom of a hurt training, end to end; the end of a run that cannot be saved; arguments."""

from __future__ import annotations

import dataclasses
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stablenum_torch as st
from stablenum import RecoveryPolicy, RecoveryStopped
from stablenum.recovery.symptoms import SymptomCode
from stablenum.typing import Response
from tests.torch.recovering import AGAIN, KINDS, Training, made_nan, numbered, same, sgd, whole_state

QUICK = RecoveryPolicy(
    every=10, check_every=5, good_after=0, window=16, runaway_steps=6, skips_in_a_row=4,
    responses=(Response(), Response(older=1)),
)  # fmt: skip


def plain_training(**settings: Any) -> Training:
    return Training(numbered, lambda params: torch.optim.Adam(params, lr=1e-3), **settings)


def weight(training: Training) -> nn.Parameter:
    return training.model[0].weight  # type: ignore[index, no-any-return]


# --- symptoms ------------------------------------------------------------------------------------


def parameter(training: Training) -> None:
    weight(training).data[0, 0] = math.inf


def moment(training: Training) -> None:
    training.opt.state[weight(training)]["exp_avg"][0, 0] = math.nan


@pytest.mark.parametrize(
    ("hurt", "name"),
    [(parameter, "0.weight"), (moment, "exp_avg of 0.weight"), (made_nan, "1.running_var")],
)
def test_what_is_not_finite_is_found_and_named(hurt: Callable[[Training], None], name: str) -> None:
    training = plain_training()
    recovery = training.run(hurt=hurt, at=35, policy=AGAIN)
    (event,) = recovery.events
    assert (event.symptom.code, event.symptom.names) == (SymptomCode.NONFINITE_STATE, (name,))
    assert (event.symptom.step, event.symptom.origin, event.to_step) == (35, 31, 30)
    expected = plain_training()
    expected.run(policy=AGAIN)
    assert same(whole_state(training), whole_state(expected))


def test_an_average_of_the_weights_is_searched_too() -> None:
    training = plain_training(average=True)

    def hurt(training: Training) -> None:
        training.extra["average"].module[0].bias.data[1] = math.nan

    (event,) = training.run(hurt=hurt, at=35, policy=AGAIN).events
    assert event.symptom.names == ("extra.average.module.0.bias",)


def test_a_negative_second_moment_is_found_by_the_audit() -> None:
    training = plain_training()

    def hurt(training: Training) -> None:
        training.opt.state[weight(training)]["exp_avg_sq"][0, 0] = -1.0

    recovery = training.run(hurt=hurt, at=30, policy=QUICK)
    symptom = recovery.events[0].symptom
    assert (symptom.code, symptom.names, symptom.step) == (SymptomCode.POISONED_MOMENTS, ("0.weight",), 30)
    assert weight(training).isfinite().all()
    blind = plain_training()
    blind.run(hurt=hurt, at=30, policy=dataclasses.replace(QUICK, audit=False))
    assert [event.symptom.code for event in blind.recovery().events] == []


@pytest.mark.parametrize("value", [1e30, 1e-14])
@pytest.mark.parametrize("fused", [False, True])
def test_a_second_moment_that_no_gradient_explains_is_found(fused: bool, value: float) -> None:
    training = Training(numbered, lambda params: torch.optim.Adam(params, lr=1e-3, fused=fused))

    def hurt(training: Training) -> None:
        training.opt.state[weight(training)]["exp_avg_sq"][0, 0] = value

    symptom = training.run(hurt=hurt, at=40, policy=QUICK).events[0].symptom
    assert (symptom.code, symptom.names, symptom.step) == (SymptomCode.POISONED_MOMENTS, ("0.weight",), 40)
    assert "such that no gradients produce them" in symptom.detail


def test_a_weight_that_is_overwritten_is_found_where_a_normalization_hides_it() -> None:
    training = plain_training()

    def hurt(training: Training) -> None:
        weight(training).data[0, 0] = 1e38

    policy = dataclasses.replace(QUICK, runaway_steps=None)
    (event,) = training.run(60, hurt=hurt, at=50, policy=policy).events
    symptom = event.symptom
    assert (symptom.code, symptom.names, symptom.step) == (SymptomCode.RUNAWAY_PARAMETER, ("0.weight",), 50)
    assert weight(training).abs().max() < 10.0


@pytest.mark.parametrize("change", [lambda x: 1e3 * x, lambda x: x + 1e3], ids=["scale", "offset"])
def test_a_batch_that_only_running_statistics_keep_is_found(change: Callable[[torch.Tensor], Any]) -> None:
    training = plain_training()

    def hurt(training: Training) -> None:
        norm = training.model[1]  # type: ignore[index]
        norm(change(torch.randn(16, norm.num_features)))

    (event,) = training.run(
        60, hurt=hurt, at=50, policy=dataclasses.replace(QUICK, runaway_steps=None)
    ).events
    names = ("running statistics of 1",)
    assert (event.symptom.code, event.symptom.names) == (SymptomCode.RUNAWAY_BUFFER, names)
    assert (event.symptom.origin, event.symptom.step) == (50, 50)
    assert training.model[1].running_var.max() < 100.0  # type: ignore[index, union-attr, operator]


class Buffered(nn.Module):
    """A layer with the buffers that models have: what changes in each of its calls is healthy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("cosines", torch.ones(2, 3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("narrow", torch.ones(6, dtype=torch.float16))
        self.register_buffer("index", torch.arange(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
            self.average.lerp_(x.mean(0), 0.1)
            self.narrow.lerp_(x.mean(0).half(), 0.1)
            length = 2 + int(self.count) % 7  # as a rotary table that grows with the text
            self.cosines = torch.outer(torch.arange(float(length)), torch.tensor([1.0, 0.1, 0.01])).cos()
        return self.layer(x)


@pytest.mark.parametrize("at", [None, 47])
def test_buffers_of_all_kinds_are_watched_and_healthy_ones_are_silent(at: int | None) -> None:
    model = nn.Sequential(Buffered(), nn.Linear(6, 1))
    opt = st.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), names=model)
    recovery = st.Recovery(model, opt, dataclasses.replace(QUICK, runaway_steps=None), data=numbered())
    for x, y in recovery.batches(70):
        opt.zero_grad()
        opt.backward((model(x) - y).square().mean())
        opt.step()
        if recovery.step + 1 == at and not recovery.events:
            model[0].average.mul_(1e4)  # type: ignore[operator, union-attr]
    seen = [(e.symptom.code, e.symptom.names, e.symptom.origin) for e in recovery.events]
    assert seen == ([] if at is None else [(SymptomCode.RUNAWAY_BUFFER, ("0.average",), at)])


def bad_rows(first: int, last: int, factor: float) -> Callable[[], Any]:
    rows = numbered()

    def batch_at(n: int) -> Any:
        x, y = rows(n)
        return (x * factor, y) if first <= n <= last else (x, y)

    return lambda: batch_at


def test_batches_for_which_steps_are_skipped_in_a_row_are_left_out() -> None:
    training = Training(bad_rows(23, 32, math.nan), sgd, buffers=True)
    recovery = training.run(policy=QUICK, identify=lambda batch: bool(batch[0].isnan().any()))
    assert {event.symptom.code for event in recovery.events} == {SymptomCode.SKIPS_IN_A_ROW}
    assert training.opt.last["skipped_in_a_row"] == 0
    assert recovery.history()[-1]["batch"] is False
    assert recovery.events[0].suspects == (True,) * len(recovery.events[0].suspects)


def test_a_loss_that_runs_away_goes_back() -> None:
    training = plain_training()

    def hurt(training: Training) -> None:
        training.model[4].bias.data += 100.0  # type: ignore[index]

    recovery = training.run(60, hurt=hurt, at=31, policy=QUICK)
    assert recovery.events[0].symptom.code is SymptomCode.RUNAWAY_LOSS
    assert recovery.events[0].symptom.origin == 32
    assert training.opt.last["loss"] < 100


def test_a_gradient_norm_that_runs_away_goes_back() -> None:
    training = plain_training()
    recovery = training.recovery(QUICK)
    handle = None
    for batch in recovery.batches(60):
        if recovery.step == 32 and not recovery.events:
            handle = weight(training).register_hook(lambda grad: 1e3 * grad)
        if recovery.events and handle is not None:
            handle.remove()
        training.step(batch)
    (event,) = recovery.events
    assert (event.symptom.code, event.to_step) == (SymptomCode.RUNAWAY_GRAD_NORM, 30)


def test_what_the_user_sees_is_a_symptom() -> None:
    training = plain_training()
    policy = dataclasses.replace(QUICK, responses=(Response(),) * 4)
    recovery = training.recovery(policy, predicate=lambda: "cold" if len(recovery.events) == 2 else None)
    for batch in recovery.batches(60):
        training.step(batch)
        if recovery.step == 31 and not recovery.events:
            recovery.evaluated(torch.tensor(float("nan")))
        if recovery.step == 41 and len(recovery.events) == 1:
            recovery.report("the samples are grey", origin=25)
        recovery.evaluated(0.5)
    assert [(e.symptom.code, e.symptom.detail, e.to_step) for e in recovery.events] == [
        (SymptomCode.NONFINITE_EVALUATION, "the result of an evaluation is not finite", 30),
        (SymptomCode.REPORTED, "the samples are grey", 20),
        (SymptomCode.REPORTED, "cold", 20),
    ]


def test_masks_that_are_infinite_from_the_beginning_are_no_symptom() -> None:
    training = plain_training()
    training.model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    frozen = nn.Parameter(torch.tensor([math.inf]), requires_grad=False)
    training.model.register_parameter("limit", frozen)
    assert training.run(policy=QUICK).events == []


def test_a_training_that_begins_with_a_nan_is_refused() -> None:
    training = plain_training()
    parameter(training)
    with pytest.raises(ValueError, match=r"must be finite before the first step; 0\.weight is not"):
        training.recovery().batches(10)


# --- the end -------------------------------------------------------------------------------------


def test_a_run_that_gives_up_leaves_the_good_state_and_says_what_was_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training(bad_rows(23, 10**9, math.nan), sgd, buffers=True)
    with pytest.raises(RecoveryStopped) as stopped, caplog.at_level(logging.ERROR):
        training.run(
            100, policy=QUICK, explain=lambda batch: f"{int(batch[0].isnan().sum())} NaN in the batch"
        )
    assert stopped.value.code == 3
    assert "all 2 responses to this fault were tried" in stopped.value.report
    assert "18 NaN in the batch" in stopped.value.report
    assert stopped.value.report in caplog.text
    expected = Training(numbered, sgd)
    expected.run(stopped.value.step, policy=QUICK)
    assert stopped.value.step == 10
    assert same(whole_state(training), whole_state(expected))


PROGRAM = """
import math, sys, torch
from tests.torch.recovering import Training, sgd
from tests.torch.test_recovery import QUICK, bad_rows
training = Training(bad_rows(23, 10**9, math.nan), sgd, buffers=True)
recovery = training.recovery(QUICK, folder=sys.argv[1])
print("RESULT", recovery.resume())
training.run(100, recovery=recovery)
"""


@pytest.mark.slow  # starts two processes
def test_a_program_that_gives_up_exits_with_3_and_its_budget_is_not_refilled(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2)]
    assert [process.returncode for process in ended] == [3, 3], ended[0].stderr
    assert [process.stdout.split() for process in ended] == [["RESULT", "0"], ["RESULT", "10"]]
    assert ended[0].stderr.count("Recovery at step") == 2
    assert ended[1].stderr.count("Recovery at step") == 0
    training = Training(numbered, sgd)
    assert training.recovery(QUICK, folder=tmp_path).resume() == 10
    expected = Training(numbered, sgd)
    expected.run(10, policy=QUICK)
    assert same(whole_state(training), whole_state(expected))


# --- arguments -----------------------------------------------------------------------------------

_OTHER = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module; got int"),
        ({"model": _OTHER}, ValueError, "opt must train the model"),
        (
            {"opt": torch.optim.SGD(_OTHER.parameters())},
            TypeError,
            r"opt must be the guarded optimizer .* got SGD. Wrap it",
        ),
        ({"policy": 3}, TypeError, "policy must be a RecoveryPolicy or None"),
        ({"policy": QUICK, "every": 3}, TypeError, "policy or its fields must be given, not both"),
        ({"every": 0}, ValueError, "RecoveryPolicy.every must be"),
        ({"scheduler": 3}, TypeError, "scheduler must be a learning-rate scheduler"),
        ({"extra": [3]}, TypeError, "extra must be a mapping of name to object"),
        ({"extra": {"scaler": 3}}, TypeError, r"extra\['scaler'\] must be an object with state_dict"),
        ({"predicate": 3}, TypeError, "predicate must be a function or None"),
        ({"identify": 3}, TypeError, "identify must be a function or None"),
        ({"explain": 3}, TypeError, "explain must be a function or None"),
        ({"data": (i for i in range(3))}, TypeError, "data must be .* got generator"),
        ({"folder": 3}, TypeError, "folder must be a path or None; got int"),
        ({"process_group": 3}, TypeError, "process_group must be"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_changed(
    changed: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    training = KINDS["fused Adam, loss scale"]()
    before = whole_state(training)
    given = {"model": training.model, "opt": training.opt, "data": training.data} | changed
    with pytest.raises(error, match=message):
        st.Recovery(given.pop("model"), given.pop("opt"), given.pop("policy", None), **given)
    assert same(whole_state(training), before)


def test_wrong_arguments_of_methods_are_refused() -> None:
    recovery = plain_training().recovery()
    with pytest.raises(ValueError, match="steps must be a whole number from 0"):
        recovery.batches(-1)
    with pytest.raises(TypeError, match="value must be a number or a tensor with one element; got str"):
        recovery.evaluated("good")
    with pytest.raises(TypeError, match="value must be"):
        recovery.evaluated(torch.ones(2))
    with pytest.raises(TypeError, match="text must be a string; got int"):
        recovery.report(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="origin must be a whole number from 1"):
        recovery.report("odd", origin=0)


def test_making_a_recovery_draws_no_random_number_and_starts_no_worker() -> None:
    training = KINDS["two workers"]()
    before = whole_state(training)
    training.recovery()
    assert same(whole_state(training), before)
