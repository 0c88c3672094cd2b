"""The healthy trainings: they learn, the runner counts every rewind, and the table shows them."""

from __future__ import annotations

import math

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.recovery.healthy.run import TRAININGS, plainly, rows, table, with_recovery
from benchmarks.recovery.healthy.training import Batch, Training

SHORT = 200


def short(seed: int) -> Training:
    training = TRAININGS["hinge"](seed)
    training.steps = SHORT
    return training


def running_away(seed: int) -> Training:
    """Batches 130 to 169 multiply the loss by 1,000,000."""
    training = short(seed)
    sound = training.loss
    whole = training.data

    def at(position: int) -> list[Batch]:
        factor = torch.tensor(1e6 if 130 <= position < 170 else 1.0)
        return [(*part, factor) for part in whole(position)]

    def loss(batch: Batch, step: int) -> Tensor:
        return (sound(batch[:2], step) + 1.0) * batch[2]

    training.data, training.loss = at, loss
    return training


def test_a_short_training_runs_plainly_and_with_recovery():
    (row,) = rows({"short": short})
    assert (row["training"], row["steps"], row["rewinds"], row["why"]) == ("short", SHORT, 0, [])
    assert row["healthy"]
    assert row["plain"] == row["recovery"] < row["start"], "without a rewind, both are the same run"


def test_a_rewind_is_counted_with_its_message():
    found = with_recovery(running_away)
    assert found["rewinds"] >= 1
    assert len(found["why"]) == found["rewinds"]
    assert "above" in found["why"][0]


def test_a_training_that_diverges_is_not_healthy():
    def diverging(seed: int) -> Training:
        training = short(seed)
        training.rate = lambda step: math.inf
        return training

    (row,) = rows({"diverging": diverging})
    assert not row["healthy"]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_data_of_a_position_are_the_same_again(name):
    torch.manual_seed(0)
    training = TRAININGS[name](0)
    for first, again in zip(training.data(7), training.data(7), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_another_seed_is_another_run():
    assert plainly(short, 0)["losses"] == plainly(short, 0)["losses"]
    assert plainly(short, 0)["losses"] != plainly(short, 1)["losses"]


def test_the_table_counts_false_alarms():
    row = {"training": "x", "steps": 9, "why": ["a"], "start": 2.0, "plain": 1.0, "recovery": 1.0}
    console = Console(width=120)
    with console.capture() as text:
        console.print(table([row | {"rewinds": 2, "healthy": True}, row | {"rewinds": 0, "healthy": False}]))
    assert "1 of 2 with false alarms" in text.get()
    assert "x (not healthy)" in text.get()
