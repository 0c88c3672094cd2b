"""``stablenum explain``: a learning rate that is NaN or inf is followed to the line that made it so."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR

from stablenum.diagnosis import Cause
from tests.torch.watched import Watching, ended, found

Schedule = Callable[[torch.optim.Optimizer], Callable[[int], object]]
WARM_UP = np.float64(0.0)


def by_hand(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    table = [0.1, 0.1, float("nan"), 0.1]

    def set_rate(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = table[step]  # BAD

    return set_rate


def in_a_dictionary(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    def set_rate(step: int) -> None:
        settings = {"lr": 0.1 if step < 2 else float("inf")}
        optimizer.param_groups[0].update(settings)  # BAD

    return set_rate


def from_a_function(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    def rate(step: int) -> float:
        with np.errstate(all="ignore"):
            done = np.float64(step - 2) / WARM_UP
        return 0.1 * done  # BAD

    def set_rate(step: int) -> None:
        if step == 2:
            found = rate(step)
            optimizer.param_groups[0]["lr"] = found

    return set_rate


def of_a_scheduler(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    def factor(step: int) -> float:
        if step < 2:
            return 1.0
        return float("inf") * 0.0  # BAD

    scheduler = LambdaLR(optimizer, factor)
    return lambda step: scheduler.step() if step else None


def of_a_lambda(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    scheduler = LambdaLR(optimizer, lambda step: 1.0 if step < 2 else float("nan"))  # BAD
    return lambda step: scheduler.step() if step else None


def inside_torch(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    scheduler = ExponentialLR(optimizer, gamma=float("nan"))

    def set_rate(step: int) -> None:
        if step:
            scheduler.step()  # BAD

    return set_rate


def train(schedule: Schedule) -> None:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    set_rate = schedule(optimizer)
    for step in range(4):
        set_rate(step)
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() * 1e-30).backward()
        optimizer.step()


SCHEDULES = [by_hand, in_a_dictionary, from_a_function, of_a_scheduler, of_a_lambda, inside_torch]


@pytest.mark.skipif(sys.gettrace() is not None, reason="lines are traced only where no debugger traces them")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_the_line_that_made_the_rate_is_named(watching: Watching, schedule: Schedule) -> None:
    report = found(watching(record=True, settings=True), lambda: train(schedule))
    first = report.findings[0]
    assert report.verdict.cause is Cause.OPTIMIZER_STATE, str(report)
    assert first.place is not None
    assert (first.operation, first.name, first.place.code.endswith("# BAD")) == ("setting", "lr", True), str(
        report
    )
    assert "in parameter group 0 of SGD" in report.verdict.evidence[0]
    assert first.frames[-1] == first.place
    assert sys.gettrace() is None


def test_a_first_run_says_which_setting_it_is(watching: Watching) -> None:
    failure = ended(watching(), lambda: train(by_hand)).outcome.failure
    assert failure is not None
    assert (failure.what, failure.step) == ("setting", 2)
    assert str(failure) == "lr is NaN in parameter group 0 of SGD, in step 2"


def test_without_a_second_run_the_step_that_reads_it_is_named(watching: Watching) -> None:
    report = found(watching(record=True), lambda: train(by_hand))
    assert report.verdict.cause is Cause.OPTIMIZER_STATE
    assert report.findings[0].place is not None
    assert report.findings[0].place.code == "optimizer.step()"


def test_buffers_that_a_bad_rate_has_poisoned_are_not_blamed(watching: Watching) -> None:
    """A second run knows that the script fails, and would stop at the first poisoned buffer."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for step in range(4):
            optimizer.param_groups[0]["lr"] = float("nan") if step == 1 else 0.1
            loss = model(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).square().mean()
            loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    session = watching(record=True)
    object.__setattr__(session.plan, "again", True)
    report = found(session, run)
    assert report.verdict.cause is Cause.OPTIMIZER_STATE, str(report)
