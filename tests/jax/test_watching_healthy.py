"""``stablenum explain`` leaves healthy JAX scripts alone, whatever they do with bad numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from stablenum.diagnosis.watch.courses import MOST_IN_A_ROW, Course
from stablenum.diagnosis.watch.session import Session
from stablenum_jax import replay
from stablenum_jax._diagnosis.replay.jax_internals import under_transformation
from stablenum_jax._diagnosis.watch import judge, programs
from stablenum_jax._diagnosis.watch.judge import Judge
from tests.jax.watched import assert_healthy, found
from tests.selection import only, thinned

W = jnp.ones((3, 1))


def batches() -> list[jax.Array]:
    """Twelve batches, of which every fourth is bad."""
    good = jnp.arange(6.0).reshape(2, 3)
    return [good.at[0, 0].set(jnp.nan) if i % 4 == 2 else good for i in range(12)]


def loss_of(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


def barrier(x: jax.Array) -> jax.Array:
    return (x - 0.1 * jnp.log(x)).sum()


# ---------------------------------------------------------------------------------- bad batches


def skipped_on_the_host() -> None:
    w, derivative = W, jax.jit(jax.value_and_grad(loss_of))
    for x in batches():
        value, g = derivative(w, x)
        if math.isfinite(value):
            w -= 0.01 * g


def skipped_eagerly() -> None:
    w = W
    for x in batches():
        value, g = jax.value_and_grad(lambda w, x=x: loss_of(w, x))(w)
        if jnp.isfinite(value):
            w -= 0.01 * g


def skipped_inside() -> None:
    tx = optax.adam(0.1)

    @jax.jit
    def step(w: Any, state: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(loss_of)(w, x)
        updates, new = tx.update(g, state)
        keep = functools.partial(jax.tree.map, lambda a, b: jnp.where(jnp.isfinite(value), a, b))
        return keep(optax.apply_updates(w, updates), w), keep(new, state), value

    w, state = W, tx.init(W)
    for x in batches():
        w, state, _ = step(w, state, x)


def skipped_by_optax() -> None:
    tx = optax.apply_if_finite(optax.sgd(0.01), 5)

    @jax.jit
    def step(w: Any, state: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(loss_of)(w, x)
        updates, state = tx.update(g, state, w)
        return optax.apply_updates(w, updates), state, value

    w, state = W, tx.init(W)
    for x in batches():
        w, state, _ = step(w, state, x)


def repaired() -> None:
    tx = optax.chain(optax.zero_nans(), optax.sgd(0.01))
    w, state = W, tx.init(W)
    for x in batches():
        updates, state = tx.update(jax.grad(loss_of)(w, x), state)
        w = optax.apply_updates(w, updates)


def scaled_by_hand() -> None:
    w, scale = jnp.ones((4, 1), jnp.float16), 2.0**20
    derivative = jax.jit(jax.grad(lambda w, scale: jnp.mean((w * 2).astype(jnp.float32) ** 2) * scale))
    for _ in range(15):
        g = derivative(w, scale)
        if jnp.isfinite(g).all():
            w -= 0.01 * (g.astype(jnp.float32) / scale).astype(jnp.float16)
        else:
            scale /= 4


def line_search() -> None:
    f, g, x = jax.jit(barrier), jax.jit(jax.grad(barrier)), jnp.array([3.0])
    for _ in range(4):
        t = 10.0
        while not f(x - t * g(x)) < f(x):
            t /= 2
        x -= t * g(x)


def line_search_with_derivatives() -> None:
    f, x = jax.value_and_grad(barrier), jnp.array([3.0])
    for _ in range(4):
        value, g = f(x)
        t = 10.0
        while not f(x - t * g)[0] < value:
            t /= 2
        x -= t * g


def derivative_along_a_direction() -> None:
    x = jnp.ones(3)
    for i in range(4):
        bad = jnp.where(i == 1, jnp.nan, 1.0)
        value, slope = jax.jvp(lambda x, bad=bad: (bad * x**2).sum(), (x,), (jnp.ones(3),))
        if jnp.isfinite(value):
            x -= 0.01 * slope
    np.testing.assert_allclose(jax.linearize(jnp.sin, x)[1](x), jnp.cos(x) * x, rtol=1e-5)


def equinox_model() -> None:
    model = eqx.nn.Linear(3, 1, key=jax.random.key(0))

    @eqx.filter_jit
    def step(model: Any, x: Any) -> Any:
        value, g = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        good = jnp.isfinite(value)
        g = jax.tree.map(lambda a: jnp.where(good, -0.01 * a, 0), g)
        return eqx.apply_updates(model, g), value

    for x in batches():
        model, _ = step(model, x)


def nnx_model() -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.zero_nans(), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    metrics.compute()  # NaN: nothing was added yet

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> jax.Array:
        value, g = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, jax.tree.map(lambda a: -0.01 * a, g))
        return value

    for x in batches():
        step(model, optimizer, x)


def an_error_of_jax_that_is_caught() -> None:
    with jax.debug_nans(True):
        for x in (1.0, -1.0):
            with contextlib.suppress(FloatingPointError):
                jax.jit(lambda x: jnp.log(x))(x)


HEALTHY = (
    skipped_on_the_host, skipped_eagerly, skipped_inside, skipped_by_optax, repaired, scaled_by_hand,
    line_search, line_search_with_derivatives, derivative_along_a_direction, equinox_model, nnx_model,
    an_error_of_jax_that_is_caught,
)  # fmt: skip


# Four scripts skip or scale as others do.
LIKE_OTHERS = (skipped_on_the_host, skipped_by_optax, scaled_by_hand, equinox_model)


@pytest.mark.parametrize(
    "run", only([run for run in HEALTHY if run not in LIKE_OTHERS], HEALTHY), ids=lambda run: run.__name__
)
def test_a_script_that_copes_with_bad_numbers_is_healthy(session: Session, run: Callable[[], None]) -> None:
    run()
    session.outcome.exit_code = 0
    assert_healthy(session)


def test_a_script_that_is_bad_from_some_call_on_is_stopped_with_that_call(session: Session) -> None:
    def run() -> None:
        f = jax.jit(lambda x: jnp.log(x).sum())  # BAD
        for i in range(1000):
            assert i < 3 * MOST_IN_A_ROW
            f(jnp.full(2, 1.0 if i < 5 else -1.0))

    assert found(session, run).findings[0].operation == "log"
    assert session.outcome.failure is not None
    assert session.outcome.failure.step == 5


def test_a_chain_that_is_bad_in_each_of_its_parts_is_stopped_with_the_gradient(session: Session) -> None:
    """The parts of an optimizer reach the limit of bad results in a row before the derivative does."""
    derivative = jax.jit(jax.value_and_grad(lambda w: jnp.linalg.eigh(w @ w.T)[1].sum()))  # BAD
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))

    def run() -> None:
        w = jnp.eye(3)
        state = tx.init(w)
        for _ in range(MOST_IN_A_ROW + 5):
            _, g = derivative(w)
            updates, state = tx.update(g, state, w)
            w = optax.apply_updates(w, updates)

    assert found(session, run).findings[0].operation == "eigh"
    assert session.outcome.failure is not None
    assert session.outcome.failure.step == 0


def test_what_was_passed_by_is_named_with_its_line(session: Session) -> None:
    step = jax.jit(jax.value_and_grad(lambda w: jnp.log(w - 1.0).sum()))  # BAD
    for i in range(12):
        step(jnp.full(2, 0.5 if i == 4 else 2.0))
    session.outcome.exit_code = 0
    assert_healthy(session)
    assert "in call 4 (" in session.outcome.harmless
    assert "log gives NaN" in session.outcome.harmless
    assert "test_watching_healthy.py:" in session.outcome.harmless


def test_explanations_of_bad_calls_become_rare(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []
    original = programs.replay
    monkeypatch.setattr(programs, "replay", lambda *a, **k: replays.append(1) or original(*a, **k))
    f = jax.jit(lambda x: jnp.log(x).sum())
    for i in range(80):
        f(jnp.full(2, -1.0 if i % 2 else 1.0))
    f(jnp.ones(2))
    assert_healthy(session)
    assert len(replays) < 14


# ---------------------------------------------------------------------------------- metrics


def metrics_of(logits: jax.Array, x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    w = (y == 5).astype(x.dtype)  # an empty class
    return {
        "labels alone": (y * w).sum() / w.sum(),
        "data alone": (x * w[:, None]).sum() / w.sum(),
        "comparisons": ((logits.argmax(-1) == y) * w).sum() / w.sum(),
        "detached": (jax.lax.stop_gradient(jax.nn.softmax(logits)).max(-1) * w).sum() / w.sum(),
        "with a derivative": (jax.nn.softmax(logits).max(-1) * w).sum() / w.sum(),
        "infinite": jnp.log(w.sum()),
    }


X, Y = jnp.ones((4, 3)), jnp.zeros(4, jnp.int32)


def train(step: Callable[[Any, Any, Any], Any]) -> None:
    w = jnp.zeros((3, 2))
    for _ in range(3):
        w, _ = step(w, X, Y)


def loss_with_logits(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    logits = x @ w
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits


def beside_the_loss(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    (_, logits), g = jax.value_and_grad(loss_with_logits, has_aux=True)(w, x, y)
    return w - 0.1 * g, metrics_of(logits, x, y)


def in_a_scan(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    return jax.lax.scan(lambda w, _: beside_the_loss(w, x, y), w, None, length=2)


def in_a_function_inside(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    w, metrics = jax.jit(beside_the_loss)(w, x, y)
    return w, metrics


def with_vjp(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    _, pull, logits = jax.vjp(lambda w: loss_with_logits(w, x, y), w, has_aux=True)
    return w - 0.1 * pull(jnp.ones(()))[0], metrics_of(logits, x, y)


@pytest.mark.parametrize("step", [beside_the_loss, in_a_scan, in_a_function_inside, with_vjp])
def test_metrics_that_training_does_not_need_are_passed_by(
    session: Session, step: Callable[..., Any]
) -> None:
    train(jax.jit(step))
    assert_healthy(session)


def test_a_bad_evaluation_beside_good_training_is_passed_by(session: Session) -> None:
    evaluate = jax.jit(lambda w, x, y: metrics_of(x @ w, x, y))
    step = jax.jit(lambda w, x, y: beside_the_loss(w, x, y))
    train(step)
    for _ in range(3):
        evaluate(jnp.zeros((3, 2)), X, Y)
        train(step)
    evaluate(jnp.ones((3, 2)), X, Y)
    session.outcome.exit_code = 0
    assert_healthy(session)


def test_a_number_made_of_the_gradients_is_no_metric(session: Session) -> None:
    @jax.jit
    def step(w: jax.Array) -> Any:
        g = jax.grad(lambda w: (w**2).sum())(w)
        return w, jnp.log(-(g**2)).sum()  # BAD

    assert found(session, lambda: step(jnp.ones(3))).findings[0].operation == "log"


# ---------------------------------------------------------------------------------- errors

CHECKS = [name for name, member in vars(Judge).items() if inspect.isfunction(member) and name[0] != "_"]
INNER = ("suspicion", "floating_leaves", "named", "metrics_among", "sizes_of")
COURSE = ("note_good", "begins_badly")


@pytest.mark.parametrize("name", thinned([*CHECKS, *INNER, *COURSE]))
def test_an_error_of_the_watcher_leaves_the_script_alone(
    session: Session, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("of the watcher")

    owner: Any = Judge if name in CHECKS else Course if name in COURSE else judge
    monkeypatch.setattr(owner, name, broken)
    for run in (skipped_on_the_host, skipped_eagerly, repaired):
        run()
    train(jax.jit(beside_the_loss))
    if session.outcome.troubles:
        assert "RuntimeError: of the watcher" in session.outcome.trouble
    else:  # only a part of a report
        assert name in ("named", "floating_leaves", "metrics_of", "metrics_among", "apart", "doubt")


def test_the_scripts_own_errors_pass_unchanged(session: Session) -> None:
    def wrong(x: jax.Array) -> jax.Array:
        raise LookupError("mine")

    for call in (jax.jit(wrong), jax.grad(wrong), jax.vmap(wrong), jax.jacrev(wrong), jax.hessian(wrong)):
        with pytest.raises(LookupError, match="mine"):
            call(jnp.ones(3))
    with pytest.raises(LookupError, match="mine"):
        jax.jvp(wrong, (W,), (W,))
    assert session.outcome.troubles == 0


# ---------------------------------------------------------------------------------- what scripts can see


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_a_warning_names_the_line_that_it_would_name_without_watching(
    session: Session, transform: Any
) -> None:
    def warns(x: jax.Array) -> jax.Array:
        warnings.warn("mine", stacklevel=2)
        return (x * jnp.asarray(1.0, "float64")).sum()

    def seen(transform: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            transform(lambda x: warns(x))(jnp.ones(3))
        return [w.filename for w in caught]

    watched = getattr(jax, transform.__name__)
    assert watched is not transform
    assert seen(watched) == seen(transform)


def test_a_watched_jitted_function_can_be_copied_and_shown(session: Session) -> None:
    f = jax.jit(batches)
    assert copy.deepcopy(f) is f
    assert copy.copy(f) is f
    assert repr(f) == repr(f.inner)
    assert not hasattr(object.__new__(type(f)), "anything")


def test_settings_are_taken_by_position(session: Session) -> None:
    assert jax.grad(lambda z: z**2, 0, False, True)(1 + 2j) == 2 + 4j
    assert jax.jacrev(lambda z: z**2, 0, False, True)(1 + 2j) == 2 + 4j
    assert jax.jvp(lambda x: (x, 1.0), (1.0,), (2.0,), True)[1] == 2.0
    assert list(inspect.signature(jax.grad).parameters)[:2] == ["fun", "argnums"]


def test_a_replay_inside_a_transformation_is_refused_without_traced_arguments() -> None:
    def step() -> float:
        assert under_transformation()
        replay(lambda x: x, 1.0, gradients=False)
        return 1.0

    assert not under_transformation()
    with pytest.raises(TypeError, match="inside a transformation"):
        jax.jit(step)()
