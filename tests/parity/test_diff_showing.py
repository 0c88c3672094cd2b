"""Evaluated once more from a value on, a program has the values of a whole evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.compare import compared
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.sides import resume_points
from stablenum.diagnosis.diff.sides.sides import Side, again, arrays_of, host, measured

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(6, 1)).astype(np.float32)
STEPS = 3


def in_torch(rate: float = 0.1, **options: Any) -> Any:
    """A model with running statistics, which writes into a view, and an optimizer that writes in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, **{"momentum": 0.9, **options})

    def loss_fn(x: Any, y: Any) -> Any:
        x = x * 1.0
        x[:, 0].mul_(2.0)
        return (model(x) - y).square().mean()

    return stablenum_torch.program(
        loss_fn, torch.tensor(X), torch.tensor(Y), model=model, optimizer=optimizer
    )


def in_jax(rate: float = 0.1, **options: Any) -> Any:
    """A model with a loop and a compiled part."""

    @jax.jit
    def hidden(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["w"] + p["b"])

    def loss_fn(p: Any, x: Any, y: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, row: (0.5 * h + row, None), jnp.zeros(5), hidden(p, x))
        return jnp.square((hidden(p, x) + h) @ p["v"] - y).mean()

    params = {"w": jnp.asarray(X[:4, :4] @ np.eye(4, 5)), "b": jnp.zeros(5), "v": jnp.ones((5, 1))}
    optimizer = optax.sgd(rate, **{"momentum": 0.9, **options})
    return stablenum_jax.program(loss_fn, params, jnp.asarray(X), jnp.asarray(Y), optimizer=optimizer)


PROGRAMS = pytest.mark.parametrize("program", [in_torch, in_jax])


def whole(side: Side, replaced: Mapping[int, Any]) -> dict[int, Any]:
    """All values of an evaluation from the beginning."""
    found: dict[int, Any] = {}
    side.program.play(
        lambda i, x: found.__setitem__(i, host(x).copy()),
        weights=side.weights,
        steps=side.steps,
        replace=replaced,
    )
    return found


def chosen(side: Side, part: float) -> tuple[int, Any]:
    """A value near a part of the program, and other numbers for it."""
    made = [o for s in side.trace.steps for o in s.outputs if not side.neutral(o)]
    value = made[int(part * len(made))]
    array = arrays_of(side, [value])[value]
    return value, array + 0.125


def close(x: Any, y: Any) -> None:
    """Memory elsewhere may be summed up in another order."""
    assert x.shape == y.shape
    np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-13)


@PROGRAMS
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_the_values_are_those_of_a_whole_evaluation(
    program: Callable[[], Any], part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume_points.Stands, "wants", lambda self, count: True)
    side = measured(program(), steps=STEPS)
    for _ in range(2):  # what is taken up a second time has not been written
        value, array = chosen(side, part)
        shown = whole(side, {value: array})
        after = again(side, {value: array})
        for i, x in arrays_of(after, range(value, len(side.prints))).items():
            close(x, shown[i])
        close(arrays_of(side, [value])[value], array - 0.125)


@PROGRAMS
def test_values_that_were_replaced_before_stay_so(program: Callable[[], Any]) -> None:
    side = measured(program(), steps=STEPS)
    first, second = chosen(side, 0.3), chosen(side, 0.8)
    shown = whole(side, dict([first, second]))
    after = again(again(side, dict([first])), dict([second]))
    for i, x in after.arrays.items():
        close(x, shown[i])


@PROGRAMS
def test_a_value_of_a_late_step_is_found_without_the_steps_before_it(
    program: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = measured(program(), steps=12)
    shown: list[int] = []
    plain = side.program.show

    def show(visit: Any, **options: Any) -> None:
        plain(lambda i, x: (shown.append(i), visit(i, x)), **options)

    monkeypatch.setattr(side.program, "show", show)
    for part in (0.7, 0.95):
        value, array = chosen(side, part)
        side = again(side, {value: array})
        again(side, {value + 1: array}, last=value + 3)
        assert value in shown
        assert min(shown) > value - 160
        shown.clear()


def same(one: Comparison, other: Comparison) -> None:
    assert one.found.left == other.found.left
    assert one.found.right == other.found.right
    assert one.groups == other.groups


@pytest.mark.parametrize("name", ["left", "right"])
def test_a_comparison_with_another_value_is_the_one_made_from_the_beginning(name: str) -> None:
    comparison = compared(in_jax(), in_jax(rate=0.2), steps=STEPS)
    for part in (0.2, 0.5, 0.9):
        value, array = chosen(comparison.side(name), part)
        comparison = comparison.with_values(name, {value: array})
        same(comparison, Comparison(comparison.left, comparison.right, comparison.weights))
