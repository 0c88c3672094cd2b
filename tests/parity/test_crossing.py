"""A guard's state saved by one framework loads in another, which makes the same decisions."""

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
from stablenum.commands.compare.backends import BACKENDS, Setup
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.scenarios import Stream
from stablenum.commands.compare.scenarios.stream_data import scaled_gradients, stream_params, stream_step
from stablenum.reference.guarded import SGD, Guarded
from stablenum.rules.clipping import AdaGC
from tests.selection import slow_unless

CROSSINGS = [
    ("growth-boundary", ("torch", "jax-jit", "numpy")),
    ("growth-boundary", ("numpy", "torch-compiled", "jax")),
    ("hysteresis", ("jax", "numpy", "torch-foreach")),
    ("fp16-leaves", ("torch-foreach", "jax", "numpy")),
    ("fp16-leaves", ("jax-jit", "torch", "jax-jit")),
    ("adagc-late", ("torch", "jax-jit", "numpy")),
    ("zclip", ("jax-jit", "numpy", "torch-foreach")),
    ("spike-skip", ("numpy", "torch", "jax-jit")),
    ("level-shift", ("torch-foreach", "jax-jit", "torch")),
    ("log-max", ("jax-jit", "torch", "numpy")),
    ("underflow", ("torch", "numpy", "jax-jit")),
    ("hysteresis-growth", ("numpy", "jax-jit", "torch")),
]
# Their kind of state crosses in another stream too.
LIKE_OTHERS = ("hysteresis", "hysteresis-growth", "level-shift", "underflow", "zclip")
DECIDED = ("step", "applied", "reason", "loss_scale", "skipped_total", "skipped_in_a_row")


def start(stream: Stream, backend: str) -> Any:
    setup = Setup(params=stream_params(stream), optimizer=stream.optimizer, guard=stream.guard)
    return BACKENDS[backend].start(setup)


def run(stream: Stream, training: Any, steps: range) -> list[dict[str, Any]]:
    seen = []
    for step in steps:
        gradients, loss = stream_step(stream, step)
        training.step(scaled_gradients(stream, gradients, training.loss_scale), float(loss))
        seen.append({name: training.last[name] for name in DECIDED})
    return seen


@pytest.mark.parametrize(
    ("name", "order"),
    slow_unless(
        lambda name, order: (
            name not in LIKE_OTHERS and "torch-compiled" not in order and order[0] != order[-1]
        ),
        CROSSINGS,
    ),
)
def test_a_state_loaded_by_two_frameworks_in_turn_continues_the_same(
    name: str, order: tuple[str, ...]
) -> None:
    stream = SCENARIOS[name]
    assert isinstance(stream, Stream)
    expected = run(stream, start(stream, "numpy"), range(stream.steps))
    # Not at round numbers, so that the changes fall within growth intervals and a series of overflows.
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
    """torch keeps the model's order and JAX sorts keys: the index of the worst parameter is translated."""
    config = GuardConfig(loss_scale=DynamicLossScale(growth_interval=5))
    shapes = {"weight": (3, 2), "bias": (2,), "kernel": (4,)}
    arrays = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    bad = {name: a.copy() for name, a in arrays.items()}
    bad["kernel"][1] = np.nan

    tensors = {name: torch.from_numpy(a.copy()).requires_grad_() for name, a in arrays.items()}
    opt = stablenum_torch.wrap(torch.optim.SGD(tensors.values(), lr=0.1), config, names=tensors)
    opt.scale()  # these gradients are those of a scaled loss
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


def test_rows_of_a_rule_follow_their_parameters() -> None:
    """AdaGC has statistics per tensor, and each framework has the parameters in another order."""
    config = GuardConfig(clip=AdaGC(warmup_steps=4, max_norm=1000.0))
    sizes = {"weight": 1e-3, "bias": 1.0, "kernel": 50.0, "alpha": 0.0}  # alpha never gets a gradient
    arrays = {name: np.ones((3, 2), np.float32) for name in sizes}
    tensors = {name: torch.from_numpy(a.copy()).requires_grad_() for name, a in arrays.items()}
    opt = stablenum_torch.wrap(torch.optim.SGD(tensors.values(), lr=0.1), config, names=tensors)
    tx = optax.chain(stablenum_jax.guard(None, config), optax.sgd(0.1))
    tree: Any = {name: jnp.asarray(a) for name, a in arrays.items()}
    opt_state: Any = tx.init(tree)
    backwards = dict(reversed(arrays.items()))
    train = Guarded(backwards, SGD(lr=0.1), config)

    def rows(plain: dict[str, Any]) -> dict[str, Any]:
        (state,) = plain["state"]["clip"]
        return {
            name: {key: values[i] for key, values in state.items()} for i, name in enumerate(plain["names"])
        }

    def over(plain: dict[str, Any]) -> dict[str, Any]:
        return json.loads(json.dumps(plain, allow_nan=False))

    rng = np.random.default_rng(0)
    for _ in range(3):  # each framework in turn takes three steps from where the one before was
        for turn in ("torch", "jax", "numpy"):
            for _ in range(3):
                grads = {n: (rng.normal(size=(3, 2)) * s).astype(np.float32) for n, s in sizes.items()}
                if turn == "torch":
                    opt.scale()
                    for name, tensor in tensors.items():
                        tensor.grad = torch.from_numpy(grads[name])
                    opt.step()
                elif turn == "jax":
                    given = {name: jnp.asarray(g) for name, g in grads.items()}
                    tree, opt_state = stablenum_jax.step(tx, tree, opt_state, given, value=jnp.float32(1))
                else:
                    train.step({name: grads[name] for name in backwards})
            if turn == "torch":
                opt_state = stablenum_jax.load_guard_state_dict(opt_state, over(opt.guard_state_dict()))
                assert rows(stablenum_jax.guard_state_dict(opt_state)) == rows(opt.guard_state_dict())
            elif turn == "jax":
                train.load_guard_state_dict(over(stablenum_jax.guard_state_dict(opt_state)))
                assert rows(train.guard_state_dict()) == rows(stablenum_jax.guard_state_dict(opt_state))
            else:
                opt.load_guard_state_dict(over(train.guard_state_dict()))
                assert rows(opt.guard_state_dict()) == rows(train.guard_state_dict())
    orders = [opt.guard_state_dict(), stablenum_jax.guard_state_dict(opt_state), train.guard_state_dict()]
    assert len({tuple(plain["names"]) for plain in orders}) == 3
    last = rows(opt.guard_state_dict())
    assert last["alpha"]["seen"] == 0
    assert all(last[name]["seen"] == 4 for name in ("weight", "bias", "kernel"))
    assert last["weight"]["gamma"] < last["bias"]["gamma"] < last["kernel"]["gamma"]


@pytest.mark.parametrize(
    "backend", slow_unless(lambda backend: backend != "torch-compiled", [(b,) for b in BACKENDS])
)
def test_a_state_of_another_config_is_rejected_and_nothing_changes(backend: str) -> None:
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
