"""``stablenum.diff`` of programs whose optimizers have taken steps before."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import stablenum
import stablenum_jax
import stablenum_torch

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model: nn.Module) -> Any:
    return lambda x: model(x).square().mean()


def in_torch(make: Any, before: int) -> tuple[Any, Any]:
    """A program whose optimizer has taken some steps, and the optimizer."""
    model = net()
    optimizer = make(model.parameters())
    for _ in range(before):
        optimizer.zero_grad()
        loss_of(model)(torch.tensor(X) * 0.5).backward()
        optimizer.step()
    return stablenum_torch.program(
        loss_of(model), torch.tensor(X), model=model, optimizer=optimizer
    ), optimizer


def in_jax(optimizer: Any) -> Any:
    rng = np.random.default_rng(1)
    params = {
        "first": {"w": rng.normal(size=(5, 8)), "b": np.zeros(8)},
        "second": {"w": rng.normal(size=(8, 2)), "b": np.zeros(2)},
    }
    params = {k: {n: jnp.asarray(x, jnp.float32) for n, x in v.items()} for k, v in params.items()}

    def loss_fn(p: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["first"]["w"] + p["first"]["b"])
        return jnp.square(h @ p["second"]["w"] + p["second"]["b"]).mean()

    return stablenum_jax.program(loss_fn, params, X, optimizer=optimizer)


PAIRS: dict[str, tuple[Any, Any]] = {
    "adam": (lambda p: torch.optim.Adam(p, lr=1e-2), lambda: optax.adam(1e-2)),
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda: optax.adamw(1e-2, weight_decay=0.1),
    ),
    "momentum": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), lambda: optax.sgd(1e-2, momentum=0.9)),
    "rmsprop": (
        lambda p: torch.optim.RMSprop(p, lr=1e-2, alpha=0.9),
        lambda: optax.rmsprop(1e-2, decay=0.9, eps_in_sqrt=False),
    ),
    "adagrad": (
        lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=0.0),
        lambda: optax.adagrad(1e-2, initial_accumulator_value=0.0, eps=0.0),
    ),
    "adadelta": (
        lambda p: torch.optim.Adadelta(p, lr=1e-2, rho=0.9, eps=1e-6),
        lambda: optax.adadelta(1e-2, rho=0.9, eps=1e-6),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_optax_goes_on_from_the_state_of_a_torch_optimizer(name: str) -> None:
    ours, theirs = PAIRS[name]
    left, _ = in_torch(ours, before=3)
    report = stablenum.diff(left, in_jax(theirs()), steps=2)
    assert report.ok, str(report)
    assert any("goes on from its state" in note for note in report.notes)


def test_a_mistake_in_the_update_is_still_found_in_the_middle_of_a_training() -> None:
    left, _ = in_torch(PAIRS["adam"][0], before=3)
    report = stablenum.diff(left, in_jax(optax.adam(1e-2, b2=0.99)))
    assert not report.ok
    first = report.first
    assert first is not None
    assert first.left is not None
    assert first.left.phase == "update"


ONLY_TORCH: dict[str, Any] = {
    "nadam": torch.optim.NAdam,
    "asgd": lambda p: torch.optim.ASGD(p, t0=1),
    "rprop": torch.optim.Rprop,
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]),
}
IN_TORCH = {name: ours for name, (ours, _) in PAIRS.items()} | ONLY_TORCH


@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 3), (3, 2)])
def test_two_programs_of_torch_stand_at_the_same_step(name: str, before: int, after: int) -> None:
    ours = IN_TORCH[name]
    left, mine = in_torch(ours, before)
    right, other = in_torch(ours, after)
    kept = [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in other.state.values()]
    report = stablenum.diff(left, right, steps=2)
    assert report.ok, str(report)
    assert report.notes
    now = [{k: torch.as_tensor(v) for k, v in s.items()} for s in other.state.values()]
    assert len(now) == len(kept)
    for a, b in zip(now, kept, strict=True):
        assert all(torch.equal(a[k], b[k]) for k in b)
    parameters = len(mine.param_groups[0]["params"])
    assert len(mine.state) == (parameters if before or name == "adagrad" else 0)


def test_what_has_no_place_on_the_right_is_named() -> None:
    left, _ = in_torch(PAIRS["momentum"][0], before=3)
    report = stablenum.diff(left, in_jax(optax.sgd(1e-2)))
    assert not report.ok
    assert any("has no place in the right one: buffer of 0.bias" in note for note in report.notes)


def test_moments_of_another_shape_are_not_carried_over() -> None:
    left, _ = in_torch(torch.optim.Adafactor, before=3)
    right, _ = in_torch(torch.optim.Adafactor, before=0)
    report = stablenum.diff(left, right)
    assert not report.ok
    assert any("has no place in the right one: col_var of 0.weight" in note for note in report.notes)


def test_as_they_are_leaves_the_states_alone() -> None:
    left, _ = in_torch(PAIRS["adam"][0], before=3)
    right, _ = in_torch(PAIRS["adam"][0], before=3)
    report = stablenum.diff(left, right, weights="as they are")
    assert report.ok
    assert not report.notes


def test_optimizers_without_a_past_are_not_mentioned() -> None:
    left, _ = in_torch(PAIRS["adam"][0], before=0)
    report = stablenum.diff(left, in_jax(optax.adam(1e-2)))
    assert report.ok
    assert not report.notes


def test_the_first_value_of_an_accumulator_is_no_state_to_carry_over() -> None:
    left, _ = in_torch(PAIRS["adagrad"][0], before=0)
    report = stablenum.diff(left, in_jax(optax.adagrad(1e-2, eps=0.0)))  # which begins at 0.1, torch's at 0
    assert not report.ok
    assert not report.notes
