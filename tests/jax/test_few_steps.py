"""``stablenum_jax.checkup``: a few steps on one batch, for every kind of model, without changing anything."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stablenum_jax

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (64, 8))
Y = X @ jax.random.normal(jax.random.key(1), (8, 1))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.BatchNorm(use_running_average=True)(linen.Dense(16)(x))
        return linen.Dense(1)(linen.relu(x))


def of_plain() -> tuple[Any, Any]:
    params = {
        "first": {"w": jax.random.normal(KEY, (8, 16)) / 2, "b": jnp.zeros(16)},
        "last": {"w": jax.random.normal(KEY, (16, 1)) / 4},
    }
    return params, lambda p, x: jax.nn.relu(x @ p["first"]["w"] + p["first"]["b"]) @ p["last"]["w"]


def of_nnx() -> tuple[Any, Any]:
    return Net(nnx.Rngs(0)), lambda net, x: net(x)


def of_linen() -> tuple[Any, Any]:
    return Linen().init(KEY, X), lambda variables, x: Linen().apply(variables, x)


def of_equinox() -> tuple[Any, Any]:
    return eqx.nn.MLP(8, 1, 16, 2, key=KEY), lambda net, x: jax.vmap(net)(x)


MODELS = {f.__name__: f for f in (of_plain, of_nnx, of_linen, of_equinox)}
OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "guarded": optax.chain(stablenum_jax.guard(clip=1.0, loss_scale="dynamic"), optax.adam(1e-2)),
}


def arrays_in(params: Any) -> list[np.ndarray]:
    tree = nnx.state(params) if isinstance(params, nnx.Module) else params
    return [np.asarray(x) for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_sound_model_is_not_blamed_and_not_changed(model: str, optimizer: str) -> None:
    params, apply = MODELS[model]()
    before = arrays_in(params)

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean(jnp.square(apply(params, x) - y))

    report = stablenum_jax.checkup(loss_fn, params, X, Y, tx=OPTIMIZERS[optimizer])
    assert report.ok, report
    assert (report.steps, report.measured) == (3, 3)
    assert report.losses[1] < report.losses[0]
    assert all(map(np.array_equal, before, arrays_in(params)))


def mse(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean(jnp.square(x @ w - y))


W = jax.random.normal(KEY, (8, 1))


@pytest.mark.parametrize("loss_fn", [mse, jax.jit(mse)], ids=["plain", "jitted"])
def test_the_state_of_the_optimizer_goes_on(loss_fn: Any) -> None:
    tx = optax.adam(optax.linear_schedule(0.0, 1e-2, 2))
    state = tx.init(W)
    fresh = stablenum_jax.checkup(loss_fn, W, X, Y, tx=tx, opt_state=state)
    for _ in range(5):
        _, state = tx.update(jnp.ones_like(W), state, W)
    later = stablenum_jax.checkup(loss_fn, W, X, Y, tx=tx, opt_state=state)
    assert fresh.losses[0] == later.losses[0]
    assert fresh.losses[1] != later.losses[1]


def test_the_auxiliary_output_is_left_aside() -> None:
    report = stablenum_jax.checkup(lambda *a: (mse(*a), {"n": 1}), W, X, Y, tx=optax.sgd(1e-2), has_aux=True)
    assert report.ok
    assert report.losses[0] == pytest.approx(float(mse(W, X, Y)))


def test_an_optimizer_that_needs_the_function_takes_no_step() -> None:
    report = stablenum_jax.checkup(mse, W, X, Y, tx=optax.lbfgs())
    assert (report.steps, report.measured) == (0, 1)
    assert report.notes == ("the optimizer needs the function itself (value_fn), so it took no step",)


def test_numbers_and_strings_among_the_arguments_stay_what_they_are() -> None:
    def loss_fn(w: Any, x: Any, y: Any, kind: str, power: int) -> Any:
        assert kind == "mean"
        return jnp.mean((x @ w - y) ** (2 if power == 2 else 4))

    assert stablenum_jax.checkup(loss_fn, W, X, Y, "mean", 2).losses[0] == pytest.approx(float(mse(W, X, Y)))


def test_a_state_that_is_poisoned() -> None:
    tx = optax.adam(1e-2)
    state = tx.init(W)
    bad = (state[0]._replace(nu=jnp.full_like(W, -1.0)), *state[1:])
    report = stablenum_jax.checkup(mse, W, X, Y, tx=tx, opt_state=bad)
    assert report.complaints[0].symptom.value == "bad_state", report


def test_a_loss_that_is_not_finite_is_a_finding() -> None:
    report = stablenum_jax.checkup(mse, W, X / 0, Y, tx=optax.sgd(1e-2))
    assert "loss_not_finite" in str(report)
    assert not report.ok


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, W), {}, "loss_fn must be a function .* got int"),
        ((lambda w: w, W), {}, r"loss_fn must be .* got 'float32\[8, 1\]"),
        ((lambda w: 3, W), {}, "loss_fn must be a function that returns a floating-point scalar"),
        ((jnp.sum, {"n": 3}), {}, "params must be parameters, with a floating-point array"),
        ((jnp.sum, W), {"tx": 3}, "tx must be"),
        ((jnp.sum, W), {"opt_state": ()}, "opt_state must be None without tx"),
        ((jnp.sum, W), {"has_aux": 1}, "has_aux must be"),
    ],
)
def test_wrong_arguments(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stablenum_jax.checkup(*arguments, **options)


def test_a_call_under_jit_is_refused() -> None:
    with pytest.raises(TypeError, match="checkup needs real arrays, but was called inside a transformation"):
        jax.jit(lambda w: stablenum_jax.checkup(mse, w, X, Y).losses[0])(W)
