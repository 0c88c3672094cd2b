"""Results whose arrays do not fit into a file: sums and sketches of where their entries lie tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.lockfile import saving

DRAWS = np.random.default_rng(11)
X, W = (DRAWS.normal(size=s).astype(np.float32) for s in ((30, 16), (16, 24)))
QKV = (DRAWS.normal(size=(36, 16)) / 4).astype(np.float32)


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Makes recordings that hold the arrays of scalars alone."""
    monkeypatch.setattr(saving, "_VALUES", 64)

    def made(program: Any) -> Any:
        stablenum.save_program(program, tmp_path / "golden.snum")
        return stablenum.load_program(tmp_path / "golden.snum")

    return made


def output(after: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return stablenum_torch.program(lambda x, w: after(x @ w), torch.tensor(X), torch.tensor(W))


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows reversed": lambda y: y.flip(0) * 1,
    "columns shifted": lambda y: y.roll(3, 1) * 1,
    "rows shifted": lambda y: y.roll(1, 0) * 1,
    "two entries exchanged": lambda y: torch.cat([y.flatten()[[1, 0]], y.flatten()[2:]]).reshape(y.shape),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_output_in_another_order_is_another_output(name: str, golden: Callable[[Any], Any]) -> None:
    recorded = golden(output(lambda y: y))
    assert stablenum.diff(recorded, output(lambda y: y + 0)).ok
    assert not stablenum.diff(recorded, output(ORDERS[name])).ok


class Turned(torch.autograd.Function):
    """The identity, whose backward pass shifts the gradient's rows."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].roll(1, 0)


def test_a_gradient_in_another_order_is_another_gradient(golden: Callable[[Any], Any]) -> None:
    def program(turned: bool) -> Any:
        w = torch.nn.Parameter(torch.tensor(W))
        return stablenum_torch.program(
            lambda x: torch.tanh(x @ (Turned.apply(w) if turned else w)).pow(2).sum(), torch.tensor(X)
        )

    recorded = golden(program(turned=False))
    assert stablenum.diff(recorded, program(turned=False)).ok
    assert not stablenum.diff(recorded, program(turned=True)).ok


@jax.custom_vjp
def doubled(k: Any) -> Any:
    return k


doubled.defvjp(lambda k: (k, None), lambda _, g: (2 * g,))


@pytest.mark.parametrize("fault", [False, True])
def test_a_weight_that_the_other_side_has_in_parts_is_compared(
    fault: bool, golden: Callable[[Any], Any]
) -> None:
    w = torch.nn.Parameter(torch.tensor(QKV))

    def whole(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ w.T).chunk(3, -1)
        return (torch.softmax(q @ k.T, -1) @ v).pow(2).sum()

    def parts(p: Any, x: Any) -> Any:
        q, k, v = x @ p["q"].T, x @ (doubled(p["k"]) if fault else p["k"]).T, x @ p["v"].T
        return jnp.square(jax.nn.softmax(q @ k.T) @ v).sum()

    params = {name: jnp.asarray(part) for name, part in zip("qkv", np.split(QKV, 3), strict=True)}
    recorded = golden(stablenum_torch.program(whole, torch.tensor(X)))
    report = stablenum.diff(recorded, stablenum_jax.program(parts, params, jnp.asarray(X)))
    assert report.ok is not fault, str(report)


@pytest.mark.parametrize("fault", [False, True])
def test_a_weight_that_two_others_share_is_compared_by_the_sum_of_its_gradients(
    fault: bool, golden: Callable[[Any], Any]
) -> None:
    w = torch.nn.Parameter(torch.tensor(W))
    optimizer = torch.optim.SGD([w], lr=0.1)
    recorded = golden(
        stablenum_torch.program(
            lambda x: torch.tanh(x @ w @ w.T).pow(2).sum(), torch.tensor(X), optimizer=optimizer
        )
    )

    def apart(p: Any, x: Any) -> Any:
        return jnp.square(jnp.tanh(x @ p["a"] @ (doubled(p["b"]) if fault else p["b"]).T)).sum()

    params = {"a": jnp.asarray(W), "b": jnp.asarray(W)}
    other = stablenum_jax.program(apart, params, jnp.asarray(X), optimizer=optax.sgd(0.1))
    report = stablenum.diff(recorded, other, weights={"a": "w", "b": "w"})
    assert report.ok is not fault, str(report)
