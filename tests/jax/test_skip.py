"""A true skip: parameters and the whole state of the optimizer keep every bit."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from tests.jax.helpers import (
    assert_same_bits,
    every_mode,
    make_grads,
    make_params,
    reason,
    spoil,
    without_guard,
)
from tests.selection import slow_unless

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "schedule": lambda: optax.adam(optax.linear_schedule(1e-2, 1e-3, 10)),
    "adafactor": lambda: optax.adafactor(1e-2),
}
FORMS = {
    "chain form": lambda tx: optax.chain(stablenum_jax.guard(clip=1.0), tx),
    "chain": lambda tx: stablenum_jax.chain(stablenum_jax.guard(clip=1.0), tx),
    "wrapper form": lambda tx: stablenum_jax.guard(tx, clip=1.0),
}


def _stepper(form: str, tx: Any, stepper: Any, updater: Any) -> Any:
    return stepper(tx) if form == "chain form" else updater(tx)


@every_mode
@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_step_changes_no_bit(form: str, stepper: Any, updater: Any) -> None:
    tx = FORMS[form](OPTIMIZERS["adamw"]())
    step = _stepper(form, tx, stepper, updater)
    params = make_params()
    opt_state = tx.init(params)
    for seed in range(3):
        params, opt_state = step(params, opt_state, make_grads(seed))
    for value, name in ((np.nan, "NAN_GRADIENT"), (np.inf, "INF_GRADIENT"), (-np.inf, "INF_GRADIENT")):
        after, state_after = step(params, opt_state, spoil(make_grads(9), value))
        assert_same_bits(after, params)
        assert_same_bits(without_guard(state_after), without_guard(opt_state))
        assert stablenum_jax.metrics(state_after)["skipped_total"] == 1
        assert stablenum_jax.metrics(state_after)["worst"].name == "out"
        assert reason(state_after) == name


@pytest.mark.parametrize("form", FORMS)
def test_a_skip_of_the_first_step_keeps_negative_zero(form: str, stepper: Any, updater: Any) -> None:
    tx = FORMS[form](optax.adam(1e-2))
    params = make_params()
    assert np.signbit(params["dense"]["w"][0, 0])
    after, _ = _stepper(form, tx, stepper, updater)(params, tx.init(params), spoil(make_grads(0)))
    assert_same_bits(after, params)


@pytest.mark.parametrize(
    ("form", "optimizer"),
    slow_unless(
        lambda form, optimizer: form == "chain form" or optimizer == "adamw",
        itertools.product(FORMS, OPTIMIZERS),
    ),
)
def test_a_run_with_bad_steps_ends_as_the_run_without_them(
    form: str, optimizer: str, stepper: Any, updater: Any
) -> None:
    bad_steps = {0: np.nan, 4: np.inf, 5: np.nan, 6: -np.inf}
    ends = []
    tx = FORMS[form](OPTIMIZERS[optimizer]())
    step = _stepper(form, tx, stepper, updater)
    for with_bad_steps in (True, False):
        params = make_params()
        opt_state = tx.init(params)
        for i in range(10):
            if i not in bad_steps:
                params, opt_state = step(params, opt_state, make_grads(i))
            elif with_bad_steps:
                params, opt_state = step(params, opt_state, spoil(make_grads(i), bad_steps[i]))
        ends.append((params, without_guard(opt_state)))
        expected = len(bad_steps) if with_bad_steps else 0
        assert stablenum_jax.metrics(opt_state)["skipped_total"] == expected
    assert_same_bits(*ends)


@every_mode
def test_a_bad_loss_skips_the_step(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-2))
    params, grads = make_params(), make_grads(0)
    opt_state = tx.init(params)
    after, state_after = stepper(tx)(params, opt_state, grads, value=jnp.asarray(jnp.nan))
    assert_same_bits(after, params)
    assert_same_bits(without_guard(state_after), without_guard(opt_state))
    assert reason(state_after) == "NONFINITE_LOSS"


@every_mode
def test_the_wrappers_take_the_loss_as_an_extra_argument(updater: Any) -> None:
    tx = stablenum_jax.guard(optax.adam(1e-2))
    params = make_params()
    after, opt_state = updater(tx)(params, tx.init(params), make_grads(0), value=jnp.asarray(jnp.inf))
    assert_same_bits(after, params)
    assert reason(opt_state) == "NONFINITE_LOSS"


def test_two_hundred_bad_steps_in_a_row_change_nothing(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(loss_scale="dynamic"), optax.adamw(1e-2))
    params, bad = make_params(), spoil(make_grads(0), np.inf)
    opt_state = tx.init(params)
    step = stepper(tx)
    after, state_after = params, opt_state
    for _ in range(200):
        after, state_after = step(after, state_after, bad)
    assert_same_bits(after, params)
    assert_same_bits(without_guard(state_after), without_guard(opt_state))
    assert stablenum_jax.loss_scale(state_after) == 1.0
    after, state_after = step(after, state_after, make_grads(1))
    assert stablenum_jax.metrics(state_after)["applied"]
    assert np.isfinite(np.asarray(after["out"])).all()


def test_donated_buffers_survive_a_skip() -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adam(1e-2))
    params = make_params()
    expected = jax.tree.map(lambda x: np.array(x), params)
    step = jax.jit(lambda p, s, g: stablenum_jax.step(tx, p, s, g), donate_argnums=(0, 1))
    after, opt_state = step(params, tx.init(params), spoil(make_grads(0)))
    assert params["out"].is_deleted()
    assert_same_bits(jax.tree.map(np.asarray, after), expected)
    after, opt_state = step(after, opt_state, make_grads(1))
    assert stablenum_jax.metrics(opt_state)["applied"]


def test_the_random_key_of_an_optimizer_is_unchanged_by_a_skip(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    params = make_params()
    opt_state = tx.init(params)
    step = stepper(tx)
    after, state_after = step(params, opt_state, spoil(make_grads(0)))
    assert_same_bits(after, params)
    key = lambda state: np.asarray(jax.random.key_data(state[1].rng_key))  # noqa: E731
    np.testing.assert_array_equal(key(state_after), key(opt_state))
    _, state_after = step(params, opt_state, make_grads(0))
    assert (key(state_after) != key(opt_state)).any()
