"""optax's wrappers around and inside the guard: accumulated gradients, and schedules after a skip."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax

GRADIENTS = [1.0, jnp.nan, 3.0, 5.0, 2.0, 4.0, 9.0]  # the second micro-batch is bad
RATE = optax.piecewise_constant_schedule(1.0, {1: 0.1})


def guard(inner: Any = None, **rules: Any) -> Any:
    return stablenum_jax.guard(inner, **rules)


def run(tx: Any, gradients: list[float], loss: Any = None) -> tuple[list[float], Any]:
    """The parameter after each step, and the last state."""
    step = jax.jit(lambda p, s, g: stablenum_jax.step(tx, p, s, g, value=loss))
    params, seen = {"w": jnp.zeros(())}, []
    opt_state = tx.init(params)
    for gradient in gradients:
        params, opt_state = step(params, opt_state, {"w": jnp.asarray(gradient)})
        seen.append(float(params["w"]))
    return seen, opt_state


FORMS = {
    "around": lambda: guard(optax.MultiSteps(optax.sgd(RATE), 3).gradient_transformation()),
    "around the object": lambda: guard(optax.MultiSteps(optax.sgd(RATE), 3)),
    "inside": lambda: optax.MultiSteps(optax.chain(guard(), optax.sgd(RATE)), 3).gradient_transformation(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_window_is_the_mean_of_as_many_good_micro_batches(form: str) -> None:
    seen, opt_state = run(FORMS[form](), GRADIENTS)
    first, second = -(1 + 3 + 5) / 3, -0.1 * (2 + 4 + 9) / 3
    np.testing.assert_allclose(seen, [0, 0, 0, first, first, first, first + second], rtol=1e-6)
    (window,) = [s for s in jax.tree.leaves(opt_state, is_leaf=_accumulates) if _accumulates(s)]
    assert (int(window.gradient_step), int(window.mini_step)) == (2, 0)


def _accumulates(node: object) -> bool:
    return isinstance(node, optax.MultiStepsState)


def test_optax_alone_keeps_the_nan_in_the_accumulator() -> None:
    tx = optax.MultiSteps(optax.sgd(1.0), 3).gradient_transformation()
    params = {"w": jnp.zeros(())}
    state = tx.init(params)
    for gradient in GRADIENTS:
        updates, state = tx.update({"w": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
    assert jnp.isnan(params["w"])
    assert jnp.isnan(state.acc_grads["w"])


def test_around_multisteps_a_bad_loss_drops_its_own_micro_batch_only() -> None:
    seen, opt_state = run(FORMS["around"](), [1.0, 3.0, 5.0], loss=jnp.asarray(jnp.inf))
    assert seen == [0.0, 0.0, 0.0]
    assert stablenum_jax.scalars(opt_state)["skipped_total"] == 3


SCHEDULED = {
    "schedule": lambda: optax.chain(guard(), optax.sgd(RATE)),
    "inject_hyperparams": lambda: optax.chain(
        guard(), optax.inject_hyperparams(optax.sgd)(learning_rate=RATE)
    ),
    "inject_hyperparams around": lambda: optax.inject_hyperparams(
        lambda rate: optax.chain(guard(), optax.sgd(rate))
    )(rate=RATE),
    "partition": lambda: optax.chain(guard(), optax.partition({"all": optax.sgd(RATE)}, "all")),
    "masked": lambda: optax.chain(guard(), optax.masked(optax.sgd(RATE), {"w": True})),
    "apply_if_finite": lambda: guard(optax.apply_if_finite(optax.sgd(RATE), 1)),
}


@pytest.mark.parametrize("form", SCHEDULED)
def test_schedules_stand_still_at_skipped_steps(form: str) -> None:
    tx = SCHEDULED[form]()
    seen, _ = run(tx, [jnp.nan, jnp.inf, jnp.nan, 1.0, jnp.nan, 1.0])
    np.testing.assert_allclose(seen, [0, 0, 0, -1.0, -1.0, -1.1], rtol=1e-6)


def test_apply_if_finite_alone_applies_a_bad_update_after_too_many() -> None:
    tx = optax.apply_if_finite(optax.sgd(1.0), 1)
    params = {"w": jnp.zeros(())}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update({"w": jnp.asarray(jnp.nan)}, state, params)
        params = optax.apply_updates(params, updates)
    assert jnp.isnan(params["w"])


def test_a_masked_optimizer_has_all_gradients_checked_by_a_guard_around_it() -> None:
    tx = optax.chain(guard(), optax.masked(optax.sgd(1.0), {"w": True, "frozen": False}), optax.scale(1.0))
    params = {"w": jnp.zeros(()), "frozen": jnp.zeros(())}
    _, opt_state = stablenum_jax.step(
        tx, params, tx.init(params), {"w": jnp.ones(()), "frozen": jnp.asarray(jnp.nan)}
    )
    assert stablenum_jax.metrics(opt_state)["worst"].name == "frozen"
    assert stablenum_jax.metrics(opt_state)["reason"] is stablenum.Reason.NAN_GRADIENT
