"""The step in which parameters exploded, from their sizes at the start of each step."""

from __future__ import annotations

import math

import pytest

from stablenum.diagnosis import Cause, Finding, TensorStats
from stablenum.diagnosis.replay.growth import Growth
from stablenum.diagnosis.replay.judge import Evidence, judge


def noted(*sizes: float, **more: list[float]) -> Growth:
    growth = Growth()
    for step, size in enumerate(sizes):
        growth.note(step, {"w": size, **{name: series[step] for name, series in more.items()}})
    return growth


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([0.5, 0.6, 0.5, 4e9], "w grew from 0.5 to 4e+09 in step 2"),
        ([0.5, 0.4, 10.0, 1e3, 1e6], "w grew from 0.4 to 1e+06 in steps 1 to 3"),
        ([0.5, 0.6, 0.7, 0.8], ""),
        ([1e-8, 1e-3, 1.0], ""),  # it grew, but is not large
        ([500.0, 600.0, 700.0], ""),
        ([0.5, 1e9, 1e9, 1e9], ""),  # that was long ago, and did no harm
        ([0.0, 1e9], "w grew from 0 to 1e+09 in step 0"),
        ([0.5, math.inf], ""),
        ([], ""),
    ],
)
def test_the_step_in_which_a_parameter_exploded(sizes: list[float], said: str) -> None:
    assert noted(*sizes).explosion() == said


def test_what_blew_it_up_is_named_if_it_was_unusual() -> None:
    growth = Growth()
    for step, gradient in enumerate([0.1, 0.2, 0.1, 1e12]):
        growth.note(step, {"w": 1.0}, gradient=gradient, rate=0.1)
    growth.note(4, {"w": 1e11})
    assert growth.explosion() == (
        "w grew from 1 to 1e+11 in step 3; the largest gradient of that step was 1e+12 "
        "(1e+13 times the usual), at a learning rate of 0.1"
    )
    batch = noted(1.0, 1.0, 1.0, 1e11, batch=[3.0, 3.0, 1e18, 3.0])
    assert (
        batch.explosion() == "w grew from 1 to 1e+11 in step 2; batch reached 1e+18 (3.3e+17 times the usual)"
    )


def test_a_step_that_is_noted_again_replaces_the_first() -> None:
    growth = noted(1.0, 1e9)
    growth.note(1, {"w": 1.0})
    assert growth.explosion() == ""


def test_an_overflow_after_an_explosion_is_attributed_to_it() -> None:
    found = Finding(operation="pow", phase="forward", kind="inf")
    verdict = judge(Evidence(framework="torch", findings=(found,), exploded="w grew in step 3"))
    assert verdict.cause is Cause.EXPLODED
    assert verdict.evidence[0] == "w grew in step 3"


@pytest.mark.parametrize(("weight", "said"), [([0.5, 0.5, 0.5], False), ([0.5, 40.0, 900.0], True)])
def test_moments_that_begin_at_0_have_exploded_only_if_the_parameters_grew(
    weight: list[float], said: bool
) -> None:
    growth = Growth()
    for step, (nu, w) in enumerate(zip([0.0, 1e3, 1e5], weight, strict=True)):
        growth.note(step, {"w": w, "nu": nu})
    assert bool(growth.explosion()) is said


@pytest.mark.parametrize(("largest", "exploded"), [(300.0, False), (1e6, True)])
def test_an_edge_that_is_met_with_moderate_numbers_is_no_explosion(largest: float, exploded: bool) -> None:
    read = TensorStats(dtype="float32", shape=(4,), size=4, min=-1e-5, max=largest, amax=largest)
    found = (Finding(operation="pow", phase="forward", kind="nan", inputs=(read,)),)
    verdict = judge(Evidence(framework="jax", findings=found, exploded="w grew from 0.2 to 300 in call 3"))
    assert (verdict.cause is Cause.EXPLODED) is exploded
