"""``stablenum.diff`` on the optimizers and layers of PyTorch, optax, flax and equinox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import stablenum
from tests.pairs.real import layers, optimizers, within
from tests.pairs.real.formulas import distance, trained

STEPS = 20


def cases(pairs: Mapping[str, Any]) -> list[Any]:
    """The pairs by name. One that the comparison does not judge as it should is expected to fail."""
    found = []
    for name, pair in pairs.items():
        marks = [pytest.mark.xfail(reason=pair.shortfall)] if pair.shortfall else []
        found.append(pytest.param(name, marks=marks, id=name.replace(" ", "_").replace(",", "")))
    return found


def judge(report: Any, cause: str | None) -> None:
    """``cause``: as in ``Pair``."""
    if cause == "":
        assert report.ok, str(report)
        return
    assert not report.ok
    first = report.causes[0].code if report.causes else ""
    if cause is not None and cause.startswith("!"):
        assert first != cause[1:], str(report)
    elif cause is not None:
        assert first == cause, str(report)


# PyTorch reads some numbers from float32 tensors, and computes a part of Muon in bfloat16.
LOOSE = {"asgd": 1e-7, "nadam": 1e-6, "nadam, constant momentum": 1e-6}


# Those of matrices alone, which are Muon's, are compiled for more than a second.
FORMULAS = [
    pytest.param(name, marks=[pytest.mark.slow] if pair.matrices else [])
    for name, pair in optimizers.PAIRS.items()
]


@pytest.mark.parametrize("name", FORMULAS)
def test_both_optimizers_compute_what_the_formulas_say(name: str) -> None:
    pair = optimizers.PAIRS[name]
    left, right = (trained(rule, STEPS, matrices=pair.matrices) for rule in pair.formulas)
    assert distance(left, optimizers.in_torch(pair, STEPS)) < (
        0.1 if pair.matrices else LOOSE.get(name, 1e-12)
    )
    assert distance(right, optimizers.in_optax(pair, STEPS)) < 1e-6
    apart = distance(left, right)
    assert apart == 0 if pair.cause == "" else apart > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(optimizers.PAIRS))
def test_two_optimizers_are_compared(name: str) -> None:
    pair = optimizers.PAIRS[name]
    report = stablenum.diff(optimizers.left(pair), optimizers.right(pair), steps=STEPS)
    judge(report, pair.cause)
    if report.first is not None:
        assert (report.first.left or report.first.right).phase == "update"


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(layers.PAIRS))
def test_two_layers_are_compared(name: str) -> None:
    pair = layers.PAIRS[name]
    if pair.refused:
        with pytest.raises(ValueError, match=pair.refused):
            stablenum.diff(pair.left(), pair.right())
        return
    report = stablenum.diff(pair.left(), pair.right(), weights=pair.weights)
    judge(report, pair.cause)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(within.PAIRS))
def test_two_ways_within_a_framework_are_compared(name: str) -> None:
    pair = within.PAIRS[name]
    report = stablenum.diff(pair.left(), pair.right(), weights=pair.weights)
    judge(report, pair.cause)
    for off in (report.left_off, report.right_off):
        assert off is not None
        assert 0 < off.error < (1e-2 if name in ("autocast", "compute") else 1e-6)
        assert off.operation
