"""What ``stablenum explain`` watches in a JAX script, and what it passes by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import stablenum_jax
from stablenum.diagnosis import Cause, Report
from stablenum.diagnosis.watch.plan import Plan
from stablenum.diagnosis.watch.session import Session
from stablenum_jax._diagnosis import watch
from stablenum_jax._diagnosis.watch import transformations
from tests.jax.watched import assert_healthy, found

# ---------------------------------------------------------------------------------- derivatives


def roots(x: jax.Array) -> jax.Array:
    return jnp.sqrt(x).sum()  # BAD


X = jnp.array([0.0, 1.0])
ROWS = jnp.array([[0.0, 1.0], [1.0, 2.0]])
DERIVATIVES: dict[str, Callable[[], Any]] = {
    "jacrev": lambda: jax.jacrev(roots)(X),
    "jacfwd": lambda: jax.jacfwd(roots)(X),
    "hessian": lambda: jax.hessian(roots)(X),
    "jacobian of a jacobian": lambda: jax.jacfwd(jax.jacrev(roots))(X),
    "vjp": lambda: jax.vjp(roots, X)[1](1.0),
    "linearize": lambda: jax.linearize(roots, X)[1](jnp.ones(2)),
    "vmap(grad)": lambda: jax.vmap(jax.grad(roots))(ROWS),
    "vmap(value_and_grad)": lambda: jax.vmap(jax.value_and_grad(roots))(ROWS),
    "vmap of a function around grad": lambda: jax.vmap(lambda x: 2 * jax.grad(roots)(x))(ROWS),
    "vmap(jacrev)": lambda: jax.vmap(jax.jacrev(roots))(ROWS),
    "vmap(vjp)": lambda: jax.vmap(lambda x: jax.vjp(roots, x)[1](1.0))(ROWS),
    "jit(vmap(grad))": lambda: jax.jit(jax.vmap(jax.grad(roots)))(ROWS),
    "jit(vmap(value_and_grad))": lambda: jax.jit(jax.vmap(jax.value_and_grad(roots)))(ROWS),
    "jit(jacrev)": lambda: jax.jit(jax.jacrev(roots))(X),
    "vmap(jit(grad))": lambda: jax.vmap(jax.jit(jax.grad(roots)))(ROWS),
    "-inf": lambda: jax.grad(lambda x: -roots(x))(X),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_a_derivative_that_is_not_finite_is_placed(session: Session, name: str) -> None:
    report = found(session, DERIVATIVES[name])
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# BAD"), str(report)
    assert (first.operation, report.verdict.cause) == ("sqrt", Cause.BOUNDARY_DERIVATIVE), str(report)


def test_watched_derivatives_are_those_of_jax(session: Session) -> None:
    def f(x: jax.Array) -> jax.Array:
        return (x**3).sum()

    np.testing.assert_allclose(jax.hessian(f)(X), jnp.diag(6 * X))
    np.testing.assert_allclose(jax.vmap(jax.grad(f), in_axes=1, out_axes=1)(ROWS), 3 * ROWS**2)
    value, pull, extra = jax.vjp(lambda x: (f(x), "extra"[:0] or x), X, has_aux=True)
    np.testing.assert_allclose(jax.jit(lambda p: p(2.0))(pull)[0], 6 * X**2)
    np.testing.assert_allclose(extra, X)
    assert float(value) == 1.0
    assert_healthy(session)


def test_an_update_of_optax_that_is_not_jitted_is_a_failure_of_the_optimizer(session: Session) -> None:
    tx = optax.adam(0.1, eps=0.0)
    params = jnp.ones(2)

    def run() -> None:
        tx.update(jnp.array([0.0, 1.0]), tx.init(params), params)  # BAD

    report = found(session, run)
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# BAD")
    assert (first.operation, report.verdict.cause) == ("div", Cause.OPTIMIZER_STATE), str(report)


# ---------------------------------------------------------------------------------- guards and loss scales


def squares(params: dict[str, jax.Array]) -> jax.Array:
    x = jnp.full((4, 3), 3.0, params["w"].dtype)
    return ((x @ params["w"]).astype(jnp.float32) ** 2).mean()


@pytest.mark.parametrize("jitted", [True, False])
def test_a_guarded_step_without_a_loss_is_healthy(session: Session, jitted: bool) -> None:
    tx = stablenum_jax.guard(optax.sgd(1e-3))
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx)

    def step(state: TrainState) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(squares)(state.params)
        return state.apply_gradients(grads=grads), loss

    step = jax.jit(step) if jitted else step
    for _ in range(3):
        state, _ = step(state)
    assert_healthy(session)


@pytest.mark.parametrize("jitted", [True, False])
def test_overflows_while_the_loss_scale_comes_down_are_passed_by(session: Session, jitted: bool) -> None:
    tx = stablenum_jax.guard(optax.sgd(1e-6), loss_scale="dynamic")
    params = {"w": jnp.ones(3, jnp.float16)}
    state = tx.init(params)

    def step(params: Any, state: Any) -> Any:
        loss, grads = stablenum_jax.value_and_grad(squares, state)(params)
        norm = jnp.linalg.norm(grads["w"])  # a metric that the overflow reaches
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, norm

    step = jax.jit(step) if jitted else step
    for _ in range(8):
        params, state, _ = step(params, state)
    assert stablenum_jax.loss_scale(state) < 2.0**16
    assert_healthy(session)


def test_overflows_under_the_loss_scale_of_flax_are_passed_by(session: Session) -> None:
    scale, params = DynamicScale(), {"w": jnp.ones(3, jnp.float16)}
    for _ in range(8):
        scale, _, _, _ = scale.value_and_grad(squares)(params)
    assert scale.scale < 2.0**16
    assert_healthy(session)


def test_a_loss_that_is_nan_is_found_under_a_loss_scale(session: Session) -> None:
    tx = stablenum_jax.guard(optax.sgd(1e-6), loss_scale="dynamic")
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    report = found(
        session,
        lambda: stablenum_jax.value_and_grad(lambda p: jnp.log(-p["w"]).sum(), state)(params),
    )
    assert report.findings[0].operation == "log"


def test_a_step_that_a_guard_skips_is_explained_if_only_its_state_shows_it(session: Session) -> None:
    tx = stablenum_jax.guard(optax.sgd(1e-3))
    params = {"w": X}

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(lambda p: roots(p["w"]))(params), state, params)
        return optax.apply_updates(params, updates), state

    assert found(session, lambda: step(params, tx.init(params))).findings[0].operation == "sqrt"


# ---------------------------------------------------------------------------------- metrics


def per_class(hits: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.stack([(hits & (y == c)).sum() / (y == c).sum() for c in range(2)])


Y = jnp.zeros(4, jnp.int32)  # the second class is empty


def train(*, soft: bool = False, bad: bool = False) -> None:
    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss_fn(w: jax.Array) -> Any:
            logits = x @ w
            kind = (logits[:, 0] * (Y == 1)).sum() / (Y == 1).sum() if soft else 0.0
            metrics = {"recall": per_class(logits.argmax(-1) == Y, Y), "soft": kind}
            return jnp.log(logits - logits if bad else 1 + logits**2).mean(), metrics  # BAD

        (loss, metrics), grad = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return w - 0.01 * grad, {"loss": loss, **metrics, "soft": metrics["soft"] + loss}

    w = jnp.ones((3, 2))
    for _ in range(3):
        w, _ = step(w, jnp.ones((4, 3)))


def test_a_metric_that_is_nan_for_an_empty_class_is_passed_by(session: Session) -> None:
    train()
    accuracy = jax.jit(lambda w: per_class((jnp.ones((4, 3)) @ w).argmax(-1) == Y, Y))
    for _ in range(3):
        accuracy(jnp.ones((3, 2)))
    assert_healthy(session)


def test_a_metric_whose_derivative_is_a_constant_zero_is_passed_by(session: Session) -> None:
    """A scalar count alone; its derivative is a literal in the program, not a variable."""

    @jax.jit
    def step(w: jax.Array, y: jax.Array) -> Any:
        def loss_fn(w: jax.Array) -> Any:
            logits = jnp.ones((2, 3)) @ w
            return (logits**2).mean(), ((logits.argmax(-1) == y) * (y == 2)).sum() / (y == 2).sum()

        (loss, accuracy), grad = jax.value_and_grad(loss_fn, has_aux=True)(w)
        return w - 0.01 * grad, loss, accuracy

    w = jnp.ones((3, 2))
    for _ in range(3):
        w, _, _ = step(w, jnp.zeros(2, jnp.int32))
    assert_healthy(session)


def test_a_loss_is_explained_apart_from_the_metrics_beside_it(session: Session) -> None:
    report = found(session, lambda: train(bad=True))
    assert report.findings[0].operation == "log", str(report)
    assert all(f.place is not None and f.place.code.endswith("# BAD") for f in report.findings)


def test_an_entry_that_the_user_names_is_not_judged(session: Session) -> None:
    assert found(session, lambda: train(soft=True)).findings[0].operation == "div"
    named = Session(Plan(script="script.py", ignore=("soft",)))
    watch.watch(named)
    train(soft=True)
    assert_healthy(named)


def test_a_function_that_the_user_names_is_not_judged(session: Session) -> None:
    session.plan = Plan(script="script.py", ignore=("sensitivity",))

    def sensitivity(x: jax.Array) -> jax.Array:
        return jax.grad(roots)(x)

    sensitivity(X)
    assert_healthy(session)


def test_a_nan_without_derivative_counts_if_training_reads_it(session: Session) -> None:
    @jax.jit
    def prepared(image: jax.Array) -> jax.Array:
        return (image - image.min()) / (image.max() - image.min())  # BAD

    def run() -> None:
        for i in range(3):
            x = prepared(jnp.arange(3) * (1 - i))
            jax.value_and_grad(lambda w, x=x: ((x * w) ** 2).mean())(jnp.ones(3))

    first = found(session, run).findings[0]
    assert first.operation == "div"


def test_a_nan_without_derivative_counts_if_nothing_else_was_done(session: Session) -> None:
    jax.jit(lambda n: n / n)(jnp.zeros(2, jnp.int32))
    session.conclude()
    assert session.outcome.failure is not None


def test_a_replay_that_fails_says_so_and_blames_no_device(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Report:
        raise RuntimeError("no rule for this")

    monkeypatch.setattr(transformations, "replay_of", broken)
    text = str(found(session, lambda: jax.grad(roots)(X)))
    assert "Cause: not_replayed" in text
    assert "no rule for this" in text
    assert "out of service" not in text


def test_the_call_in_the_script_is_among_the_frames(session: Session) -> None:
    report = found(session, lambda: jax.vmap(jax.grad(roots))(ROWS))
    (*_, caller, inner) = report.findings[0].frames
    assert (caller.code, inner.function) == (
        "report = found(session, lambda: jax.vmap(jax.grad(roots))(ROWS))",
        "roots",
    )
    assert "Called from" in str(report)
