"""What a loop computes in parts is found again where it is computed at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stablenum_torch
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.sides.loops import put_together, wholes_of
from stablenum.diagnosis.diff.sides.matching import matched
from stablenum.diagnosis.diff.sides.sides import Side, measured

X = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)
W = np.random.default_rng(4).normal(size=(4, 4)).astype(np.float32)


def side_of(function: Callable[[Any, Any], Any]) -> Side:
    w = torch.tensor(W, requires_grad=True)
    return measured(stablenum_torch.program(lambda x: function(x, w), torch.tensor(X)))


def at_once(x: Any, w: Any) -> Any:
    return torch.tanh(x @ w).exp().mean()


def in_parts(x: Any, w: Any) -> Any:
    return sum(torch.tanh(part @ w).exp().mean() for part in x.chunk(3)) / 3


def two_in_a_line(x: Any, w: Any) -> Any:
    return sum((torch.tanh(part @ w) + torch.tanh(part)).exp().mean() for part in x.chunk(3)) / 3


def picked(x: Any, w: Any) -> Any:
    return torch.tanh(x[:4] @ w).exp().mean()


def of(side: Side, operation: str) -> list[int]:
    steps = [s for s in side.trace.steps if s.operation == operation and s.phase == "forward"]
    return [step.outputs[0] for step in steps]


def test_the_numbers_of_the_whole_follow_from_those_of_the_parts() -> None:
    whole = put_together([fingerprint(part) for part in np.split(X, 3)])
    assert distance(whole, fingerprint(X)) < 1e-14


@pytest.mark.parametrize("operation", ["tanh", "exp"])
def test_parts_are_found_again_in_the_whole_and_the_whole_in_its_parts(operation: str) -> None:
    left, right = side_of(at_once), side_of(in_parts)
    found = matched(left, right)
    (whole,), parts = of(left, operation), of(right, operation)
    assert len(parts) == 3
    assert set(found.known("left")[whole]) >= set(parts)
    assert all(whole in found.known("right")[part] for part in parts)
    assert whole not in found.left


def test_two_values_of_one_line_are_told_apart_by_their_order() -> None:
    side = side_of(two_in_a_line)
    first, second = of(side, "tanh")[::2], of(side, "tanh")[1::2]
    wholes = {whole.parts for whole in wholes_of(side)}
    assert {tuple(first), tuple(second)} <= wholes


def test_noise_makes_no_whole_and_moves_one_by_its_share_only() -> None:
    side = side_of(in_parts)
    parts = tuple(of(side, "tanh"))
    side.prints[parts[0]] = fingerprint(1e-17 * X[:2])
    side.tolerance[parts[0]] = 1e3  # what rounding leaves of a zero
    (whole,) = [whole for whole in wholes_of(side) if whole.parts == parts]
    assert whole.tolerance < 1e-8
    side.tolerance[parts[1]] = 1e3
    assert not [whole for whole in wholes_of(side) if parts[1] in whole.parts]


@pytest.mark.parametrize("few", ["left", "right"])
def test_a_value_with_some_rows_of_another_one_is_found_on_its_own_side(few: str) -> None:
    sides = [side_of(picked), side_of(at_once)]
    found = matched(*(sides if few == "left" else sides[::-1])).with_rows()
    some, every = (of(side, "tanh")[0] for side in sides)
    left, right = (some, every) if few == "left" else (every, some)
    assert right in found.left[left]
    assert left in found.right[right]
