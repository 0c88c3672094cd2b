"""``diff`` on loops that are too long to be opened: their iterations run compiled, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum_jax._diagnosis.replay import control_flow

LONG = 12
x = np.linspace(0.5, 1.5, 3, dtype=np.float32)
w = np.float32([[0.9, 0.1, 0.0], [0.0, 0.8, 0.1], [0.1, 0.0, 0.7]])


def scanned(w: Any, x: Any, c: float) -> Any:
    return lax.scan(lambda h, _: (jnp.tanh(c * (w @ h) + 0.1), h.sum()), x, None, length=LONG)


def with_while(w: Any, x: Any, c: float) -> Any:
    return lax.fori_loop(0, LONG, lambda i, h: jnp.sin(w @ h) * c + 0.2 * (i % 3), x)


def nested(w: Any, x: Any, c: float) -> Any:
    """With a short loop, a branch and a rule of its own inside."""

    def body(h: Any, i: Any) -> tuple[Any, Any]:
        h = lax.fori_loop(0, 3, lambda _, h: 0.5 * (w @ h), h)
        return lax.cond(i % 2 == 0, lambda h: h + 0.1, lambda h: jax.nn.softplus(h * c), h), None

    return lax.scan(body, x, jnp.arange(LONG))[0]


def solved(w: Any, x: Any, c: float) -> Any:
    return lax.scan(lambda h, _: (jnp.linalg.solve(w + jnp.eye(3), h) + 0.3 * c, None), x, None, length=LONG)[
        0
    ]


def gathered(w: Any, x: Any, c: float) -> Any:
    return lax.scan(lambda h, i: (h.at[i % 3].add(0.1 * c) @ w, None), x, jnp.arange(LONG))[0]


@pytest.mark.parametrize("loop", [scanned, with_while, nested, solved, gathered], ids=lambda f: f.__name__)
def test_a_long_loop_is_the_same_as_itself_and_not_as_another(
    loop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_flow, "OPENED_EQUATIONS", 4)

    def program(c: float) -> Any:
        return stablenum_jax.program(
            lambda p, x: sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(loop(p["w"], x, c))),
            {"w": w},
            x,
        )

    assert stablenum.diff(program(0.5), program(0.5)).ok
    assert not stablenum.diff(program(0.5), program(0.4)).ok


@pytest.mark.slow
def test_a_long_loop_is_compared_with_one_of_pytorch() -> None:
    def of_torch(x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(500):
            h = torch.tanh(0.3 * (weight @ h) + 0.1)
        return h.square().sum()

    def of_jax(p: Any, x: Any) -> Any:
        h, _ = lax.scan(lambda h, _: (jnp.tanh(0.3 * (p["w"] @ h) + 0.1), None), x, None, length=500)
        return jnp.sum(jnp.square(h))

    weight = torch.tensor(w, requires_grad=True)
    report = stablenum.diff(
        stablenum_torch.program(of_torch, torch.tensor(x)), stablenum_jax.program(of_jax, {"w": w}, x)
    )
    assert report.ok, str(report)


def test_what_differs_in_every_iteration_is_one_difference() -> None:
    """Also in more iterations than are set right one after the other."""

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(30):
            h = torch.atan(weight @ h) + 0.1
        return h.square().sum()

    def of_jax(p: Any, x: Any) -> Any:
        return jnp.sum(
            lax.scan(lambda h, _: (jnp.arcsinh(p["w"] @ h) + 0.1, None), x, None, length=30)[0] ** 2
        )

    weight = torch.tensor(w, requires_grad=True)
    report = stablenum.diff(
        stablenum_torch.program(of_torch, torch.tensor(x)), stablenum_jax.program(of_jax, {"w": w}, x)
    )
    assert len(report.differences) == 1, str(report)
    assert report.first is not None
    assert (report.first.left.operation, report.first.right.operation) == ("atan", "asinh")
    assert not any("could not be set right in the loss" in note for note in report.notes)
