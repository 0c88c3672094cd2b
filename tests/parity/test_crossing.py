"""A guard's state saved by one framework goes on in another with the same decisions."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import stablenum_jax
import stablenum_torch
from stablenum import DynamicLossScale, GuardConfig
from stablenum.compare import BACKENDS, SCENARIOS
from stablenum.compare.backends import Setup
from stablenum.compare.spec import Stream
from stablenum.compare.streams import as_dtype, stream_params, stream_step
from stablenum.reference import SGD, Guarded

CROSSINGS = [
    ("growth-boundary", ("torch", "jax-jit", "numpy")),
    ("growth-boundary", ("numpy", "torch-compiled", "jax")),
    ("hysteresis", ("jax", "numpy", "torch-foreach")),
    ("fp16-leaves", ("torch-foreach", "jax", "numpy")),
    ("fp16-leaves", ("jax-jit", "torch", "jax-jit")),
]
DECIDED = ("step", "applied", "reason", "loss_scale", "skipped_total", "skipped_in_a_row")


def start(stream: Stream, backend: str) -> Any:
    setup = Setup(params=stream_params(stream), optimizer=stream.optimizer, guard=stream.guard)
    return BACKENDS[backend].start(setup)


def run(stream: Stream, training: Any, steps: range) -> list[dict[str, Any]]:
    seen = []
    for step in steps:
        gradients, loss = stream_step(stream, step)
        scale = np.float32(training.loss_scale)
        with np.errstate(all="ignore"):
            handed = [as_dtype(g * scale, t.dtype) for g, t in zip(gradients, stream.tensors, strict=True)]
        training.step(handed, float(loss))
        seen.append({name: training.last[name] for name in DECIDED})
    return seen


@pytest.mark.parametrize(("name", "order"), CROSSINGS)
def test_a_state_crosses_twice_and_goes_on(name: str, order: tuple[str, ...]) -> None:
    stream = SCENARIOS[name]
    assert isinstance(stream, Stream)
    expected = run(stream, start(stream, "numpy"), range(stream.steps))
    # Not at round numbers: in the middle of growth intervals and of a spell of overflows.
    bounds = [0, stream.steps // 3 + 1, 2 * stream.steps // 3 + 1, stream.steps]
    got, text = [], None
    for backend, first, last in zip(order, bounds, bounds[1:]):
        training = start(stream, backend)
        if text is not None:
            training.load_guard_state_dict(json.loads(text))
        got += run(stream, training, range(first, last))
        text = json.dumps(training.guard_state_dict(), allow_nan=False)
    assert got == expected


def test_recorded_parameters_keep_their_names() -> None:
    """torch keeps the model's order, JAX sorts keys: the index of the worst parameter is translated."""
    config = GuardConfig(loss_scale=DynamicLossScale(growth_interval=5))
    shapes = {"weight": (3, 2), "bias": (2,), "kernel": (4,)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    bad = {name: a.copy() for name, a in arrays.items()}
    bad["kernel"][1] = np.nan

    tensors = {name: torch.from_numpy(a.copy()).requires_grad_() for name, a in arrays.items()}
    opt = stablenum_torch.wrap(torch.optim.SGD(tensors.values(), lr=0.1), config, names=tensors)
    for name, tensor in tensors.items():
        tensor.grad = torch.from_numpy(bad[name])
    opt.step()
    assert opt.last["worst"] == (2, "kernel")

    tx = optax.chain(stablenum_jax.guard(None, config), optax.sgd(0.1))
    opt_state = tx.init({name: jnp.asarray(a) for name, a in arrays.items()})
    opt_state = stablenum_jax.load_guard_state_dict(opt_state, json.loads(json.dumps(opt.guard_state_dict())))
    assert stablenum_jax.metrics(opt_state)["worst"] == (1, "kernel")

    train = Guarded(arrays, SGD(lr=0.1), config)
    train.load_guard_state_dict(json.loads(json.dumps(stablenum_jax.guard_state_dict(opt_state))))
    assert train.last["worst"] == (2, "kernel")
    assert train.loss_scale == opt.loss_scale == 2.0**15


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_state_of_another_config_is_refused_and_nothing_changes(backend: str) -> None:
    stream = SCENARIOS["single-nan"]
    assert isinstance(stream, Stream)
    training = start(stream, backend)
    run(stream, training, range(3))
    before = training.guard_state_dict()
    broken = json.loads(json.dumps(before))
    broken["state"]["loss_scale"]["scale"] = "nan"
    with pytest.raises(ValueError, match="loss_scale"):
        training.load_guard_state_dict(broken)
    assert training.guard_state_dict() == before
