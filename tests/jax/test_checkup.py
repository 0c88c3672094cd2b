"""The checkup of JAX scripts: each small script has one fault, or an oddity that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkups import assert_fault, assert_healthy, checked
from tests.selection import thinned

START = """
import jax, jax.numpy as jnp, optax

def make(key, sizes, gain=1.0):
    keys = jax.random.split(key, len(sizes))
    return [{{"w": gain * jax.random.normal(k, (a, b)) / a**0.5, "b": jnp.zeros(b)}}
            for k, a, b in zip(keys, sizes, sizes[1:])]

def model(params, x):
    for layer in params[:-1]:
        x = {activation}(x @ layer["w"] + layer["b"])
    return {output}

x = jax.random.normal(jax.random.key(1), (64, 8))
y = x @ jax.random.normal(jax.random.key(2), (8, 1))
params = make(jax.random.key(0), {sizes})
tx = {tx}
state = tx.init(params)
{extra}

def loss(params, x, y):
    return {loss}

@jax.jit
def step(params, state, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    {between}
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

for i in range({steps}):
    params, state, value = step(params, state, x, y)
"""


def script(**parts: Any) -> str:
    common = {
        "activation": "jnp.tanh",
        "output": 'x @ params[-1]["w"] + params[-1]["b"]',
        "sizes": "[8, 16, 1]",
        "tx": "optax.adam(1e-2)",
        "extra": "",
        "loss": "jnp.mean((model(params, x) - y) ** 2)",
        "between": "pass",
        "steps": 30,
    }
    return START.format(**(common | parts))


FAULTY: dict[str, tuple[str, str, str]] = {
    "a product that flushes the gradients": (
        script(between="grads = jax.tree.map(lambda g: g * 1e-50, grads)"),
        "flushed_gradients",
        "1e-50",
    ),
    "weights that start far too small": (
        script(sizes="[8] + [16] * 7 + [1], 1e-2"),
        "vanishing_activations",
        "jnp.tanh",
    ),
    "a part that is cut off": (
        script(activation="jax.lax.stop_gradient"),
        "no_gradient",
        "stop_gradient",
    ),
    "a rate of 0": (script(tx="optax.adam(0.0)"), "rate_zero", "tx = "),
    "a schedule that is at 0 too soon": (
        script(tx="optax.adam(optax.linear_schedule(1e-2, 0.0, 3))"),
        "rate_zero",
        "tx = ",
    ),
    "a rate that is far too large": (script(tx="optax.adam(5.0)"), "steps_too_large", "tx = "),
    "a state that is made in every step": (
        script(between="state = tx.init(params)"),
        "optimizer_renewed",
        "tx.init",
    ),
    "bfloat16 weights and small steps": (
        script(
            extra="params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params); state = tx.init(params)",
            tx="optax.sgd(1e-5)",
        ),
        "lost_updates",
        "tx = ",
    ),
    "targets that broadcast": (script(extra="y = y[:, 0]"), "broadcast_loss", "jnp.mean"),
    "inputs that are not scaled": (script(extra="x = x * 1000", tx="optax.sgd(1e-2)"), "unscaled_input", "@"),
    "a bound far below every gradient": (
        script(tx="optax.chain(optax.clip_by_global_norm(1e-5), optax.sgd(1e-2))"),
        "clipped_always",
        "tx = ",
    ),
    "an eps above every gradient": (script(tx="optax.adam(1e-3, eps=100.0)"), "eps_dominates", "tx = "),
}
HEALTHY: dict[str, str] = {
    "a plain training": script(),
    "ReLU with half of the units inactive": script(activation="jax.nn.relu"),
    "warm-up from a rate of 0": script(tx="optax.adam(optax.linear_schedule(0.0, 1e-2, 10))", steps=60),
    "clipping that is rarely active": script(
        tx="optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-2))"
    ),
    "gradients by hand and no optimizer": (
        "import jax, jax.numpy as jnp\n"
        "x = jax.random.normal(jax.random.key(1), (64, 3))\ny = x @ jnp.ones(3)\nw = jnp.zeros(3)\n"
        "gradient = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))\n"
        "for i in range(30):\n    w = w - 0.1 * gradient(w)\n"
    ),
}


@pytest.mark.parametrize("fault", thinned(FAULTY))
def test_the_fault_is_the_first_finding_with_its_line(fault: str, tmp_path: Path) -> None:
    assert_fault(FAULTY[fault], tmp_path)


@pytest.mark.parametrize("oddity", thinned(HEALTHY))
def test_a_healthy_training_is_not_blamed(oddity: str, tmp_path: Path) -> None:
    assert_healthy(HEALTHY[oddity], tmp_path)


def test_cures_are_tried_on_the_first_step(tmp_path: Path) -> None:
    for fault, trial in (
        ("weights that start far too small", "with that initialisation"),
        ("a rate that is far too large", "times the rate, the first step takes the loss from"),
    ):
        _, report = checked(FAULTY[fault][0], tmp_path)
        assert trial in report["complaints"][0]["tried"], report["complaints"][0]
