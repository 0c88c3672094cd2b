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
    """Quotients of numbers that are equal but for rounding: so many that each draw of noise moves some."""

    wide = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)

    def made(factor: float) -> Any:
        model = nn.ParameterDict({"w": nn.Parameter(torch.tensor(wide))})

        def loss_fn(x: Tensor) -> Tensor:
            zeros = (x @ model["w"]).sum(0) - x.sum(0) @ model["w"]
            signs = zeros / zeros.abs().clamp(min=1e-30)
            return signs @ torch.tensor(wide[0]) * factor + (x @ model["w"]).square().mean()

        return stablenum_torch.program(loss_fn, torch.tensor(X), model=model)

    report = stablenum.diff(made(1.0), made(2.0))
    assert report.ok
    said = "Rounding in float64 alone moves loss, gradient of w by more than 1 %"
    assert any(said in note for note in report.notes)


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


def block(dtype: Any, epsilon: float = 1e-5, implementation: str | None = None) -> Any:
    """Attention and GELU between norms; the numbers in it are rounded to the format that it computes in."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (24, 72)) / 5, "o": jax.random.normal(keys[1], (24, 24)) / 5}
    x = jax.random.normal(keys[2], (2, 6, 24))

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + epsilon)

    def loss_fn(params: Any, x: Any) -> Any:
        params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
        q, k, v = jnp.split((norm(x) @ params["w"]).reshape(2, 6, 2, 36), 3, axis=-1)
        heads = jax.nn.dot_product_attention(q, k / 24**0.5, v, scale=1.0, implementation="xla")
        out = jax.nn.gelu(norm(heads.reshape(2, 6, 24)) @ params["o"], approximate=False) * 0.3
        return (out.astype(jnp.float32) ** 2).mean()

    return stablenum_jax.program(loss_fn, params, x)


def original(epsilon: float = 1e-5) -> Any:
    """The block in PyTorch and float32."""
    of = block(jnp.float32)
    params = {n: torch.tensor(np.asarray(of.parameters()[n]), dtype=torch.float32) for n in ("w", "o")}
    module = nn.ParameterDict({name: nn.Parameter(p) for name, p in params.items()})
    x = torch.tensor(np.asarray(jax.random.normal(jax.random.split(jax.random.key(0), 3)[2], (2, 6, 24))))

    def loss_fn(x: Any) -> Any:
        y = nn.functional.layer_norm(x, (24,), eps=epsilon)
        q, k, v = (y @ module["w"]).reshape(2, 6, 2, 36).transpose(1, 2).chunk(3, dim=-1)
        heads = nn.functional.scaled_dot_product_attention(q, k / 24**0.5, v, scale=1.0)
        y = nn.functional.layer_norm(heads.transpose(1, 2).reshape(2, 6, 24), (24,), eps=epsilon)
        return (nn.functional.gelu(y @ module["o"]) * 0.3).square().mean()

    return stablenum_torch.program(loss_fn, x, model=module)


@pytest.mark.parametrize("left", [lambda: block(jnp.float32), lambda: block(jnp.bfloat16), original])
def test_a_program_in_bfloat16_with_rounded_numbers_is_the_same(left: Any) -> None:
    report = stablenum.diff(left(), block(jnp.bfloat16))
    assert report.ok, str(report)
    assert report.right_off is not None
    assert 1e-3 < report.right_off.added < 0.1


@pytest.mark.parametrize("left", [block, original])
def test_another_number_is_found_in_bfloat16(left: Any) -> None:
    before = left(jnp.float32) if left is block else left()
    report = stablenum.diff(before, block(jnp.bfloat16, epsilon=1e-3))
    assert report.causes[0].code == "epsilon_value", str(report)
    assert report.causes[0].confirmed
    assert "0.001" in report.causes[0].sentence


def test_a_mean_that_is_0_but_for_rounding_does_not_round_most() -> None:
    """That of a batch norm after another one: what it is off is as large as it is."""

    def made() -> Any:
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
        model = nn.Sequential(nn.Linear(4, 3), *norms, nn.Linear(3, 2))

        def loss_fn(x: Tensor) -> Tensor:
            return model(x).square().mean()

        return stablenum_torch.program(loss_fn, torch.tensor(X), model=model)

    report = stablenum.diff(made(), made())
    assert report.ok
    for off in (report.left_off, report.right_off):
        assert off is not None
        assert off.added < 1e-4
    assert max(row.off or 0.0 for row in report.left_rows) <= 1.0
