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


LINEN = """
import jax, jax.numpy as jnp, optax
import flax.linen as nn

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(1)(nn.tanh(x))

net, tx = Net(), optax.adam(1e-2)
x = 3 + 2 * jax.random.normal(jax.random.key(1), (64, 8))
y = x @ jax.random.normal(jax.random.key(2), (8, 1)) / 10
variables = net.init(jax.random.key(0), x, True)
params, stats = variables["params"], variables["batch_stats"]
state = tx.init(params)

@jax.jit
def step(params, stats, state, x, y):
    def loss(p):
        out, new = net.apply({{"params": p, "batch_stats": stats}}, x, True, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), new["batch_stats"]
    (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), {new}, state, value

for i in range(60):
    params, stats, state, value = step(params, stats, state, x, y)
"""
NNX = """
import jax, jax.numpy as jnp, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.w = {kind}(jax.random.normal(rngs.params(), (8, 8)))
        self.norm = {norm}
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(jnp.sin(5 * x @ self.w[...])))

net = Net(nnx.Rngs(0))
opt = nnx.Optimizer(net, optax.sgd(1e-2), wrt=nnx.Param)
x = jax.random.normal(jax.random.key(1), (64, 8))
y = x @ jax.random.normal(jax.random.key(2), (8, 1)) / 3

@nnx.jit
def step(net, opt, x, y):
    loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
    opt.update(net, grads)
    return loss

for i in range(60):
    step(net, opt, x, y)
"""
# With flax's own momentum of 0.99, and batches of small variance.
SLOW_STATISTICS = """
import jax, jax.numpy as jnp, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.first(x))))

net = Net(nnx.Rngs(0))
opt = nnx.Optimizer(net, {tx}, wrt=nnx.Param)
x = 0.05 * jax.random.normal(jax.random.key(1), (64, 8))
y = x @ jax.random.normal(jax.random.key(2), (8, 1))

def loss(net):
    out = net(x)
    {between}
    return jnp.mean((out - y) ** 2)

@nnx.jit
def step(net, opt):
    value, grads = nnx.value_and_grad(loss)(net)
    opt.update(net, grads)
    return value

for i in range(250):
    step(net, opt)
"""

FAULTY: dict[str, tuple[str, str, str]] = {
    "a chain without a factor of -1": (
        script(tx="optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(1e-2))"),
        "uphill_updates",
        "tx = ",
    ),
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
    "a state that is not handed on": (
        script(tx="optax.adam(optax.linear_schedule(1e-6, 1e-2, 10))").replace(
            "params, state, value = step", "params, _, value = step"
        ),
        "optimizer_renewed",
        "tx.update",
    ),
    "parameters that a jitted step has as constants": (
        script()
        .replace("def step(params, state, x, y):", "def step(state, x, y):")
        .replace("(loss)(params", "(loss)(first")
        .replace("return optax.apply_updates(params, updates), state", "return updates, state")
        .replace("tx.update(grads, state, params)", "tx.update(grads, state)")
        .replace("@jax.jit", "first = params\n@jax.jit")
        .replace(
            "params, state, value = step(params, state, x, y)",
            "updates, state, value = step(state, x, y); params = optax.apply_updates(params, updates)",
        ),
        "captured_parameters",
        "step(",
    ),
    "indices beyond the end of a table": (
        (
            "import jax, jax.numpy as jnp, optax\n"
            "table, i = jax.random.normal(jax.random.key(0), (10, 4)), 10 + jnp.arange(8)\n"
            "tx = optax.adam(1e-2)\nstate = tx.init(table)\n"
            "@jax.jit\ndef step(table, state):\n"
            "    loss, g = jax.value_and_grad(lambda t: jnp.mean((t[i] - 1) ** 2))(table)\n"
            "    u, state = tx.update(g, state)\n    return optax.apply_updates(table, u), state, loss\n"
            "for _ in range(30):\n    table, state, loss = step(table, state)\n"
        ),
        "index_out_of_range",
        "t[i]",
    ),
    "units that all begin alike": (
        script(
            extra="params = jax.tree.map(lambda p: jnp.full_like(p, 0.1), params); state = tx.init(params)"
        ),
        "alike_units",
        "normal",
    ),
    "weights that nnx does not take for parameters": (
        NNX.format(kind="nnx.Variable", norm="jnp.tanh"),
        "no_gradient",
        "self.w",
    ),
    "a loss scale that falls without end": (
        script(
            extra="import stablenum_jax\ntx = optax.chain(stablenum_jax.guard(loss_scale='dynamic'), tx); "
            "state = tx.init(params)",
            between="grads[0]['w'] = grads[0]['w'].at[0, 0].set(jnp.inf)",
            steps=60,
        ).replace(
            "updates, state = tx.update(grads, state, params)\n"
            "    return optax.apply_updates(params, updates), state",
            "return *stablenum_jax.step(tx, params, state, grads, value=value)[:2]",
        ),
        "loss_scale",
        "step(",
    ),
    "running statistics that are thrown away": (LINEN.format(new="stats"), "batch_norm", "nn.BatchNorm"),
}
HEALTHY: dict[str, str] = {
    "a likelihood that is maximised": script(
        tx="optax.chain(optax.scale_by_adam(), optax.scale(1e-2))",
        loss="-jnp.mean((model(params, x) - y) ** 2)",
    ),
    "a plain training": script(),
    "running statistics that are kept": LINEN.format(new="new"),
    "a batch norm of nnx": NNX.format(kind="nnx.Param", norm="nnx.BatchNorm(8, rngs=rngs)"),
    "an optimizer that takes every second step": script(tx="optax.MultiSteps(optax.adam(1e-2), 2)", steps=60),
    "a gain of one element": script(
        extra="params[-1]['scale'] = jnp.ones(1); state = tx.init(params)",
        output='(x @ params[-1]["w"] + params[-1]["b"]) * params[-1]["scale"]',
    ),
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


SCALED = """
import jax, jax.numpy as jnp, optax, stablenum_jax
from stablenum_jax import scale_loss
x = jax.random.normal(jax.random.key(0), (32, 8))
tx = optax.chain(stablenum_jax.guard(loss_scale="dynamic"), optax.adam(1e-3))
params = {{"w": 0.1 * jnp.ones((8, 16)), "v": jax.random.normal(jax.random.key(1), (16,))}}
state = tx.init(params)
loss_fn = lambda p: ((jnp.tanh(x @ p["w"]) @ p["v"] - x.sum(1)) ** 2).mean()
@jax.jit
def step(params, state):
    {gradients}
    return (*stablenum_jax.step(tx, params, state, grads, value=value)[:2], value)
for i in range(30):
    params, state, value = step(params, state)
    if i == 0:
        print(f"first {{float(value):.4g}}")
"""


@pytest.mark.parametrize(
    "gradients",
    [
        "value, grads = stablenum_jax.value_and_grad(loss_fn, state)(params)",
        "value, grads = loss_fn(params), jax.grad(lambda p: scale_loss(loss_fn(p), state))(params)",
    ],
    ids=["value_and_grad", "scale_loss"],
)
def test_the_loss_is_the_one_before_its_scale(gradients: str, tmp_path: Path) -> None:
    done, _ = checked(SCALED.format(gradients=gradients), tmp_path)
    first = done.stdout.partition("first ")[2].split()[0]
    assert f"The loss went from {first} to" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("tx", "command"),
    [
        ("__import__('stablenum_jax').guard(optax.adam(1e-2))", "`stablenum explain --strict`"),
        ("optax.apply_if_finite(optax.adam(1e-2), 3)", "`stablenum explain`"),
    ],
)
def test_a_loss_that_a_guard_copes_with_sends_to_the_strict_explain(
    tx: str, command: str, tmp_path: Path
) -> None:
    text = script(tx=tx, loss="jnp.mean((model(params, x) - y) ** 2)").replace(
        "step(params, state, x, y)\n", "step(params, state, x * (jnp.nan if i == 7 else 1), y)\n"
    )
    _, report = checked(text, tmp_path)
    assert report["steps"] == 30
    one = next(c for c in report["complaints"] if c["symptom"] == "loss_not_finite")
    assert f"run {command} on the script" in one["cure"]


@pytest.mark.parametrize(
    ("tx", "between", "first"),
    [
        ("optax.adam(optax.linear_schedule(0.0, 3e-3, 500_000))", "pass", "steps_too_small"),
        ("optax.adam(3e-3)", "out = jax.lax.stop_gradient(out)", "no_gradient"),
    ],
)
def test_initial_statistics_that_have_not_worn_off_are_not_blamed(
    tx: str, between: str, first: str, tmp_path: Path
) -> None:
    _, report = checked(SLOW_STATISTICS.format(tx=tx, between=between), tmp_path, "--once")
    assert report["complaints"][0]["symptom"] == first
    assert "batch_norm" not in str(report["complaints"])


def test_parameters_that_are_not_handed_on_either_are_named(tmp_path: Path) -> None:
    text = script().replace("params, state, value = step", "_, _, value = step")
    _, report = checked(text, tmp_path, "--once")
    first = report["complaints"][0]
    assert first["symptom"] == "optimizer_renewed"
    assert "nothing is learned" in first["what"]
    assert first["evidence"][0].endswith("began with the same parameters and the same optimizer state")
    assert "new parameters" in first["cure"]


BARRIER = """
import jax, jax.numpy as jnp

@jax.jit
def step(w, t):
    loss, grad = jax.value_and_grad(lambda w: t * (jnp.sum(w**2) - 1.0))(w)
    return w - 0.3 * grad / t, loss

w, t = jnp.ones(8), 1.0
for i in range(40):
    w, loss = step(w, t)
    t *= 8 if i % 4 == 3 else 1
"""


def test_an_objective_times_a_number_that_grows_has_a_lower_bound(tmp_path: Path) -> None:
    assert_healthy(BARRIER, tmp_path)
