"""An argument of an operation that is set otherwise is found by setting it to what the other side has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.causes.by_setting import _others
from stablenum.diagnosis.diff.sides.calls import Setting

X = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)
W = np.random.default_rng(2).normal(size=(6, 6)).astype(np.float32)
Function = Callable[[Any, Any], Any]


def in_torch(loss: Function) -> Any:
    model = torch.nn.ParameterDict({"w": torch.tensor(W)})
    return stablenum_torch.program(lambda x: loss(model["w"], x), torch.tensor(X), model=model)


def in_jax(loss: Function) -> Any:
    return stablenum_jax.program(lambda p, x: loss(p["w"], x), {"w": jnp.asarray(W)}, jnp.asarray(X))


def causes_of(left: Any, right: Any) -> list[tuple[bool, str]]:
    report = stablenum.diff(left, right)
    assert not report.ok
    return [(c.confirmed, c.sentence) for c in report.causes]


# In two programs of PyTorch numbers are no values: the call is made again.
WITHIN: dict[str, tuple[Function, Function, str]] = {
    "a limit": (
        lambda w, x: (x @ w).clamp(-1, 1).square().mean(),
        lambda w, x: (x @ w).clamp(-0.9, 1).square().mean(),
        "in clamp, the left program uses -1 and the right one -0.9.",
    ),
    "a slope": (
        lambda w, x: functional.leaky_relu(x @ w, 0.2).mean(),
        lambda w, x: functional.leaky_relu(x @ w, 0.03).mean(),
        "in leaky_relu, the left program uses 0.2 and the right one 0.03.",
    ),
    "a number that is not given on one side, and stands in two operations on the other": (
        lambda w, x: functional.softplus(x @ w, beta=2).square().mean(),
        lambda w, x: functional.softplus(x @ w).square().mean(),
        "in softplus, the left program uses 2 and the right one 1.",
    ),
    "an axis": (
        lambda w, x: (x @ w).cumsum(0).square().mean(),
        lambda w, x: (x @ w).cumsum(1).square().mean(),
        "in cumsum, the left program uses dim 0 and the right one 1.",
    ),
    "a power": (
        lambda w, x: ((x @ w).abs() + 0.1).pow(1.5).mean(),
        lambda w, x: ((x @ w).abs() + 0.1).pow(1.25).mean(),
        "in pow, the left program uses 1.5 and the right one 1.25.",
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_setting_of_two_programs_of_pytorch(name: str) -> None:
    left, right, sentence = WITHIN[name]
    assert causes_of(in_torch(left), in_torch(right)) == [(True, sentence)]


# And what JAX keeps as a parameter of an equation.
BETWEEN: dict[str, tuple[Function, Function, str]] = {
    "an axis": (
        lambda w, x: (x @ w).cumsum(0).square().mean(),
        lambda w, x: jnp.mean(jnp.cumsum(x @ w, 1) ** 2),
        "in cumsum, the left program uses axis 0 and the right one 1.",
    ),
    "a flag": (
        lambda w, x: (x @ w).cumsum(0).square().mean(),
        lambda w, x: jnp.mean(jax.lax.cumsum(x @ w, 0, reverse=True) ** 2),
        "in cumsum, the flag reverse is False in the left program and True in the right one.",
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_setting_of_a_program_of_jax(name: str) -> None:
    left, right, sentence = BETWEEN[name]
    assert causes_of(in_torch(left), in_jax(right)) == [(True, sentence)]


def test_a_setting_in_each_of_several_layers() -> None:
    def layered(slope: float) -> Function:
        def loss(w: Any, x: Any) -> Any:
            for _ in range(3):
                x = functional.celu(x @ w, alpha=slope)
            return x.square().mean()

        return loss

    found = causes_of(in_torch(layered(0.5)), in_torch(layered(0.7)))
    assert found[0][0]
    assert "0.5" in found[0][1]
    assert "0.7" in found[0][1]


def test_what_no_setting_mends_names_what_was_tried() -> None:
    report = stablenum.diff(
        in_torch(lambda w, x: torch.asinh(x @ w).mean()), in_torch(lambda w, x: torch.atan(x @ w).mean())
    )
    (cause,) = report.causes
    assert not cause.confirmed
    assert cause.sentence == "the two lines differ; no single change that was tried makes them agree."
    assert not cause.remedy


def test_an_axis_is_set_to_the_other_axes_and_a_number_to_what_the_other_line_has() -> None:
    assert list(_others(Setting(0, "dim", 0), {7.0}, axes=3)) == [1, 2]
    assert list(_others(Setting(0, "axis", -1), {7.0}, axes=2)) == [0]
    assert list(_others(Setting(0, "kernel_size", 3), {7.0, 0.5, 65504.0}, axes=2)) == [7]
    assert list(_others(Setting(0, "", True), {7.0}, axes=2)) == [False]


# --- indices, flags and constants --------------------------------------------------------------------------

TO = np.array([0, 1, 1, 2, 3, 5, 4, 5])
FROM = np.array([1, 0, 2, 3, 3, 4, 5, 0])
WEIGHTS = np.linspace(0.5, 2.0, 6).astype(np.float32)
KEPT = np.tril(np.ones((6, 6), bool))


def messages(to: Any, of: Any) -> Function:
    """Sums over the edges of a graph, in JAX."""
    return lambda w, x: jnp.mean(jax.ops.segment_sum((x @ w)[of], jnp.asarray(to), 6) ** 2)


def messages_in_torch(w: Any, x: Any) -> Any:
    made = (x @ w)[torch.tensor(FROM)]
    return torch.zeros(6, 6).index_add(0, torch.tensor(TO), made).square().mean()


def weighted(weights: Any) -> Function:
    return lambda w, x: jnp.mean(jnp.tanh(x @ w) * jnp.asarray(weights))


def masked(kept: Any) -> Function:
    return lambda w, x: jnp.mean(jax.nn.softmax(jnp.where(jnp.asarray(kept), x @ w, -jnp.inf), axis=1) * x)


def masked_in_torch(w: Any, x: Any) -> Any:
    scores = (x @ w).masked_fill(torch.tensor(~KEPT), float("-inf"))
    return (torch.softmax(scores, 1) * x).mean()


def weighted_in_torch(w: Any, x: Any) -> Any:
    return (torch.tanh(x @ w) * torch.tensor(WEIGHTS)).mean()


ARRAYS: dict[str, tuple[Function, Function, str]] = {
    "edges in another order": (messages_in_torch, messages(TO[::-1], FROM), "in reverse order"),
    "one edge to another node": (
        messages_in_torch,
        messages([0, 1, 1, 2, 3, 5, 4, 4], FROM),
        "at 1 of 8 places",
    ),
    "weights in reverse order": (weighted_in_torch, weighted(WEIGHTS[::-1]), "in reverse order"),
    "weights by a factor": (weighted_in_torch, weighted(WEIGHTS[::-1] * 0 + WEIGHTS * 2), "2"),
    "one other weight": (weighted_in_torch, weighted([0.5, *WEIGHTS[1:5], 1.0]), "at 1 of 6 places"),
    "a mask that is shifted by one": (
        masked_in_torch,
        masked(np.tril(np.ones((6, 6), bool), 1)),
        "flags differ at 5 of 36",
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_a_line_reads_is_compared_with_that_of_the_other_line(name: str) -> None:
    left, right, said = ARRAYS[name]
    ((confirmed, sentence),) = causes_of(in_torch(left), in_jax(right))
    assert confirmed
    assert said in sentence
