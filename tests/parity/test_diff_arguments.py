"""What ``stablenum.diff`` says where the two programs are given other arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

RNG = np.random.default_rng(0)
X, OTHER = (RNG.normal(size=(8, 12)).astype(np.float32) for _ in range(2))
Y = np.array([0, 2, 1, 0, 1, 2, 0, 1])
IMAGES = RNG.normal(size=(6, 3, 5, 4)).astype(np.float32)
W = RNG.normal(size=(12, 3)).astype(np.float32)


def classifier(x: Any, y: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3))
    return stablenum_torch.program(
        lambda x, y: nn.functional.cross_entropy(model(x), y), torch.tensor(x), torch.tensor(y), model=model
    )


def port(x: Any, y: Any) -> Any:
    def loss(p: Any, x: Any, y: Any) -> Any:
        logits = jnp.tanh(x @ p["a"] + p["ab"]) @ p["b"] + p["bb"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    parameters = {"a": jnp.zeros((12, 6)), "ab": jnp.zeros(6), "b": jnp.zeros((6, 3)), "bb": jnp.zeros(3)}
    return stablenum_jax.program(loss, parameters, jnp.asarray(x), jnp.asarray(y))


def told(report: Any) -> list[str]:
    return [note for note in report.notes if note.startswith("The arguments differ")]


SHAPES = (
    "The arguments differ: {} of the left program and {} of the right one have other shapes. "
    "Give both programs the same batch, unless you mean this."
)


@pytest.mark.parametrize("rows", [X[:4], OTHER[:4]], ids=["a part", "others"])
def test_a_batch_of_another_size_is_named_and_nothing_is_guessed(rows: Any) -> None:
    for left, right, shapes in (
        (classifier(X, Y), port(rows, Y[:4]), ("x [8, 12]", "args[1] [4, 12]")),
        (classifier(rows, Y[:4]), port(X, Y), ("x [4, 12]", "args[1] [8, 12]")),
        (port(X, Y), classifier(rows, Y[:4]), ("args[1] [8, 12]", "x [4, 12]")),
    ):
        report = stablenum.diff(left, right)
        assert not report.ok
        assert told(report) == [SHAPES.format(*shapes)], str(report)
        assert all(cause.confirmed for cause in report.causes), str(report)


def test_a_batch_of_other_contents_is_named_and_nothing_is_guessed() -> None:
    report = stablenum.diff(classifier(X, Y), port(OTHER, Y))
    (note,) = told(report)
    assert "their contents are not equal" in note
    assert not report.causes, str(report)


def batch_in_torch(function: Any, *arguments: Any) -> Any:
    w = torch.tensor(W, requires_grad=True)
    return stablenum_torch.program(lambda *a: function(w, *a), *map(torch.tensor, arguments))


def batch_in_jax(function: Any, *arguments: Any) -> Any:
    return stablenum_jax.program(
        lambda p, *a: 2 * function(p["w"], *a), {"w": W}, *map(jnp.asarray, arguments)
    )


LENGTHS = np.array([3, 5, 2, 6, 4, 1, 6, 2])
MASK = np.arange(6) < LENGTHS[:, None]
TOKENS = RNG.integers(0, 12, (8, 7))
PADDED = np.concatenate([X, np.zeros((3, 12), np.float32)])


def rows_of(w: Any, x: Any) -> Any:
    return (x[:8] @ w).exp().sum() if isinstance(x, torch.Tensor) else jnp.exp(x[:8] @ w).sum()


def looked_up(w: Any, *x: Any) -> Any:
    return (w[x[0][:, :6]] * w[x[-1][:, -6:]]).sum()


def masked(w: Any, x: Any, kept: Any) -> Any:
    if kept.ndim == 1 or kept.shape[1] == 1:
        numbers = torch.arange(6) if isinstance(kept, torch.Tensor) else jnp.arange(6)
        kept = numbers < kept.reshape(-1, 1)
    return (x @ w).sum() * (1.0 * kept).sum()


def pixels(w: Any, x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return (x.permute(0, 2, 3, 1)[:, :5, :4] ** 3).sum() * w.sum()
    return (x[:, :5, :4] ** 3).sum() * w.sum()


@pytest.mark.parametrize(
    ("function", "left", "right"),
    [
        (rows_of, (X,), (PADDED,)),
        (looked_up, (TOKENS,), (TOKENS[:, :-1], TOKENS[:, 1:])),
        (looked_up, (TOKENS[:, :-1], TOKENS[:, 1:]), (TOKENS,)),
        (masked, (X, MASK), (X, LENGTHS)),
        (masked, (X, LENGTHS[:, None]), (X, MASK)),
        (masked, (X, LENGTHS[:, None]), (X, MASK.astype(int))),
        (pixels, (IMAGES,), (IMAGES.transpose(0, 2, 3, 1),)),
        (pixels, (IMAGES,), (np.pad(IMAGES.transpose(0, 2, 3, 1), ((0, 0), (0, 2), (0, 2), (0, 0))),)),
    ],
    ids=[
        "padded rows",
        "cut left",
        "cut right",
        "lengths",
        "column",
        "whole mask",
        "channels",
        "padded images",
    ],
)
def test_one_batch_that_is_laid_out_in_two_ways_is_not_named(function: Any, left: Any, right: Any) -> None:
    report = stablenum.diff(batch_in_torch(function, *left), batch_in_jax(function, *right))
    assert not report.ok
    assert not told(report), str(report)


def test_an_extra_key_and_class_numbers_are_not_named() -> None:
    def of_jax(w: Any, x: Any, y: Any, key: Any) -> Any:
        noise = 0 * jax.random.normal(key, x.shape)
        return 2 * -(y * jax.nn.log_softmax((x + noise) @ w)).sum(1).mean()

    left = batch_in_torch(lambda w, x, y: nn.functional.cross_entropy(x @ w, y), X, Y)
    key = jax.random.PRNGKey(0)
    right = stablenum_jax.program(of_jax, W, jnp.asarray(X), jax.nn.one_hot(Y, 3), key)
    report = stablenum.diff(left, right)
    assert not report.ok
    assert not told(report), str(report)


def test_a_batch_of_another_size_in_another_layout_is_named() -> None:
    other = RNG.normal(size=(2, 5, 4, 3)).astype(np.float32)
    report = stablenum.diff(batch_in_torch(pixels, IMAGES), batch_in_jax(pixels, other))
    (note,) = told(report)
    assert "[6, 3, 5, 4]" in note
    assert "[2, 5, 4, 3]" in note


def test_a_batch_of_another_size_and_length_is_named() -> None:
    def both(w: Any, x: Any) -> Any:
        return (x @ w).sum() * x[0, 0, 0]

    report = stablenum.diff(
        batch_in_torch(both, RNG.normal(size=(4, 6, 12)).astype(np.float32)),
        batch_in_jax(both, RNG.normal(size=(2, 5, 12)).astype(np.float32)),
    )
    (note,) = told(report)
    assert "[4, 6, 12]" in note


# --- single numbers ----------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer whose output is multiplied by what a function makes of a buffer and the weights."""

    def __init__(self, number: float, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.function = nn.Linear(12, 5), function
        self.register_buffer("scale", torch.tensor(number))

    def forward(self, x: Any) -> Any:
        return self.lin(x) * self.function(self.scale, self.lin.weight)


def scaled(number: float, function: Any) -> Any:
    model = Scaled(number, function)
    return stablenum_torch.program(lambda x: model(x).square().exp().mean(), torch.tensor(X / 4), model=model)


KEPT = {"lin.weight": "lin.weight", "lin.bias": "lin.bias"}


@pytest.mark.parametrize(
    "function",
    [lambda s, w: s, lambda s, w: s.exp(), lambda s, w: w.square().mean() + s],
    ids=["", "exp", "sum"],
)
def test_a_number_that_the_map_leaves_out_is_named_with_its_values(function: Any) -> None:
    report = stablenum.diff(scaled(1.148, function), scaled(0.248, function), weights=KEPT)
    (cause,) = report.causes
    assert (cause.code, cause.confirmed) == ("other_input", True), str(report)
    assert "buffer scale = 1.148 in the left program, and buffer scale = 0.248 in the right" in cause.sentence


def test_a_parameter_of_one_entry_of_a_jax_program_is_named() -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.exp(jnp.square((x @ p["lin"]["weight"] + p["lin"]["bias"]) * p["scale"])))

    parameters = {"lin": {"weight": jnp.zeros((12, 5)), "bias": jnp.zeros(5)}, "scale": jnp.ones(1) * 0.3}
    right = stablenum_jax.program(loss, parameters, jnp.asarray(X / 4))
    weights = {f"lin.{n}": f"lin.{n}" for n in ("weight", "bias")}
    report = stablenum.diff(scaled(1.148, lambda s, w: s), right, weights=weights)
    assert (report.causes[0].code, report.causes[0].confirmed) == ("other_input", True), str(report)
    assert "buffer scale = 1.148 in the left program, and parameter scale = 0.3" in report.causes[0].sentence


def test_a_factor_between_two_numbers_that_are_computed_confirms_nothing() -> None:
    left = scaled(1.0, lambda s, w: (w[0] * w[1].cos()).sum())
    right = scaled(1.0, lambda s, w: w.abs().sin().mean())
    report = stablenum.diff(left, right)
    assert report.first is not None
    assert not [c for c in report.causes if c.code == "scale" and c.confirmed], str(report)


@pytest.mark.parametrize("width", [5.0**-0.5, 1 / 12, 0.125, 0.3])
def test_a_factor_that_is_written_or_the_root_of_a_size_is_confirmed(width: float) -> None:
    left, right = scaled(1.0, lambda s, w: s), scaled(1.0, lambda s, w: s * width)
    report = stablenum.diff(left, right)
    assert report.first is not None
    assert report.causes[0].confirmed, str(report)
    assert report.causes[0].code in ("scale", "extra_operation"), str(report)


RATIOS = [1.0, 0.5, 2.0]


def weighted_in_torch(x: Any, y: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def loss(x: Any, y: Any) -> Any:
        weight = torch.tensor(RATIOS)
        return nn.functional.cross_entropy(model(x), y, weight=weight)

    return stablenum_torch.program(loss, torch.tensor(x), torch.tensor(y), model=model)


def weighted_in_jax(x: Any, y: Any) -> Any:
    def normalised(p: Any, stats: Any, h: Any) -> Any:
        mean, var = h.mean(0), h.var(0)
        new = {n: 0.9 * stats[n] + 0.1 * v for n, v in (("mean", mean), ("var", var))}
        return (h - mean) / jnp.sqrt(var + 1e-5) * p["scale"] + p["shift"], new

    def loss(p: Any, stats: Any, x: Any, y: Any) -> Any:
        h, new = normalised(p, stats["norm"], x @ p["a"] + p["ab"])
        terms = optax.softmax_cross_entropy_with_integer_labels(h @ p["b"] + p["bb"], y)
        return terms.mean(), {"norm": new}

    shapes = {"a": (12, 6), "ab": 6, "scale": 6, "shift": 6, "b": (6, 3), "bb": 3}
    stats = {"norm": {"mean": jnp.zeros(6), "var": jnp.ones(6)}}
    p = {n: jnp.zeros(s) for n, s in shapes.items()}
    return stablenum_jax.program(loss, p, stats, jnp.asarray(x), jnp.asarray(y))


def test_a_constant_of_the_loss_and_running_statistics_are_no_batches() -> None:
    report = stablenum.diff(weighted_in_torch(X, Y), weighted_in_jax(X, Y))
    assert not report.ok
    assert not told(report), str(report)


def test_a_batch_of_another_size_is_named_beside_statistics() -> None:
    report = stablenum.diff(weighted_in_torch(X, Y), weighted_in_jax(X[:6], Y[:6]))
    assert told(report) == [SHAPES.format("x [8, 12]", "args[2] [6, 12]")]
