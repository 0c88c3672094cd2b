"""The replay leaves its arguments unchanged: models of every library, keys, integers, donated buffers."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stablenum_jax import replay


def _bits(tree: Any) -> list[bytes]:
    def plain(x: jax.Array) -> jax.Array:
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    found = [np.asarray(plain(x)).tobytes() for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    assert found
    return found


class Net(nnx.Module):
    """A layer, batch normalisation, dropout, and an edge."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jax.nn.relu(self.drop(self.norm(self.layer(x)))) * 0.0)


@pytest.mark.parametrize("jitted", [False, True])
def test_an_nnx_model_is_unchanged(jitted: bool) -> None:
    model = Net(nnx.Rngs(0))

    def loss(model: Net, x: jax.Array) -> jax.Array:
        return model(x).sum()

    x = jnp.arange(12.0).reshape(4, 3)
    before = _bits(nnx.state(model))
    report = replay(nnx.jit(loss) if jitted else loss, model, x)
    assert report.findings[0].operation == "sqrt"
    assert "['layer']['kernel']" in report.evidence.bad_gradients
    assert not any("mean" in name for name in report.evidence.bad_gradients)
    assert _bits(nnx.state(model)) == before
    statistics, keys = _bits(nnx.state(model, nnx.BatchStat)), _bits(nnx.state(model, nnx.RngState))
    loss(model, x)  # changes the model, which the replay must not do
    assert _bits(nnx.state(model, nnx.BatchStat)) != statistics
    assert _bits(nnx.state(model, nnx.RngState)) != keys


def test_values_written_in_place_are_judged() -> None:
    class Scale(nnx.Module):
        def __init__(self, at: float) -> None:
            self.w = nnx.Param(jnp.full(3, at))
            self.bound = nnx.Variable(jnp.full(2, jnp.inf))  # not written by the step, so a deliberate bound

    def step(model: Scale, optimizer: nnx.Optimizer) -> None:
        optimizer.update(model, nnx.grad(lambda m: jnp.sqrt(m.w[...]).sum())(model))

    for at, jitted in ((0.0, False), (0.0, True), (1.0, False), (1.0, True)):
        model = Scale(at)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        before = _bits((nnx.state(model), nnx.state(optimizer)))
        report = replay(nnx.jit(step) if jitted else step, model, optimizer)
        assert report.ok == (at == 1.0), str(report)
        assert [f.operation for f in report.findings[:1]] == ([] if report.ok else ["sqrt"])
        assert _bits((nnx.state(model), nnx.state(optimizer))) == before


def test_a_function_with_nothing_to_judge_is_reported() -> None:
    report = replay(lambda x: None, jnp.zeros(3))
    assert not report.ok
    assert "Nothing wrong" not in str(report)
    assert "nothing to judge" in str(report)


def test_linen_model() -> None:
    class Small(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))
            return jnp.log(jax.nn.relu(x))

    model = Small()
    x = jnp.arange(6.0).reshape(2, 3)
    variables = model.init(jax.random.key(0), x)
    before = _bits(variables)

    def loss(params: Any, stats: Any, x: jax.Array) -> Any:
        y, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return y.sum(), new

    report = replay(loss, variables["params"], variables["batch_stats"], x, has_aux=True)
    assert (report.findings[0].operation, report.findings[0].module) == ("log", "Small")
    assert _bits(variables) == before


def test_equinox_model() -> None:
    model = eqx.nn.MLP(3, "scalar", 4, 1, activation=jnp.sqrt, key=jax.random.key(0))
    model = jax.tree.map(lambda x: x * 0 if eqx.is_array(x) else x, model)
    report = replay(lambda m, x: m(x), model, jnp.ones(3))
    assert (report.findings[0].operation, report.findings[0].phase) == ("sqrt", "backward")
    assert ".layers[0].weight" in report.evidence.bad_gradients


def test_values_that_are_not_floats_pass_through() -> None:
    def loss(w: Any, key: jax.Array, raw: jax.Array, n: int, mode: str, nothing: None, ids: Any) -> jax.Array:
        assert (mode, nothing, n) == ("train", None, 3)
        noise = jax.random.normal(key, (n,)) + jax.random.uniform(raw, (n,))
        return (w["w"][ids] * noise).sum()

    params = {"w": jnp.ones(5), "none": None, "step": jnp.int32(3)}
    args = (jax.random.key(0), jax.random.PRNGKey(1), 3, "train", None, np.array([0, 1, 2]))
    assert replay(loss, params, *args).ok


def test_float0_gradient() -> None:
    def step(w: jax.Array, n: jax.Array) -> Any:
        return jax.grad(lambda w, n: (w * n).sum(), (0, 1), allow_int=True)(w, n)

    assert replay(step, jnp.ones(2), jnp.arange(2)).ok


def test_donated_buffers_are_not_deleted() -> None:
    step = jax.jit(lambda w, x: (w * x, jnp.log(w)), donate_argnums=0)
    w = jnp.zeros(3)
    assert not replay(step, w, jnp.ones(3)).ok
    assert not w.is_deleted()


@pytest.mark.parametrize("enabled", [False, True])
def test_float64(enabled: bool) -> None:
    with jax.enable_x64(enabled):
        x = jnp.full(3, 1e200 if enabled else 1e30)
        assert x.dtype == (jnp.float64 if enabled else jnp.float32)
        report = replay(lambda x: (x * x).sum(), x)
        assert (report.findings[0].operation, report.verdict.cause.value) == ("mul", "overflow")
        assert report.findings[0].outputs[0].dtype == str(x.dtype)


def test_jax_debug_nans_does_not_interfere() -> None:
    with jax.debug_nans(True):
        report = replay(lambda x: jnp.log(x).sum(), -jnp.ones(2))
    assert report.findings[0].operation == "log"


def test_complex_numbers() -> None:
    report = replay(lambda x: jnp.abs(jnp.exp(x + 1j)).sum(), jnp.full(2, 1e3))
    assert (report.findings[0].operation, report.findings[0].phase) == ("exp", "forward")


def test_no_data_leak() -> None:
    secret = jnp.arange(1000.0) + 0.123
    report = replay(lambda x: jnp.log(x - x).sum(), secret)
    assert all(len(s.values) <= 4 for f in report.findings for s in (*f.inputs, *f.outputs))
    assert "999.123" not in report.to_json()
