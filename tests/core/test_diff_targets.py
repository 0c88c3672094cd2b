"""The targets of a cross-entropy, read from its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import stablenum
import stablenum_torch
from stablenum.diagnosis.diff.causes.targets import targets_of

ROWS, CLASSES = 12, 7
X = np.random.default_rng(0).normal(size=(ROWS, CLASSES))
LABELS = np.random.default_rng(1).integers(0, CLASSES, ROWS)


def gradient(labels: Any = LABELS, **options: Any) -> tuple[Any, Any]:
    """The softmax, and the gradient as PyTorch computes it."""
    x = torch.tensor(X, requires_grad=True)
    cross_entropy(x, torch.from_numpy(labels), **options).backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return torch.softmax(x, 1).detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.6])
def test_labels_smoothing_and_weights_are_read_from_the_gradient(smoothing: float) -> None:
    labels = np.where(np.arange(ROWS) % 4 == 3, -100, LABELS)

    found = targets_of(*gradient(labels, label_smoothing=smoothing))

    assert found is not None
    counted = labels >= 0
    assert (found.label[counted] == labels[counted]).all()
    assert np.allclose(found.on[counted], 1 - smoothing + smoothing / CLASSES, atol=1e-9)
    assert np.allclose(found.off[counted], smoothing / CLASSES, atol=1e-9)
    assert np.allclose(found.weight, counted / counted.sum(), atol=1e-9)


def test_weights_of_classes_are_those_of_the_rows() -> None:
    weights = np.linspace(0.5, 2.0, CLASSES)

    found = targets_of(*gradient(weight=torch.from_numpy(weights)))

    assert found is not None
    assert np.allclose(found.weight, weights[LABELS] / weights[LABELS].sum(), atol=1e-9)


@pytest.mark.parametrize("ignored", [False, True])
def test_weights_of_classes_give_each_class_its_own_smoothed_target(ignored: bool) -> None:
    weights = np.linspace(0.5, 2.0, CLASSES)
    labels = np.where(ignored & (np.arange(ROWS) % 4 == 3), -100, LABELS)
    counted = labels >= 0
    total = weights[labels[counted]].sum()

    found = targets_of(*gradient(labels, weight=torch.from_numpy(weights), label_smoothing=0.1))

    assert found is not None
    assert (found.label[counted] == labels[counted]).all()
    assert np.allclose(found.spread, 0.1 / CLASSES * weights / total, atol=1e-9)
    assert np.allclose(found.own[counted], 0.9 * weights[labels[counted]] / total, atol=1e-9)
    assert np.allclose(found.share[counted], 0.1, atol=1e-7)
    assert not found.weight[~counted].any()


def test_rows_that_are_all_alike_tell_nothing_of_the_classes() -> None:
    p = np.full((ROWS, CLASSES), 1 / CLASSES)
    own = np.eye(CLASSES)[LABELS] + np.linspace(0.1, 0.2, CLASSES)

    assert targets_of(p, own.sum(1, keepdims=True) * p - own) is None


def test_another_gradient_of_which_the_rows_sum_to_zero_is_no_cross_entropy() -> None:
    p, _ = gradient()
    other = np.random.default_rng(2).normal(size=p.shape)

    assert targets_of(p, other - other.mean(1, keepdims=True)) is None
    assert targets_of(p, np.zeros_like(p)) is None


MODEL = torch.nn.Linear(5, CLASSES)
INPUT = torch.from_numpy(np.random.default_rng(3).normal(size=(ROWS, 5)).astype(np.float32))


def program(labels: Any = LABELS, **options: Any) -> Any:
    targets = torch.from_numpy(labels)
    return stablenum_torch.program(lambda x: cross_entropy(MODEL(x), targets, **options), INPUT, model=MODEL)


def mean_of_means() -> Any:
    targets = torch.from_numpy(LABELS)

    def loss(x: Any) -> Any:
        terms = cross_entropy(MODEL(x), targets, reduction="none")
        return (terms[:3].mean() + terms[3:].mean()) / 2

    return stablenum_torch.program(loss, INPUT, model=MODEL)


@pytest.mark.parametrize(
    ("right", "code", "said"),
    [
        (
            lambda: program(label_smoothing=0.1),
            "label_smoothing",
            "1 (0) on the left and 0.914286 (0.0142857)",
        ),
        (lambda: program(np.roll(LABELS, 1)), "label_shift", "one position before"),
        (lambda: program(np.roll(LABELS, -1)), "label_shift", "one position after"),
        (
            lambda: program(np.where(np.arange(ROWS) < 2, -100, LABELS)),
            "ignored_labels",
            "the left program counts 2 rows that the right one leaves out",
        ),
        (lambda: program(reduction="sum"), "reduction", "12 times as much on the right"),
        (mean_of_means, "reduction", "0.666667 to 2 times as much on the right"),
    ],
    ids=["smoothing", "shifted right", "shifted left", "ignored", "sum", "mean of means"],
)
def test_a_difference_of_targets_is_named_and_confirmed(right: Any, code: str, said: str) -> None:
    cause = stablenum.diff(program(), right()).causes[0]

    assert (cause.code, cause.confirmed) == (code, True)
    assert said in cause.sentence


def test_other_labels_are_no_shift() -> None:
    other = (LABELS + 1) % CLASSES

    causes = stablenum.diff(program(), program(other)).causes

    assert "label_shift" not in [c.code for c in causes]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, np.linspace(0.5, 2.0, CLASSES)])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_loss_of_the_targets_is_that_of_the_function(
    smoothing: float, weights: Any, ignored: bool
) -> None:
    labels = np.where(ignored & (np.arange(ROWS) % 4 == 3), -100, LABELS)
    options = {"label_smoothing": smoothing, "weight": None if weights is None else torch.from_numpy(weights)}

    found = targets_of(*gradient(labels, **options))

    assert found is not None
    expected = cross_entropy(torch.tensor(X), torch.from_numpy(labels), **options)  # type: ignore[arg-type]
    assert found.loss == pytest.approx(float(expected), rel=1e-9)
