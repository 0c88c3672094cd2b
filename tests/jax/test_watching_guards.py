"""``stablenum explain`` passes by what a guard skips if it applies steps afterwards, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import stablenum
import stablenum_jax
from stablenum.diagnosis.watch.courses import MOST_IN_A_ROW
from stablenum.diagnosis.watch.session import Session
from tests.jax.watched import assert_healthy, found


def training(
    bad: Callable[[int], bool], steps: int = 8, *, loss_known: bool = False, **settings: Any
) -> Callable[[], None]:
    """A training whose loss is finite, and whose gradient is not in some steps; or neither is."""

    def run() -> None:
        tx = optax.chain(stablenum_jax.guard(**settings), optax.sgd(0.01))
        params = {"w": jnp.ones(2)}
        state = tx.init(params)

        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            return jnp.sqrt(jnp.sum((params["w"] * x) ** 2))  # BAD

        @jax.jit
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            loss, grads = stablenum_jax.value_and_grad(loss_fn, state)(params, x)
            return stablenum_jax.step(tx, params, state, grads, value=loss)

        for i in range(steps):
            value = (jnp.nan if loss_known else 0.0) if bad(i) else 1.0
            params, state = step(params, state, jnp.full(2, value))
            stablenum_jax.metrics(state)

    return run


@pytest.mark.parametrize("loss_known", [False, True])
def test_what_a_guard_skips_is_passed_by(session: Session, loss_known: bool) -> None:
    training(lambda i: i in (2, 5), loss_known=loss_known)()
    session.outcome.exit_code = 0
    assert_healthy(session)
    assert "in call 2 (" in session.outcome.harmless


def training_of_nnx(bad: tuple[int, ...], **settings: Any) -> Callable[[], None]:
    def run() -> None:
        model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, stablenum_jax.guard(optax.sgd(0.01), **settings), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
            loss_fn = lambda model: jnp.sqrt(jnp.sum(model(x) ** 2))  # noqa: E731
            loss, grads = stablenum_jax.value_and_grad(loss_fn, optimizer)(model)
            optimizer.update(model, grads, value=loss)
            return loss

        for i in range(8):
            step(model, optimizer, jnp.full(2, 0.0 if i in bad else 1.0))
            stablenum_jax.metrics(optimizer)

    return run


@pytest.mark.parametrize(("settings", "said"), [({}, "in call 2 ("), ({"loss_scale": "dynamic"}, "")])
def test_the_guard_is_seen_in_what_nnx_jit_passes_on(
    session: Session, settings: dict[str, Any], said: str
) -> None:
    training_of_nnx((2, 5), **settings)()
    session.outcome.exit_code = 0
    assert_healthy(session)
    assert said in session.outcome.harmless
    assert bool(said) == bool(session.outcome.harmless)


def test_skips_at_the_end_under_nnx_jit_are_a_failure(session: Session) -> None:
    assert found(session, training_of_nnx((6, 7))).findings[0].operation == "sqrt"
    assert session.outcome.failure is not None
    assert session.outcome.failure.step == 6


def test_a_skip_after_which_the_guard_applies_nothing_is_a_failure(session: Session) -> None:
    assert found(session, training(lambda i: i >= 6)).findings[0].operation == "sqrt"
    assert session.outcome.failure is not None
    assert session.outcome.failure.step == 6


@pytest.mark.parametrize("scale", ["dynamic", 128.0])
def test_a_loss_scale_makes_no_bad_loss_good(session: Session, scale: Any) -> None:
    """The scale stays as it is, and the loss that is returned has no derivative: it is not the scaled one."""

    def run() -> None:
        tx = optax.chain(stablenum_jax.guard(loss_scale=scale), optax.sgd(0.01))
        params = {"w": jnp.ones(2)}
        state = tx.init(params)

        @jax.jit
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            loss_fn = lambda params, x: jnp.mean(params["w"] * x / jnp.sum(x))  # noqa: E731
            loss, grads = stablenum_jax.value_and_grad(loss_fn, state)(params, x)
            params, state = stablenum_jax.step(tx, params, state, grads, value=loss)
            return params, state, loss

        for i in range(8):
            params, state, _ = step(params, state, jnp.full(2, 1.0 if i == 1 else 0.0))
            stablenum_jax.metrics(state)

    assert found(session, run).findings[0].operation == "div"
    assert session.outcome.failure is not None


def test_a_skip_at_the_end_of_a_step_that_is_given_its_gradients_is_a_failure(session: Session) -> None:
    def run() -> None:
        tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.01))
        params = {"w": jnp.ones(2)}
        state = tx.init(params)
        derivative = jax.jit(jax.grad(lambda params, x: jnp.sum(params["w"] * x)))
        step = jax.jit(lambda params, state, grads: stablenum_jax.step(tx, params, state, grads))
        for i in range(8):
            grads = derivative(params, jnp.ones(2))
            factor = jnp.nan if i == 7 else 1.0
            params, state = step(params, state, jax.tree.map(lambda g, f=factor: g * f, grads))

    assert found(session, run)
    assert session.outcome.failure is not None


def test_a_guard_that_skips_every_step_from_one_on_is_stopped(session: Session) -> None:
    found(session, training(lambda i: i >= 5, steps=1000))
    assert session.outcome.failure is not None
    assert session.outcome.failure.step == 5
    assert session.outcome.calls < 5 + 2 * MOST_IN_A_ROW


def test_a_guard_that_ends_the_run_is_explained_by_the_first_step_that_it_skipped(session: Session) -> None:
    run = training(lambda i: i >= 4, max_skips_in_a_row=3)
    with pytest.raises(stablenum.NonFiniteError):
        run()
    session.outcome.exit_code = 1
    session.conclude()
    assert session.outcome.failure is not None
    assert session.outcome.failure.step == 4
