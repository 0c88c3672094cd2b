"""Every wrong use raises a clear exception and changes nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import stablenum_jax
from stablenum import GuardConfig
from tests.jax.helpers import every_mode, make_grads, make_params


@pytest.mark.parametrize("inner", [1.0, "adam", GuardConfig(), optax.adam, lambda g: g])
def test_inner_must_be_a_transformation(inner: Any) -> None:
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation"):
        stablenum_jax.guard(inner)


def test_config_must_be_a_config() -> None:
    with pytest.raises(TypeError, match="config must be a GuardConfig or None; got dict"):
        stablenum_jax.guard(None, {"clip": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"clip": -1.0}, ValueError, "clip must be a finite number above 0"),
        ({"clip": float("nan")}, ValueError, "clip must be"),
        ({"loss_scale": "huge"}, ValueError, "loss_scale must be"),
        ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite must be 'skip' or 'raise'"),
        ({"max_skips_in_a_row": 0}, ValueError, "max_skips_in_a_row must be"),
        ({"max_norm": 1.0}, TypeError, "unknown setting 'max_norm'"),
    ],
)
def test_wrong_settings(settings: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        stablenum_jax.guard(**settings)
    with pytest.raises(error, match=match):
        stablenum_jax.guard(optax.adam(1e-3), **settings)


def test_overrides_take_precedence_over_the_config() -> None:
    tx = stablenum_jax.guard(None, GuardConfig(clip=1.0, loss_scale=8.0), loss_scale=4.0)
    assert stablenum_jax.loss_scale(tx.init(jnp.ones(2))) == 4.0


@every_mode
def test_settings_must_not_be_traced(mode: str) -> None:
    factory = optax.inject_hyperparams(
        lambda learning_rate, max_norm: optax.chain(
            stablenum_jax.guard(clip=max_norm), optax.sgd(learning_rate)
        )
    )
    tx = factory(learning_rate=0.1, max_norm=1.0)
    init = tx.init if mode == "eager" else jax.jit(tx.init)
    with pytest.raises(TypeError, match=r"known before tracing.*inject_hyperparams.*static_args"):
        init(make_params())


@every_mode
def test_no_guard_in_the_optimizer(stepper: Any) -> None:
    params, tx = make_params(), optax.adam(1e-3)
    for use in (
        lambda: stepper(tx)(params, tx.init(params), make_grads(0)),
        lambda: stablenum_jax.metrics(tx.init(params)),
        lambda: stablenum_jax.loss_scale(tx.init(params)),
        lambda: stablenum_jax.value_and_grad(jnp.sum, tx.init(params)),
    ):
        with pytest.raises(ValueError, match=r"exactly one guard's state; got none. Put one guard"):
            use()


@every_mode
def test_two_guards_in_the_optimizer(stepper: Any) -> None:
    params = make_params()
    tx = optax.chain(stablenum_jax.guard(), stablenum_jax.guard(optax.adam(1e-3)))
    with pytest.raises(ValueError, match="exactly one guard's state; got 2"):
        stepper(tx)(params, tx.init(params), make_grads(0))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: stablenum_jax.chain(optax.adam(1e-3)), r"got 0 guard\(s\)"),
        (lambda: stablenum_jax.chain(stablenum_jax.guard(), stablenum_jax.guard()), r"got 2 guard\(s\)"),
        (
            lambda: stablenum_jax.chain(optax.adam(1e-3), stablenum_jax.guard()),
            r"in the transformations \[1\]",
        ),
        (lambda: stablenum_jax.guard(stablenum_jax.guard(optax.sgd(0.1))), r"without another guard"),
    ],
)
def test_chain_requires_exactly_one_guard_in_the_first_place(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make().init(make_params())


def test_chain_of_nothing_or_of_something_else() -> None:
    with pytest.raises(ValueError, match="at least one transformation"):
        stablenum_jax.chain()
    with pytest.raises(TypeError, match=r"transforms\[1\] must be an optax\.GradientTransformation"):
        stablenum_jax.chain(stablenum_jax.guard(), 0.1)  # type: ignore[arg-type]


@every_mode
def test_a_loss_that_is_not_a_scalar(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-3))
    params = make_params()
    with pytest.raises(ValueError, match=r"value must be the scalar loss of the step; got shape \(3,\)"):
        stepper(tx)(params, tx.init(params), make_grads(0), value=jnp.ones(3))


@every_mode
def test_a_state_of_another_optimizer(stepper: Any) -> None:
    params = make_params()
    state = stablenum_jax.guard().init(params)
    with pytest.raises(ValueError, match="tx never calls the guard"):
        stepper(optax.identity())(params, state, make_grads(0))


@every_mode
def test_a_transformation_that_changes_a_shape(stepper: Any) -> None:
    grow = optax.GradientTransformation(
        lambda params: jnp.zeros(1), lambda g, s, p=None: (g, jnp.concatenate([s, s]))
    )
    tx = optax.chain(stablenum_jax.guard(), grow)
    params = make_params()
    with pytest.raises(ValueError, match=r"opt_state\[1\] had shape \(1,\) and came back with shape \(2,\)"):
        stepper(tx)(params, tx.init(params), make_grads(0))


def test_public_names_are_sorted_and_exist() -> None:
    names = stablenum_jax.__all__
    assert names == sorted(names)
    assert all(hasattr(stablenum_jax, name) for name in names)


def test_a_wrong_call_changes_nothing() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-3))
    params = make_params()
    opt_state = tx.init(params)
    with pytest.raises(ValueError, match="value must be"):
        stablenum_jax.step(tx, params, opt_state, make_grads(0), value=jnp.ones(3))
    after, state_after = stablenum_jax.step(tx, params, opt_state, make_grads(0))
    assert stablenum_jax.metrics(state_after)["step"] == 0
    assert (after["out"] != params["out"]).any()
