"""Objectives that run away below 0, from the losses of a run."""

from __future__ import annotations

import math

import pytest

from stablenum.diagnosis import Cause, Finding
from stablenum.diagnosis.replay.descent import Descent
from stablenum.diagnosis.replay.judge import Evidence, judge


def noted(*losses: float) -> Descent:
    descent = Descent()
    for step, loss in enumerate(losses):
        descent.note("line", step, loss)
    return descent


@pytest.mark.parametrize(
    "losses",
    [
        (),
        (3.0, 1.0, 0.5),
        (1.0, 1e4, 1e9, 1e20),  # it diverges upwards
        (1.0, -900.0, -1200.0, -1250.0, -1260.0, -1262.0),  # a likelihood that has converged
        (-5e4, -6e4, -7e4),
        (1.0, math.inf, math.nan),
    ],
)
def test_ordinary_losses_have_not_run_away(losses: tuple[float, ...]) -> None:
    assert noted(*losses).runaway() == ""


def test_a_loss_that_runs_away_is_told_of_although_the_last_is_infinite() -> None:
    told = noted(20.0, -3.0, -500.0, -1e6, -1e12, -math.inf).runaway()
    assert told.startswith("the objective fell from 20 in step 0 to -1e+12 in step 4")


def test_the_losses_of_two_places_are_not_mixed() -> None:
    descent = noted(1.0, -1e3, -1e6, -1e9)
    for step, loss in enumerate([1.0, 1e3, 1e6, 1e9]):
        descent.note("another line", step, loss)
    assert "-1e+09" in descent.runaway()


def test_an_objective_without_a_bound_is_to_be_checked_for_its_sign() -> None:
    first = Finding(operation="pow", phase="forward", kind="inf")
    told = noted(1.0, -1e3, -1e6, -1e12).runaway()
    verdict = judge(
        Evidence(framework="torch", findings=(first,), loss_finite=False, exploded="w grew", unbounded=told)
    )
    assert verdict.cause is Cause.EXPLODED
    assert verdict.evidence[:2] == (told, "w grew")
    assert "check the sign of the objective" in verdict.remedy
