"""``stablenum explain``: batches that the worker processes of a DataLoader have made."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import stablenum_torch as st
from stablenum.diagnosis import Cause, Report
from tests.torch.watched import Watching, assert_healthy, found

pytestmark = [
    # A loader forks its workers, of which JAX warns once it has been used in this process.
    pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning"),
    # On a machine with a single core.
    pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes in total"),
]

BATCH, BAD_STEP = 4, 2


class Rows(Dataset[Any]):
    """Records that are standardised as they are read, one of which cannot be."""

    def __init__(self, bad: float | None = math.nan, *, named: bool = False) -> None:
        self.bad, self.named = bad, named

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Tensor | dict[str, Tensor]:
        x = torch.tensor([float(i % 3), 1.0])
        if i == BATCH * BAD_STEP + 1 and self.bad is not None:
            x = x / 0.0 if self.bad == math.inf else (x - x) / (x - x)
        return {"x": x, "y": torch.ones(1)} if self.named else x


def train(rows: Rows, **options: Any) -> None:
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for batch in DataLoader(rows, batch_size=BATCH, **({"num_workers": 1} | options)):  # TAKEN
        x = batch["x"] if isinstance(batch, dict) else batch
        loss = layer(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def assert_from_worker(report: Report) -> None:
    assert report.verdict.cause is Cause.BATCH, str(report)
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# TAKEN"), str(report)
    assert "worker process" in report.verdict.remedy
    assert "num_workers=0" in report.verdict.remedy


@pytest.mark.parametrize(("bad", "step"), [(math.nan, 0), (math.nan, BAD_STEP), (math.inf, BAD_STEP)])
def test_the_line_that_took_the_batch_is_named(watching: Watching, bad: float, step: int) -> None:
    assert_from_worker(found(watching(record=True, step=step), lambda: train(Rows(bad))))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.parametrize("options", [{"persistent_workers": True}, {"pin_memory": True}])
def test_batches_of_dicts(watching: Watching, options: dict[str, bool]) -> None:
    session = watching(record=True, step=BAD_STEP)
    assert_from_worker(found(session, lambda: train(Rows(named=True), num_workers=2, **options)))


def test_without_workers_the_line_in_the_dataset_is_named(watching: Watching) -> None:
    report = found(watching(record=True, step=BAD_STEP), lambda: train(Rows(), num_workers=0))
    assert report.verdict.cause is Cause.DOMAIN, str(report)
    assert report.findings[0].operation == "div"


@pytest.mark.parametrize("record", [False, True])
def test_workers_with_healthy_data_raise_no_alarm(watching: Watching, *, record: bool) -> None:
    assert_healthy(watching(record=record), lambda: train(Rows(None)))


def test_a_guarded_step_that_was_skipped() -> None:
    layer = torch.nn.Linear(2, 1)
    optimizer = st.wrap(torch.optim.SGD(layer.parameters(), lr=0.01))
    for x in DataLoader(Rows(), batch_size=BATCH, num_workers=1):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
        if optimizer.step_was_skipped:
            report = optimizer.explain(lambda x=x: layer(x).square().mean(), model=layer)
            assert report.verdict.cause is Cause.BATCH, str(report)
            assert "worker process" in report.verdict.remedy
            return
    pytest.fail("no step was skipped")


def test_data_of_a_file_come_from_outside(watching: Watching, tmp_path: Path) -> None:
    torch.save(torch.tensor([[1.0, math.nan]]), tmp_path / "x.pt")

    def run() -> None:
        layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        x = torch.load(tmp_path / "x.pt")  # TAKEN
        layer(x).square().mean().backward()
        optimizer.step()

    report = found(watching(record=True), run)
    assert report.verdict.cause is Cause.BATCH, str(report)
    place = report.findings[0].place
    assert place is not None
    assert place.code.endswith("# TAKEN"), str(report)
    assert "worker" not in report.verdict.remedy
