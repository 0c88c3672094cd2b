"""A cause is confirmed if one side was changed as it says and the sides agreed, not by where they part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum
import stablenum_jax
import stablenum_torch

X = np.random.default_rng(1).normal(size=(12, 5)).astype(np.float32)
W = np.random.default_rng(2).normal(size=(5, 8)).astype(np.float32)
Function = Callable[[Any, Any], Any]


def report_of(of_torch: Function, of_jax: Function, w: np.ndarray = W) -> Any:
    """The report on two functions of a matrix and the data."""
    mine = torch.tensor(w, requires_grad=True)
    left = stablenum_torch.program(lambda x: of_torch(mine, x), torch.tensor(X))
    right = stablenum_jax.program(lambda p, x: of_jax(p["w"], x), {"w": jnp.asarray(w)}, jnp.asarray(X))
    report = stablenum.diff(left, right, weights={"w": "mine"})
    assert not report.ok
    assert report.causes
    return report


# Two functions of the same values, other entries of a table, gradients that one side does not have.
GUESSED: dict[str, tuple[Function, Function, np.ndarray]] = {
    "another function": (
        lambda w, x: torch.atan(x @ w).square().mean(),
        lambda w, x: jnp.mean(jnp.arcsinh(x @ w) ** 2),
        W,
    ),
    "other entries": (
        lambda w, x: (x[:, :3] @ w[torch.tensor([0, 3, 4])]).square().mean(),
        lambda w, x: jnp.mean((x[:, :3] @ w[jnp.asarray([0, 3, 2])]) ** 2),
        W,
    ),
    "a kink": (
        lambda w, x: (x.mean() * torch.relu(w)).mean(),
        lambda w, x: jnp.mean(x.mean() * jnp.maximum(w, 0)),
        np.zeros_like(W),
    ),
}


@pytest.mark.parametrize("name", GUESSED)
def test_what_only_a_value_of_the_other_side_mends_is_likely(name: str) -> None:
    report = report_of(*GUESSED[name])
    assert not any(cause.confirmed for cause in report.causes), str(report)


# What one side was changed by, and the results agree: a constant, an operand, a count, targets, a stop.
TRIED: dict[str, tuple[Function, Function, str]] = {
    "a constant": (
        lambda w, x: torch.nn.functional.layer_norm(x @ w, (8,), eps=1e-3).square().sum(1).sqrt().mean(),
        lambda w, x: jnp.mean(jnp.sqrt(jnp.sum(normal(x @ w, 1e-2) ** 2, axis=1))),
        "epsilon_value",
    ),
    "targets": (
        lambda w, x: torch.nn.functional.cross_entropy(x @ w, torch.arange(12) % 8, label_smoothing=0.1),
        lambda w, x: -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(12), jnp.arange(12) % 8]),
        "label_smoothing",
    ),
    "a stop": (
        lambda w, x: (torch.tanh(x @ w) * (x @ w).detach()).mean(),
        lambda w, x: jnp.mean(jnp.tanh(x @ w) * (x @ w)),
        "stopped_gradient",
    ),
}


def normal(h: Any, eps: float) -> Any:
    return (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + eps)


@pytest.mark.parametrize("name", TRIED)
def test_what_was_tried_on_one_side_is_confirmed(name: str) -> None:
    left, right, code = TRIED[name]
    (cause,) = report_of(left, right).causes
    assert (cause.code, cause.confirmed) == (code, True), cause
