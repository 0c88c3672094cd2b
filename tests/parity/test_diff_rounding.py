"""What rounding explains, neither too little nor too much: numbers that are chosen, or read on the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import Tensor, nn

import stablenum
import stablenum_jax
import stablenum_torch

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
W = RNG.normal(size=(4, 3)).astype(np.float32)


def straight_through(w: Tensor) -> Tensor:
    step = w.abs().amax(0, keepdim=True) / 7
    return w + (torch.round(w / step) * step - w).detach()


def without(w: Any) -> Any:
    step = jnp.max(jnp.abs(w), axis=0, keepdims=True) / 7
    return jnp.round(w / step) * step


def test_the_largest_entry_is_not_rounded_so_a_gradient_through_it_has_an_error() -> None:
    """The derivative of a maximum compares entries with it: noise on it would divide by a count of 0."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(W))})
    left = stablenum_torch.program(
        lambda x: (x @ straight_through(model["w"])).square().mean(), torch.tensor(X), model=model
    )
    right = stablenum_jax.program(
        lambda p, x: jnp.square(x @ without(p["w"])).mean(), {"w": jnp.asarray(W)}, X
    )
    report = stablenum.diff(left, right)
    assert not report.ok
    assert not any("no difference there counts" in note for note in report.notes)


def test_results_that_rounding_moves_as_far_as_they_go_are_named() -> None:
    """A quotient of two numbers that are equal but for rounding."""

    def made(factor: float) -> Any:
        model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(W))})

        def loss_fn(x: Tensor) -> Tensor:
            a, b = (x @ model["w"]).sum(), (x.sum(0) @ model["w"]).sum()
            return (a - b) / (a - b).abs().clamp(min=1e-30) * factor + (x @ model["w"]).square().mean()

        return stablenum_torch.program(loss_fn, torch.tensor(X), model=model)

    report = stablenum.diff(made(1.0), made(2.0))
    assert report.ok
    assert any("Rounding in float64 alone moves loss by more than 1 %" in note for note in report.notes)


def test_a_gradient_that_is_0_but_for_rounding_is_not_named() -> None:
    """That of a bias of keys, which softmax leaves out."""

    def made(order: int) -> Any:
        model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(W)), "b": nn.Parameter(torch.ones(3))})

        def loss_fn(x: Tensor) -> Tensor:
            k = x @ model["w"] + model["b"]
            scores = x[:, :3] @ k.T if order else (k @ x[:, :3].T).T
            return (torch.softmax(scores, -1) @ x).square().mean()

        return stablenum_torch.program(loss_fn, torch.tensor(X), model=model)

    report = stablenum.diff(made(0), made(1))
    assert report.ok
    assert report.notes == ()


@pytest.mark.parametrize("decay", [0.05, 0.06])
def test_what_an_optimizer_reads_on_the_host_is_rounded_to_float32(decay: float) -> None:
    """``torch.optim.Adafactor`` reads norms with ``item``; optax computes them in the program."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(W))})
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01, eps=(1e-15, 1e-3), weight_decay=0.05)
    left = stablenum_torch.program(
        lambda x: torch.tanh(x @ model["w"]).mean(), torch.tensor(X), model=model, optimizer=optimizer
    )
    tx = optax.adafactor(
        0.01, min_dim_size_to_factor=1, clipping_threshold=1.0, weight_decay_rate=0.01 * decay
    )
    right = stablenum_jax.program(
        lambda p, x: jnp.tanh(x @ p["w"]).mean(), {"w": jnp.asarray(W)}, X, optimizer=tx
    )
    assert stablenum.diff(left, right).ok == (decay == 0.05)


def routed(eps: float, w: Tensor, gate: Tensor) -> Any:
    """Each row goes to one of two experts; how many rows an expert gets depends on the numbers."""
    model = nn.ParameterDict({"w": nn.Parameter(w.clone()), "gate": nn.Parameter(gate.clone())})

    def loss_fn(x: Tensor) -> Tensor:
        h = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() - 0.9
        chosen = (h @ model["gate"]).argmax(-1)
        out = torch.zeros(len(x), 3)
        for index in range(2):
            rows = torch.where(chosen == index)[0]
            out = out.index_add(0, rows, (h[rows] @ model["w"]) * (index + 1))
        return out.square().mean()

    return stablenum_torch.program(loss_fn, torch.tensor(np.repeat(X, 8, 0)), model=model)


def test_values_that_choose_another_number_of_rows_do_not_end_the_comparison() -> None:
    gate = torch.tensor(RNG.normal(size=(4, 2)).astype(np.float32))
    report = stablenum.diff(routed(1e-5, torch.tensor(W), gate), routed(0.5, torch.tensor(W), gate))
    assert not report.ok
    assert report.first is not None
    assert report.first.left is not None
    assert "eps" in report.first.left.code
    jax.clear_caches()


@pytest.mark.parametrize("shift", [0.0, 1e-3])
def test_a_linear_system_is_solved_in_float64(shift: float) -> None:
    square = (W @ W.T + np.eye(4)).astype(np.float32)
    model = nn.ParameterDict({"a": nn.Parameter(torch.tensor(square))})

    def loss_fn(x: Tensor) -> Tensor:
        return torch.linalg.solve(model["a"], x.T).square().mean() + torch.linalg.slogdet(model["a"])[1]

    def port(p: Any, x: Any) -> Any:
        a = p["a"] + shift * jnp.eye(4)
        return jnp.square(jnp.linalg.solve(a, x.T)).mean() + jnp.linalg.slogdet(p["a"])[1]

    left = stablenum_torch.program(loss_fn, torch.tensor(X), model=model)
    report = stablenum.diff(left, stablenum_jax.program(port, {"a": jnp.asarray(square)}, X))
    assert report.ok == (shift == 0.0), str(report)
