"""Parameters that only one of two programs trains, and those that both freeze, each in its own way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
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

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
NAMES = {"a": (4, 5), "b": (5,), "d": (5, 2), "e": (2,)}


def in_torch(*, frozen: bool = False, optimizer: Any = None, left_out: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].requires_grad_(not frozen)
    trained = model[2].parameters() if left_out else model.parameters()
    made = None if optimizer is None else optimizer(trained)
    return stablenum_torch.program(
        lambda x: model(x).square().mean(), torch.tensor(X), model=model, optimizer=made
    )


def in_jax(*, stopped: bool = False, optimizer: Any = None) -> Any:
    rng = np.random.default_rng(1)
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in NAMES.items()}

    def loss_fn(p: Any, x: Any) -> Any:
        a, b = jax.lax.stop_gradient((p["a"], p["b"])) if stopped else (p["a"], p["b"])
        return jnp.square(jnp.tanh(x @ a + b) @ p["d"] + p["e"]).mean()

    return stablenum_jax.program(loss_fn, params, X, optimizer=optimizer)


def only_the_last(transformation: Any) -> Any:
    labels = {name: "train" if name in "de" else "freeze" for name in NAMES}
    return optax.multi_transform({"train": transformation, "freeze": optax.set_to_zero()}, labels)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


BOTH_FREEZE: dict[str, tuple[Any, Any]] = {
    "neither trains anything else": (lambda: in_torch(frozen=True), lambda: in_jax(stopped=True)),
    "no gradient, and one of zero": (
        lambda: in_torch(frozen=True, optimizer=sgd),
        lambda: in_jax(stopped=True, optimizer=optax.sgd(0.1)),
    ),
    "no gradient, and no update": (
        lambda: in_torch(frozen=True, optimizer=sgd),
        lambda: in_jax(optimizer=only_the_last(optax.sgd(0.1))),
    ),
    "left out of the optimizer, and masked": (
        lambda: in_torch(left_out=True, optimizer=sgd),
        lambda: in_jax(optimizer=only_the_last(optax.sgd(0.1))),
    ),
    "one framework": (lambda: in_torch(frozen=True), lambda: in_torch(frozen=True)),
    "trained by both": (
        lambda: in_torch(optimizer=adamw), lambda: in_jax(optimizer=optax.adamw(0.1, weight_decay=0.1))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOTH_FREEZE)
def test_what_both_freeze_is_no_difference(name: str) -> None:
    left, right = BOTH_FREEZE[name]
    report = stablenum.diff(left(), right())
    assert report.ok, report.causes


ONE_FREEZES: dict[str, tuple[Any, Any, str, str]] = {
    "without optimizers": (lambda: in_torch(frozen=True), in_jax, "backward", "stopped_gradient"),
    "with optimizers": (
        lambda: in_torch(frozen=True, optimizer=sgd),
        lambda: in_jax(optimizer=optax.sgd(0.1)),
        "backward", "stopped_gradient",
    ),
    "the right one of one framework": (
        in_torch, lambda: in_torch(frozen=True), "backward", "stopped_gradient"
    ),
    "by a stop": (in_torch, lambda: in_jax(stopped=True), "backward", "stopped_gradient"),
    "by an optimizer that leaves it out": (
        lambda: in_torch(left_out=True, optimizer=sgd),
        lambda: in_jax(optimizer=optax.sgd(0.1)),
        "update", "",
    ),
    "but the other one decays it": (
        lambda: in_torch(frozen=True, optimizer=adamw),
        lambda: in_jax(stopped=True, optimizer=optax.adamw(0.1, weight_decay=0.1)),
        "update", "decay_excluded",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_FREEZES)
def test_what_only_one_side_trains_is_a_difference(name: str) -> None:
    left, right, phase, code = ONE_FREEZES[name]
    report = stablenum.diff(left(), right())
    assert report.first is not None
    for place in (report.first.left, report.first.right):
        assert place is not None
        assert place.phase == phase
        assert "test_diff_frozen.py" in place.where
    if code:
        assert report.causes[0].code == code
    if phase == "backward":
        named = f"{report.first.left.code} {report.first.right.code}"
        assert "x @ a + b" in named or "model(x)" in named or "stop_gradient" in named


def test_all_that_is_frozen_is_named_in_one_difference() -> None:
    report = stablenum.diff(in_torch(frozen=True), in_jax())
    assert len(report.differences) == 1
    sentence = report.causes[0].sentence
    assert "the left program gives no gradient for 0.weight, 0.bias" in sentence
    assert "the right one trains it" in sentence


def test_a_difference_of_the_forward_pass_comes_first() -> None:
    def other(p: Any, x: Any) -> Any:
        return jnp.square(jnp.sin(x @ p["a"] + p["b"]) @ p["d"] + p["e"]).mean()

    params = {name: jnp.ones(shape) for name, shape in NAMES.items()}
    report = stablenum.diff(in_torch(frozen=True), stablenum_jax.program(other, params, X))
    phases = [d.left.phase for d in report.differences if d.left is not None]
    assert phases[0] == "forward"
    assert "backward" in phases


def test_the_scripts_show_the_gradient_that_only_one_side_has(tmp_path: Path) -> None:
    stablenum.diff(in_torch(frozen=True), in_jax()).write_repro(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.py", "inputs.npz"]
    command = [sys.executable, str(tmp_path / "compare.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    gradient = np.load(tmp_path / "inputs.npz")["right"]
    assert gradient.shape == (4, 5)
    assert np.abs(gradient).max() > 1e-3
    assert "left: nothing of it leads to the difference" in shown
