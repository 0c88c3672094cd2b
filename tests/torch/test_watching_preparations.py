"""``stablenum explain``: bad data that the script itself made before it began to train."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from stablenum.diagnosis import Cause, Report
from stablenum_torch._diagnosis.watch import watcher
from tests.torch.watched import Watching, found

BATCH = 4
BAD_STEP = 3


def ratios() -> Tensor:
    visits = torch.ones(20, 2)
    visits[4 * BAD_STEP + 1, 0] = 0.0
    return (visits - visits) / visits  # BAD


def in_place() -> Tensor:
    counts = torch.ones(20, 2)
    counts[4 * BAD_STEP, 1] = 0.0
    counts.log_()  # BAD
    return counts


def put_together() -> Tensor:
    counts = torch.ones(20)
    counts[4 * BAD_STEP] = -1.0
    return torch.stack([counts, counts.sqrt()], 1)  # BAD


def train(data: Tensor) -> None:
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for (x,) in DataLoader(TensorDataset(data), batch_size=BATCH):
        loss = layer(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def report_on(watching: Watching, prepared: Callable[[], Tensor]) -> Report:
    return found(watching(record=True, step=BAD_STEP), lambda: train(prepared()))


@pytest.mark.parametrize("prepared", [ratios, in_place, put_together], ids=lambda f: f.__name__)
def test_the_line_that_made_bad_data_is_named(watching: Watching, prepared: Callable[[], Tensor]) -> None:
    report = report_on(watching, prepared)
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# BAD"), str(report)
    assert report.verdict.cause is Cause.DOMAIN


def test_data_that_was_repaired_unseen_is_not_blamed(watching: Watching) -> None:
    """What the script does in the steps between is not recorded."""

    def run() -> None:
        data = in_place()
        layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for step in range(BAD_STEP + 1):
            if step == 1:
                data.nan_to_num_(neginf=0.0)
            loss = layer(data[BATCH * step :][:BATCH]).square().mean()
            loss = loss / (loss * (step < BAD_STEP))  # BAD TOO
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    report = found(watching(record=True, step=BAD_STEP), run)
    assert report.findings[0].place is not None
    assert report.findings[0].place.code.endswith("# BAD TOO"), str(report)


def test_long_preparations_are_recorded_in_part(watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "MOST_PREPARED", 1)
    report = report_on(watching, ratios)
    assert report.verdict.cause is Cause.BATCH, str(report)
    assert report.findings[0].place is not None
    assert "layer(x)" in report.findings[0].place.code


def test_the_step_after_long_preparations_is_recorded(
    watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "MOST_PREPARED", 1)

    def run() -> None:
        weight = torch.zeros(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(BAD_STEP + 1):
            size = weight.sqrt() if step == BAD_STEP else weight.square()  # BAD
            optimizer.zero_grad()
            size.sum().backward()
            optimizer.step()

    report = found(watching(record=True, step=BAD_STEP), run)
    assert report.verdict.cause is Cause.BOUNDARY_DERIVATIVE, str(report)
    assert report.findings[0].place is not None
    assert report.findings[0].place.code.endswith("# BAD")


# ---------------------------------------------------------------------------------- NaN from the script


def written_before_other_numbers() -> Tensor:
    data = torch.ones(20, 2)
    data[4 * BAD_STEP, 1] = float("nan")  # BAD
    data[0, 0] = 3.0
    return data


def written_by_a_mask() -> Tensor:
    data = torch.ones(20, 2)
    data[torch.arange(20) == 4 * BAD_STEP] = float("nan")  # BAD
    return data


def filled() -> Tensor:
    data = torch.ones(20, 2)
    data[4 * BAD_STEP].fill_(float("nan"))  # BAD
    return data


def copied_from_numpy() -> Tensor:
    """NumPy's own writes are not seen, but the array is."""
    values = np.ones((20, 2), np.float32)
    values[4 * BAD_STEP, 0] = np.nan
    return torch.from_numpy(values) * 1.0  # BAD


@pytest.mark.parametrize(
    "prepared",
    [written_before_other_numbers, written_by_a_mask, filled, copied_from_numpy],
    ids=lambda f: f.__name__,
)
def test_a_nan_that_the_script_writes_is_bad_data(watching: Watching, prepared: Callable[[], Tensor]) -> None:
    report = report_on(watching, prepared)
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# BAD"), str(report)
    assert (report.verdict.cause, first.phase, first.kind) == (Cause.BATCH, "before", "nan"), str(report)


def test_a_nan_that_the_script_writes_into_one_batch_is_bad_data(watching: Watching) -> None:
    def run() -> None:
        layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for step in range(BAD_STEP + 2):
            x = torch.ones(4, 2)
            if step == BAD_STEP:
                x[0, 0] = float("nan")  # BAD
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()

    report = found(watching(record=True, step=BAD_STEP), run)
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# BAD"), str(report)
    assert report.verdict.cause is Cause.BATCH


# ---------------------------------------------------------------------------- infinities from the script


def image_with(written: Callable[[Tensor], None]) -> Callable[[], None]:
    """A training of a small network for images, into one of which a number is written."""

    def run() -> None:
        parts = torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8, 1)
        net = torch.nn.Sequential(*parts)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        images = torch.rand(5 * BATCH, 1, 4, 4)
        written(images)
        for x in images.split(BATCH):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    return run


def a_pixel(x: Tensor) -> None:
    x[BATCH * BAD_STEP, 0, 2, 2] = float("inf")  # BAD


def a_pixel_below(x: Tensor) -> None:
    x[BATCH * BAD_STEP, 0, 2, 2] = -float("inf")  # BAD


def before_it_is_standardised(x: Tensor) -> None:
    x[BATCH * BAD_STEP, 0, 2, 2] = -float("inf")  # BAD
    x -= x.mean((1, 2, 3), keepdim=True)
    x /= x.std((1, 2, 3), keepdim=True)


def an_image(x: Tensor) -> None:
    x[BATCH * BAD_STEP].fill_(float("inf"))  # BAD


def by_a_condition(x: Tensor) -> None:
    x[torch.arange(len(x)) == BATCH * BAD_STEP] = float("inf")  # BAD


@pytest.mark.parametrize(
    "written", [a_pixel, a_pixel_below, before_it_is_standardised, an_image, by_a_condition]
)
def test_an_infinity_that_the_script_writes_is_bad_data(
    watching: Watching, written: Callable[[Tensor], None]
) -> None:
    report = found(watching(record=True, step=BAD_STEP), image_with(written))
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# BAD"), str(report)
    assert (report.verdict.cause, first.phase, first.kind) == (Cause.BATCH, "before", "inf"), str(report)


def test_an_infinity_that_numpy_wrote_is_bad_data_behind_a_layer(watching: Watching) -> None:
    def written(x: Tensor) -> None:
        x.numpy()[BATCH * BAD_STEP, 0, 2, 2] = -np.inf

    report = found(watching(record=True, step=BAD_STEP), image_with(written))
    assert report.verdict.cause is Cause.BATCH, str(report)
