"""What ``stablenum.diff`` says where a port weights the classes of a cross-entropy in another way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

WEIGHTS = [1.0, 0.5, 2.0, 1.5, 1.0, 0.8, 1.2]
CLASSES = len(WEIGHTS)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(10, 5)).astype(np.float32), RNG.integers(0, CLASSES, 10)


def in_torch(smoothing: float) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, CLASSES))

    def loss_fn(x: Any, y: Any) -> Any:
        weight = torch.tensor(WEIGHTS)
        return F.cross_entropy(model(x), y, weight=weight, label_smoothing=smoothing)

    return stablenum_torch.program(loss_fn, torch.tensor(X), torch.tensor(Y), model=model)


def loss_in_jax(logits: Any, y: Any, smoothing: float, fault: str) -> Any:
    w = jnp.ones(CLASSES) if fault == "no weights" else jnp.array(WEIGHTS)
    if fault == "other weights":
        w = jnp.flip(w)
    logp = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(logp, y[:, None], -1)[:, 0] * w[y]  # rows
    smooth = -logp.sum(-1) if fault == "smooth without weights" else -(logp * w).sum(-1)
    if fault == "no smoothing":
        return nll.sum() / w[y].sum()  # loss
    rows = (1 - smoothing) * nll + smoothing / CLASSES * smooth
    return rows.mean() if fault == "mean" else rows.sum() / w[y].sum()  # loss


def in_jax(smoothing: float, fault: str = "") -> Any:
    p = {
        "a": jnp.zeros((5, 16)),
        "ab": jnp.zeros(16),
        "b": jnp.zeros((16, CLASSES)),
        "bb": jnp.zeros(CLASSES),
    }

    def loss_fn(p: Any, x: Any, y: Any) -> Any:
        return loss_in_jax(jax.nn.silu(x @ p["a"] + p["ab"]) @ p["b"] + p["bb"], y, smoothing, fault)

    return stablenum_jax.program(loss_fn, p, jnp.asarray(X), jnp.asarray(Y))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_losses_that_agree_are_the_same(smoothing: float) -> None:
    assert stablenum.diff(in_torch(smoothing), in_jax(smoothing)).ok


DIVIDED = "the left program divides by the sum of the class weights of the rows"
ROWS = "the left program weights each row by its class, and the right one does not"
SMOOTH = "in the term of the label smoothing, the left program weights the classes"
SHARES = "the label smoothing, with class weights, is 0.1 on the left and 0 on the right"
OTHERS = "the class weights differ: on the left"


@pytest.mark.parametrize(
    ("smoothing", "fault", "code", "said", "advice"),
    [
        (0.0, "mean", "reduction", DIVIDED, "not .mean()"),
        (0.1, "mean", "reduction", DIVIDED, "not .mean()"),
        (0.1, "no smoothing", "label_smoothing", SHARES, "the same label smoothing"),
        (0.0, "no weights", "missing_operation", ROWS, "class weights"),
        (0.1, "no weights", "missing_operation", ROWS, "class weights"),
        (0.1, "smooth without weights", "label_smoothing", SMOOTH, "in the smoothing term"),
        (0.0, "other weights", "reduction", OTHERS, "in the same order"),
        (0.1, "other weights", "reduction", OTHERS, "in the same order"),
    ],
)
def test_what_differs_is_named_at_the_loss(
    smoothing: float, fault: str, code: str, said: str, advice: str
) -> None:
    report = stablenum.diff(in_torch(smoothing), in_jax(smoothing, fault))

    cause, first = report.causes[0], report.first
    assert (cause.code, cause.confirmed) == (code, True), str(report)
    assert said in cause.sentence
    assert advice in cause.remedy
    assert first is not None
    assert first.left is not None
    assert "cross_entropy" in first.left.code
    assert not report.notes or "The arguments differ" not in str(report.notes)


def test_the_weights_are_told_where_one_side_has_none() -> None:
    cause = stablenum.diff(in_torch(0.1), in_jax(0.1, "no weights")).causes[0]

    labels = np.unique(Y)
    for label in labels:
        assert f"{WEIGHTS[label] / WEIGHTS[labels[0]]:.4g} for class {label}" in cause.sentence
