"""``stablenum explain``: buffers that stay NaN after a batch whose step the script left out."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import stablenum_torch as st
from stablenum.diagnosis import Cause
from tests.torch.watched import Watching, assert_healthy, ended, found

NAN, INF = float("nan"), float("inf")


class Scaled(nn.Module):
    """Divides by a running average of its input's size, kept by hand."""

    size: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.size.mul_(0.9).add_(0.1 * x.detach().abs().mean())  # BAD
        return self.layer(x / self.size.detach() if not self.training else x)


def normalised() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))


def batches(bad: float = NAN) -> list[Tensor]:
    """Four batches, of which the second is bad."""
    good = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]])
    return [good, torch.tensor([[1.0, bad], [2.0, 1.0], [3.0, 3.0]]), good, good + 1]


def train(
    model: nn.Module,
    data: list[Tensor],
    after: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in data:
        loss = model(x).square().mean()  # BAD TOO
        if not torch.isfinite(loss):
            after(model)
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "bad"), [(normalised, NAN), (normalised, -INF), (normalised, INF), (Scaled, NAN)]
)
def test_a_skipped_batch_that_leaves_nan_in_a_buffer_is_a_failure(
    watching: Watching, make: Callable[[], nn.Module], bad: float
) -> None:
    failure = ended(watching(), lambda: train(make(), batches(bad))).outcome.failure
    assert failure is not None
    assert (failure.what, failure.step) == ("buffer", 1)
    assert "although its batch was left out" in str(failure)


@pytest.mark.parametrize("make", [normalised, Scaled])
def test_the_report_names_the_line_of_the_forward_pass_and_the_buffers(
    watching: Watching, make: Callable[[], nn.Module]
) -> None:
    report = found(watching(record=True), lambda: train(make(), batches()))
    first = report.findings[0]
    assert first.place is not None
    assert "# BAD" in first.place.code, str(report)
    assert report.verdict.cause is Cause.BATCH
    assert set(report.evidence.poisoned) & {"0.running_var", "size"}
    assert "buffers=model" in report.verdict.remedy


def test_what_comes_of_poisoned_buffers_does_not_hide_them(watching: Watching) -> None:
    def run() -> None:
        model, best = normalised(), None
        train(model, batches())
        model.eval()
        if model(batches()[0]).mean().item() < 1e9:
            best = copy.deepcopy(model.state_dict())
        model.load_state_dict(best)  # type: ignore[arg-type]

    session = ended(watching(), run)
    assert session.outcome.failure is not None
    assert session.outcome.failure.what == "buffer"


def put_back(model: nn.Module) -> None:
    model[0].running_mean.zero_()
    model[0].running_var.fill_(1.0)


def replaced(model: nn.Module) -> None:
    model[0].running_mean = torch.zeros(2)
    model[0].running_var = torch.ones(2)


@pytest.mark.parametrize("repair", [put_back, replaced])
def test_buffers_that_the_script_puts_back_are_no_failure(
    watching: Watching, repair: Callable[[nn.Module], object]
) -> None:
    assert_healthy(watching(), lambda: train(normalised(), batches(), after=repair))


def test_a_model_that_the_script_gives_up_is_no_failure(watching: Watching) -> None:
    def run() -> None:
        spoiled = normalised()
        train(spoiled, batches())
        train(normalised(), batches(1.0))

    assert_healthy(watching(), run)


def test_a_buffer_that_marks_missing_values_is_no_failure(watching: Watching) -> None:
    def run() -> None:
        model = nn.Linear(2, 1)
        model.register_buffer("missing", torch.tensor([NAN, 1.0]))
        train(model, batches())

    assert_healthy(watching(), run)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.LayerNorm(3),
        nn.Linear(3, 2),
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 1, 1)),
    ],
)
def test_infinities_in_the_data_of_a_layer_are_no_mask(layer: nn.Module) -> None:
    rows = [torch.ones(3), torch.tensor([1.0, -INF, 2.0])]
    report = st.replay(lambda: layer(torch.stack(rows)).square().mean(), model=layer)
    assert report.verdict.cause is Cause.BATCH, str(report)


# ---------------------------------------------------------------------------------- objectives


def maximised(sign: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=3000.0)
    x = torch.randn(16, 2)
    for _ in range(20):
        loss = sign * (model(x) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_an_objective_of_the_wrong_sign_is_told_of(watching: Watching) -> None:
    report = found(watching(record=True), lambda: maximised(-1.0))
    assert report.verdict.cause is Cause.EXPLODED, str(report)
    assert "no lower bound" in report.verdict.evidence[0]
    assert "check the sign of the objective" in report.verdict.remedy


def test_a_loss_that_diverges_upwards_is_a_matter_of_the_learning_rate(watching: Watching) -> None:
    report = found(watching(record=True), lambda: maximised(3.0))
    assert report.verdict.cause is Cause.EXPLODED, str(report)
    assert "learning rate" in report.verdict.remedy
