"""A loss that is NaN while its gradients are finite: a fault, unless the script tests for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest

from stablenum.diagnosis.watch.session import Session
from tests.jax.replaying import marked_line
from tests.jax.watched import assert_healthy, found, watched_with

# The sum of the third batch is below 0: its logarithm is NaN, and the slope of the logarithm is finite.
BATCHES = (1.0, 2.0, -0.5, 1.5, 1.0, 2.0, 1.0, 2.0)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    return watched_with(monkeypatch)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.log((w * x).sum())  # BAD


Step = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def plain() -> Step:
    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 1e-3 * gradient, value

    return step


def selecting() -> Step:
    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jnp.where(jnp.isnan(value), w, w - 1e-3 * gradient), value

    return step


def rejecting() -> Step:
    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jnp.where(value < 100.0, w - 1e-3 * gradient, w), value

    return step


def mending() -> Step:
    """The gradient is NaN as well, and is set to 0."""

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(lambda w: jnp.sqrt((w * x).sum()))(w)
        updates, _ = optax.zero_nans().update(gradient, optax.EmptyState())
        return w - 1e-3 * updates, value

    return step


def train(step: Step) -> None:
    w = jnp.ones(3)
    for x in BATCHES:
        w, _ = step(w, jnp.full(3, x))


def test_a_nan_loss_that_nobody_tests_is_found(session: Session) -> None:
    report = found(session, lambda: train(plain()))
    first = report.findings[0]
    assert (first.operation, report.verdict.cause.value) == ("log", "domain")
    assert first.place is not None
    assert first.place.line == marked_line(loss)


def test_a_nan_loss_whose_gradients_go_to_the_optimizer_is_found(session: Session) -> None:
    def run() -> None:
        gradients_of, tx = jax.value_and_grad(loss), optax.sgd(1e-3)
        w = jnp.ones(3)
        state = tx.init(w)
        for x in BATCHES:
            _, gradient = gradients_of(w, jnp.full(3, x))
            updates, state = tx.update(gradient, state, w)
            w = optax.apply_updates(w, updates)

    assert found(session, run).findings[0].operation == "log"


@pytest.mark.parametrize("make", [selecting, rejecting, mending])
def test_a_step_that_tests_its_loss_is_healthy(session: Session, make: Callable[[], Step]) -> None:
    train(make())
    assert_healthy(session)


def test_a_script_that_throws_a_bad_step_away_is_healthy(session: Session) -> None:
    step, w = plain(), jnp.ones(3)
    for x in BATCHES:
        new, value = step(w, jnp.full(3, x))
        w = new if math.isfinite(value) else w
    assert_healthy(session)


def test_a_script_that_skips_the_update_of_a_bad_loss_is_healthy(session: Session) -> None:
    gradients_of, tx = jax.value_and_grad(loss), optax.sgd(1e-3)
    w = jnp.ones(3)
    state = tx.init(w)
    for x in BATCHES:
        value, gradient = gradients_of(w, jnp.full(3, x))
        if math.isfinite(value):
            updates, state = tx.update(gradient, state, w)
            w = optax.apply_updates(w, updates)
    assert_healthy(session)


def test_statistics_that_a_check_of_the_script_refuses_lead_back_to_the_call_that_made_them(
    session: Session,
) -> None:
    """The bad statistics do no harm to training, only to the evaluation at the end."""

    @jax.jit
    def step(w: jax.Array, mean: jax.Array, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
        present = (x * mask).sum() / mask.sum()  # BAD
        value, slope = jax.value_and_grad(lambda w: ((w - x) ** 2).mean())(w)
        return w - 0.1 * slope, 0.9 * mean + 0.1 * present, value

    @jax.jit
    def evaluate(w: jax.Array, mean: jax.Array) -> jax.Array:
        return (w - mean) ** 2

    def run() -> None:
        w, mean = jnp.float32(0.0), jnp.float32(0.0)
        for i in range(12):
            w, mean, _ = step(w, mean, jnp.array([1.0, 2.0]), jnp.ones(2) * (i != 3))
        if not math.isfinite(evaluate(w, mean)):
            session.outcome.error = "ValueError: the evaluation is not finite"

    report = found(session, run)
    assert report.findings[0].place is not None
    assert report.findings[0].place.code.endswith("# BAD"), str(report)


def test_data_that_grows_is_no_explosion_of_parameters(session: Session) -> None:
    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, slope = jax.value_and_grad(lambda w: jnp.exp(w.sum() * x.sum()))(w)  # BAD
        return w - 1e-4 * slope, value

    def run() -> None:
        w = jnp.ones(3)
        for size in (1e-2, 1e-2, 1e-2, 1e4, 1e4, 1e4, 1e4):
            w, value = step(w, jnp.full(2, size))
            if not math.isfinite(value):
                return

    report = found(session, run)
    assert report.verdict.cause.value == "overflow", str(report)
