"""``stablenum explain`` passes by what a guard skips if it applies steps afterwards, as in JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stablenum_torch
from stablenum.diagnosis.watch.courses import MOST_IN_A_ROW
from stablenum_torch._step.guard import on_device_path
from tests.torch.watched import Watching, assert_healthy, ended

NAN = float("nan")
SCALES: dict[str, Any] = {"no scale": None, "fixed scale": 8.0, "dynamic scale": "dynamic"}


def model_and_guard(**settings: Any) -> tuple[torch.nn.Module, stablenum_torch.GuardedOptimizer]:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(model.weight)
    return model, stablenum_torch.wrap(torch.optim.SGD(model.parameters(), lr=0.01), names=model, **settings)


def training(bad: Callable[[int], bool], steps: int = 8, **settings: Any) -> Callable[[], None]:
    """A training whose batches are bad in some steps; the guard is given the loss."""

    def run() -> None:
        model, opt = model_and_guard(**settings)
        for i in range(steps):
            opt.zero_grad()
            opt.backward(model(torch.tensor([[1.0, NAN if bad(i) else 2.0]])).square().mean())
            opt.step()

    return run


def bad_gradients(bad: Callable[[int], bool], steps: int = 8, **settings: Any) -> Callable[[], None]:
    """A training whose losses are finite and whose gradients are not, in some steps."""

    def run() -> None:
        model, opt = model_and_guard(**settings)
        for i in range(steps):
            opt.zero_grad()
            difference = model(torch.ones(1, 2)) * (0.0 if bad(i) else 1.0)
            opt.backward(difference.square().sum().sqrt())  # the derivative at 0 is inf, and 0 x inf is NaN
            opt.step()

    return run


def closures(bad: Callable[[int], bool], steps: int = 8, norm: bool = False) -> Callable[[], None]:
    """A training whose steps compute loss and gradients themselves, as Lightning's do."""

    def run() -> None:
        model, guard = model_and_guard()
        if norm:
            model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), model)
            guard = stablenum_torch.wrap(
                torch.optim.SGD(model.parameters(), lr=0.01), names=model, buffers=model
            )
        for i in range(steps):

            def closure(i: int = i) -> torch.Tensor:
                guard.zero_grad()
                x = torch.tensor([[1.0, NAN if bad(i) else 2.0], [0.5, 1.0]])
                loss = model(x).square().mean()
                guard.backward(loss)
                return loss

            guard.step(closure)

    return run


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_a_bad_batch_in_a_closure_that_a_guard_skips_is_passed_by(
    watching: Watching, norm: bool, record: bool
) -> None:
    session = watching(record=record)
    assert_healthy(session, closures(lambda i: i in (2, 5), norm=norm))
    assert session.outcome.harmless.startswith("the loss of step 2 is not finite")


def test_bad_gradients_in_a_closure_are_seen_where_the_optimizer_skips_by_itself(watching: Watching) -> None:
    """On a GPU the guard calls a fused optimizer in every step, whose own step begins inside the guard's."""

    def run() -> None:
        model = torch.nn.Linear(2, 1)
        guard = stablenum_torch.wrap(torch.optim.SGD(model.parameters(), lr=0.01, fused=True), names=model)
        for i in range(8):

            def closure(i: int = i) -> torch.Tensor:
                guard.zero_grad()
                difference = model(torch.ones(1, 2)) * (0.0 if i >= 6 else 1.0)
                loss = difference.square().sum().sqrt()
                guard.backward(loss)
                return loss

            guard.step(closure)

    with on_device_path():
        session = ended(watching(record=True), run)
    assert session.outcome.failure is not None
    assert (session.outcome.failure.what, session.outcome.failure.step) == ("gradient", 6)


def test_a_closure_after_which_the_guard_applies_nothing_is_a_failure(watching: Watching) -> None:
    session = ended(watching(record=True), closures(lambda i: i >= 6))
    assert session.outcome.failure is not None
    assert (session.outcome.failure.what, session.outcome.failure.step) == ("loss", 6)
    assert session.outcome.report is not None


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_a_bad_batch_that_a_guard_skips_is_passed_by(watching: Watching, scale: str, record: bool) -> None:
    session = watching(record=record)
    assert_healthy(session, training(lambda i: i in (2, 5), loss_scale=SCALES[scale]))
    assert session.outcome.harmless.startswith("the loss of step 2 is not finite")


@pytest.mark.parametrize("record", [False, True])
def test_a_bad_gradient_that_a_guard_skips_is_passed_by(watching: Watching, record: bool) -> None:
    session = watching(record=record)
    assert_healthy(session, bad_gradients(lambda i: i in (2, 5)))
    assert session.outcome.harmless.startswith("gradients of weight, bias are not finite in step 2")
    assert ("the derivative of sqrt" in session.outcome.harmless) is record


@pytest.mark.parametrize(("train", "what"), [(training, "loss"), (bad_gradients, "gradient")])
def test_a_skip_after_which_the_guard_applies_nothing_is_a_failure(
    watching: Watching, train: Callable[..., Any], what: str
) -> None:
    session = ended(watching(record=True), train(lambda i: i >= 6))
    assert session.outcome.failure is not None
    assert (session.outcome.failure.what, session.outcome.failure.step) == (what, 6)
    assert session.outcome.report is not None


@pytest.mark.parametrize(("train", "what"), [(training, "loss"), (bad_gradients, "gradient")])
def test_a_guard_that_skips_every_step_from_one_on_is_stopped(
    watching: Watching, train: Callable[..., Any], what: str
) -> None:
    session = ended(watching(), train(lambda i: i >= 5, steps=1000))
    assert session.outcome.failure is not None
    assert (session.outcome.failure.what, session.outcome.failure.step) == (what, 5)
    assert session.outcome.steps < 5 + 2 * MOST_IN_A_ROW


def test_a_guard_that_ends_the_run_is_explained_by_the_first_step_that_it_skipped(watching: Watching) -> None:
    session = ended(watching(record=True), bad_gradients(lambda i: i >= 4, max_skips_in_a_row=3))
    assert session.outcome.exit_code == 1
    assert session.outcome.failure is not None
    assert (session.outcome.failure.what, session.outcome.failure.step) == ("gradient", 4)
    assert session.outcome.report is not None


def test_the_last_of_many_rows_of_skips_is_explained_if_the_guard_ends_the_run(watching: Watching) -> None:
    run = bad_gradients(lambda i: i % 2 == 1 or i > 40, steps=60, max_skips_in_a_row=3)
    session = ended(watching(), run)
    assert session.outcome.failure is not None
    assert (session.outcome.failure.what, session.outcome.failure.step) == ("gradient", 41)


def test_a_step_that_a_guard_applies_although_the_loss_is_bad_is_a_failure(watching: Watching) -> None:
    """The guard is not given the loss, and the gradients are finite: relu replaces what comes from log(0)."""

    def run() -> None:
        model, opt = model_and_guard()
        for x in (1.0, 1.0, 1.0, -50.0, 1.0, 1.0):
            opt.zero_grad()
            torch.log(torch.relu(model(torch.full((1, 2), x)))).square().mean().backward()
            opt.step()

    failure = ended(watching(), run).outcome.failure
    assert failure is not None
    assert (failure.what, failure.step) == ("loss", 3)


@pytest.mark.parametrize("scale", SCALES)
def test_a_loss_that_the_script_drops_is_passed_by(watching: Watching, scale: str) -> None:
    def run() -> None:
        model, opt = model_and_guard(loss_scale=SCALES[scale])
        for i in range(8):
            opt.zero_grad()
            opt.backward(model(torch.tensor([[1.0, NAN if i == 3 else 2.0]])).square().mean())
            if i == 3:
                opt.zero_grad()
                opt.backward(model(torch.tensor([[1.0, 2.0]])).square().mean())
            opt.step()
            assert opt.last["applied"]

    assert_healthy(watching(), run)


def test_the_scale_alone_is_no_loss(watching: Watching) -> None:
    def run() -> None:
        model, opt = model_and_guard(loss_scale=8.0)
        for _ in range(3):
            opt.zero_grad()
            (model(torch.ones(1, 2)).square().mean() * opt.scale()).backward()
            opt.step()
            assert math.isfinite(opt.last["grad_norm"])

    assert_healthy(watching(), run)
