"""replay: an optimizer's update that goes wrong by a setting ends in that setting, not in a repair."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import stablenum_torch as st
from stablenum.diagnosis import Cause, Finding, Report, TensorStats
from stablenum.diagnosis.replay.judge import Evidence, judge


def report_on(
    make: Callable[[list[torch.Tensor]], Optimizer],
    gradient: torch.Tensor,
    *,
    steps: int = 1,
    change: Callable[[Optimizer], Any] = lambda optimizer: None,
) -> Report:
    """Take steps with the same gradient until one goes wrong, and replay that one."""
    w = torch.nn.Parameter(torch.ones_like(gradient))
    optimizer = make([w])
    change(optimizer)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (w * gradient).sum()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(steps):
        value, state = w.detach().clone(), copy.deepcopy(optimizer.state_dict())
        step()
        if not torch.isfinite(w).all():
            w.data.copy_(value)
            optimizer.load_state_dict(state)
            break
    return st.replay(step, optimizer=optimizer)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_centred_second_moment_that_cancels_is_the_setting_centered(foreach: bool) -> None:
    gradient = torch.linspace(0.1, 900.0, 512)
    report = report_on(
        lambda w: torch.optim.RMSprop(w, alpha=0.9, centered=True, foreach=foreach), gradient, steps=400
    )
    assert report.verdict.cause is Cause.OPTIMIZER_STATE, str(report)
    assert "E[g^2] - E[g]^2" in report.verdict.evidence[0]
    assert "centered=False" in report.verdict.remedy
    assert "after the root" in report.verdict.remedy


def test_eps_inside_the_root_of_a_centred_moment_may_be_larger() -> None:
    low = TensorStats(dtype="float32", shape=(2,), size=2, min=-1e-9, max=1.0, amax=1.0)
    finding = Finding(
        operation="rsqrt", phase="update", kind="nan", inputs=(low,), library="optax.scale_by_stddev"
    )
    verdict = judge(Evidence(framework="jax", findings=(finding,)))
    assert "make eps larger" in verdict.remedy


OPTIM = torch.optim
NOTHING = torch.tensor([1.0, 0.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda w: OPTIM.Adam(w, eps=0.0),
        lambda w: OPTIM.Adam(w, eps=0.0, amsgrad=True),
        lambda w: OPTIM.Adagrad(w, eps=0.0),
        lambda w: OPTIM.Adadelta(w, eps=0.0),
        lambda w: OPTIM.NAdam(w, eps=0.0),
        lambda w: OPTIM.Adamax(w, eps=0.0),
        lambda w: OPTIM.RMSprop(w, eps=0.0),
    ],
)
def test_a_divisor_of_zero_in_an_update_asks_for_eps(make: Callable[..., Optimizer]) -> None:
    report = report_on(make, NOTHING)
    assert report.verdict.cause is Cause.OPTIMIZER_STATE, str(report)
    assert "an eps above 0" in report.verdict.remedy
    assert "repair" not in report.verdict.remedy


def test_a_poisoned_state_is_still_to_be_repaired() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([w])
    w.sum().backward()
    optimizer.step()
    optimizer.state[w]["exp_avg_sq"].fill_(-1.0)
    report = st.replay(lambda: (w.sum().backward(), optimizer.step()), optimizer=optimizer)
    assert "repair the poisoned entries" in report.verdict.remedy, str(report)


@pytest.mark.parametrize(
    ("name", "value", "fact", "remedy"),
    [
        ("lr", math.inf, "lr is inf in parameter group 0 of Adam", "mend the schedule"),
        ("lr", torch.tensor(math.nan), "lr is NaN in parameter group 0 of Adam", "mend the schedule"),
        ("betas", (0.9, 1.0), "betas is 1, not below 1, in parameter group 0 of Adam", "below 1"),
        ("betas", (math.nan, 0.9), "betas is NaN in parameter group 0 of Adam", "mend the schedule"),
    ],
)
def test_a_setting_that_no_step_can_use_is_named(name: str, value: Any, fact: str, remedy: str) -> None:
    report = report_on(
        torch.optim.Adam, torch.ones(2), steps=0, change=lambda o: o.param_groups[0].update({name: value})
    )
    assert report.verdict.cause is Cause.OPTIMIZER_STATE, str(report)
    assert (report.verdict.evidence[0], remedy in report.verdict.remedy) == (fact, True), str(report)


def test_an_update_that_overflows_names_rate_and_momentum() -> None:
    report = report_on(lambda w: torch.optim.SGD(w, lr=1e30), torch.full((2,), 1e10))
    assert report.verdict.cause is Cause.OVERFLOW, str(report)
    assert "lower the learning rate" in report.verdict.remedy
    assert report.verdict.code == ""
