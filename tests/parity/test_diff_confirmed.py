"""A cause is confirmed if one side was changed as it says and the sides agreed, not by where they part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

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


# Two functions of the same values, gradients that one side does not have.
GUESSED: dict[str, tuple[Function, Function, np.ndarray]] = {
    "another function": (
        lambda w, x: torch.atan(x @ w).square().mean(),
        lambda w, x: jnp.mean(jnp.arcsinh(x @ w) ** 2),
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
    "other entries": (
        lambda w, x: (x[:, :3] @ w[torch.tensor([0, 3, 4])]).square().mean(),
        lambda w, x: jnp.mean((x[:, :3] @ w[jnp.asarray([0, 3, 2])]) ** 2),
        "other_input",
    ),
    "a constant": (
        lambda w, x: torch.nn.functional.layer_norm(x @ w, (8,), eps=1e-3).square().sum(1).sqrt().mean(),
        lambda w, x: jnp.mean(jnp.sqrt(jnp.sum(normal(x @ w, 1e-2) ** 2, axis=1))),
        "epsilon_value",
    ),
    "a limit, which JAX casts before it is used": (
        lambda w, x: (x @ w).clamp(-1, 1).square().mean(),
        lambda w, x: jnp.mean(jnp.clip(x @ w, -0.9, 1) ** 2),
        "other_function",
    ),
    "a slope, which is not given in PyTorch": (
        lambda w, x: torch.nn.functional.leaky_relu(x @ w).square().mean(),
        lambda w, x: jnp.mean(jax.nn.leaky_relu(x @ w, 0.02) ** 2),
        "scale",
    ),
    "a factor of what lies below zero": (
        lambda w, x: torch.nn.functional.elu(x @ w).square().mean(),
        lambda w, x: jnp.mean(jax.nn.elu(x @ w, 0.9) ** 2),
        "other_function",
    ),
    "a number that is used twice": (
        lambda w, x: torch.nn.functional.huber_loss(x @ w, torch.zeros(12, 8), delta=0.5),
        lambda w, x: jnp.mean(optax.huber_loss(x @ w, jnp.zeros((12, 8)), delta=1.0)),
        "other_function",
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


def test_a_number_that_is_added_is_not_taken_for_a_function_that_changes_nothing() -> None:
    """An absolute value of positive numbers is near enough to these with 1e-8 beside them."""
    cause = report_of(
        lambda w, x: torch.log((x @ w).abs()).sum(), lambda w, x: jnp.sum(jnp.log(jnp.abs(x @ w) + 1e-8))
    ).causes[0]
    assert (cause.code, cause.confirmed) == ("extra_operation", True)
    assert "absolute" not in cause.sentence


def test_another_function_is_not_missing_because_the_one_that_is_there_could_follow_it() -> None:
    """A relu gives what a softplus gives it: it is there in its place, and not after it."""
    report = report_of(
        lambda w, x: torch.nn.functional.softplus(x @ w).square().mean(),
        lambda w, x: jnp.mean(jax.nn.relu(x @ w) ** 2),
    )
    assert report.first.right.operation == "relu"
    assert (report.causes[0].code, report.causes[0].confirmed) == ("other_function", True)


@pytest.mark.parametrize("ported", [True, False])
def test_a_parameter_without_a_counterpart_is_named(ported: bool) -> None:
    """A port without the bias, or with one that its original does not have."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6, bias=ported), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    params = {
        "a": np.ones((5, 6), np.float32),
        "c": np.ones((6, 1), np.float32),
        "d": np.zeros(1, np.float32),
    }
    if not ported:
        params["b"] = np.full(6, 0.5, np.float32)

    def of_jax(p: Any, x: Any) -> Any:
        h = x @ p["a"] if ported else x @ p["a"] + p["b"]
        return jnp.mean((jnp.tanh(h) @ p["c"] + p["d"]) ** 2)

    report = stablenum.diff(
        stablenum_torch.program(lambda x: model(x).square().mean(), torch.tensor(X), model=model),
        stablenum_jax.program(of_jax, params, X),
        weights=("match", {} if ported else {"b": None}),
    )
    (cause,) = report.causes
    code, name = ("missing_operation", "0.bias") if ported else ("extra_operation", "b")
    assert (cause.code, cause.confirmed) == (code, True)
    assert f"reads {name} here" in cause.sentence


class NovoGrad(torch.optim.Optimizer):
    """The rule of optax, with an epsilon of 1e-8 where that one has 1e-6."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state, square = self.state[p], (p.grad**2).sum()
            if state:
                state["v"].mul_(0.98).add_(square, alpha=0.02)
                state["m"].mul_(0.95).add_(p.grad / (state["v"].sqrt() + 1e-8))
            else:
                state["v"], state["m"] = square, p.grad / (square.sqrt() + 1e-8)
            p.add_(state["m"], alpha=-1e-2)


def test_one_epsilon_is_one_difference_in_all_steps_and_parameters() -> None:
    """optax begins in another branch than it goes on in, and a bias of one entry fits every law."""
    y = X[:, :1] - 0.5
    model = torch.nn.Linear(5, 1)
    report = stablenum.diff(
        stablenum_torch.program(
            lambda x, y: (model(x) - y).square().mean(),
            torch.tensor(X),
            torch.tensor(y),
            model=model,
            optimizer=NovoGrad(model.parameters()),
        ),
        stablenum_jax.program(
            lambda p, x, y: jnp.mean((x @ p["w"] + p["b"] - y) ** 2),
            {"w": np.zeros((5, 1), np.float32), "b": np.zeros(1, np.float32)},
            X,
            y,
            optimizer=optax.novograd(1e-2, b1=0.95, b2=0.98),
        ),
        steps=3,
    )
    (difference,) = report.differences
    assert [(c.code, c.confirmed) for c in difference.causes] == [("epsilon_value", True)]


# What the right side does to its indices, and what is said of that.
INDICES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shifted": (lambda i: i + 1, "shifted by +1"),
    "others": (lambda i: i.at[0].set(4), "at 2 of 8 places"),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_are_changed_as_the_sentence_says(name: str) -> None:
    """A second table, whose entries one side repeats for each row, is not where they part."""
    change, said = INDICES[name]
    rows, places = (torch.tensor(x, requires_grad=True) for x in (W, W[:4] ** 2))
    ids = np.array([[0, 2, 1, 3]] * 2)

    def of_torch(ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows[ids] + places[torch.arange(4)][None]).square().mean()

    def of_jax(p: Any, ids: Any) -> Any:
        places = p["places"][jnp.broadcast_to(jnp.arange(4), (2, 4))]
        return jnp.mean(jnp.tanh(p["rows"][jax.vmap(change)(ids)] + places) ** 2)

    report = stablenum.diff(
        stablenum_torch.program(of_torch, torch.tensor(ids)),
        stablenum_jax.program(of_jax, {"rows": W, "places": W[:4]}, ids),
    )
    (cause,) = report.causes
    assert (cause.code, cause.confirmed, said in cause.sentence) == ("other_input", True, True)


def test_an_update_of_one_entry_confirms_no_law() -> None:
    """Any difference of one number is a multiple of the parameter."""
    w = torch.tensor([0.5], requires_grad=True)
    report = stablenum.diff(
        stablenum_torch.program(
            lambda x: (x * w).mean(), torch.tensor(X), optimizer=torch.optim.SGD([w], lr=0.1)
        ),
        stablenum_jax.program(
            lambda p, x: jnp.mean(x * p["w"]),
            {"w": np.ones(1, np.float32)},
            X,
            optimizer=optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.1)),
        ),
    )
    assert not report.ok
    assert not any(cause.confirmed for cause in report.causes), str(report)


def test_one_epsilon_at_two_lines_is_one_difference() -> None:
    plain = nnx.LayerNorm(8, epsilon=1e-3, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))

    def of_torch(w: Any, x: Any) -> Any:
        h = torch.tanh(torch.nn.functional.layer_norm(x @ w, (8,)))
        return torch.nn.functional.layer_norm(h * w[0], (8,)).sin().mean()

    def of_jax(w: Any, x: Any) -> Any:
        h = jnp.tanh(plain(x @ w))
        return jnp.mean(jnp.sin(plain(h * w[0])))

    report = report_of(of_torch, of_jax)
    (difference,) = report.differences
    assert (difference.causes[0].code, len(difference.also)) == ("epsilon_value", 1), str(report)
    assert "also at " in str(report)


def test_a_parameter_without_a_gradient_but_for_rounding_hides_no_cause() -> None:
    """One number that is added to all logits of a row has no gradient: what Adam makes of it is chance."""
    labels = np.arange(12) % 8
    model = torch.nn.ParameterDict({"w": torch.tensor(W), "b": torch.full((1,), 0.3)})
    left = stablenum_torch.program(
        lambda x: torch.nn.functional.cross_entropy(x @ model["w"] + model["b"], torch.tensor(labels)),
        torch.tensor(X),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
    )

    def loss(p: Any, x: Any) -> Any:
        logits = x @ p["w"] + p["b"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    right = stablenum_jax.program(
        loss, {"w": W, "b": np.full(1, 0.3, np.float32)}, X, optimizer=optax.adamw(1e-3, weight_decay=0.0)
    )
    report = stablenum.diff(left, right)
    assert [(c.code, c.confirmed) for c in report.causes] == [("decay_coupling", True)], str(report)
