"""JAX operations outside of every function that is jitted or differentiated, as ``explain`` watches them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stablenum.diagnosis import Cause
from stablenum.diagnosis.watch.session import Session
from tests.jax.watched import assert_healthy, found

X = jnp.array([[1.0, 2.0], [3.0, 4.0]])


def loss(w: jax.Array) -> jax.Array:
    return jnp.mean((X @ w) ** 2)


def quasi_newton() -> None:
    w = step = jnp.zeros(2)
    curvature = 1.0 / jnp.dot(step, step)  # BAD
    jax.jit(loss)(w + curvature * step)


def adam_from_step_0() -> None:
    params, moments = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    for t in range(3):
        gradients = jax.grad(lambda p: loss(p["w"]))(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, gradients)
        corrected = jax.tree.map(lambda m, t=t: m / (1 - 0.9**t), moments)  # BAD
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, corrected)


def rate_read_as_a_number() -> None:
    w = jnp.ones(2)
    rate = float(jnp.sqrt(jnp.min(w) - 2.0))  # BAD
    jax.grad(loss)(w - rate * w)


def through_shapes() -> None:
    bad = jnp.log(jnp.array([[-1.0, 1.0]]))  # BAD
    w = jnp.zeros((2, 2)).at[0].set(bad[0]).T.reshape(-1)[:2]
    jax.value_and_grad(loss)(jnp.concatenate([w[:1], w[1:]]))


def eager_loop() -> None:
    def body(i: Any, x: jax.Array) -> jax.Array:
        return x / (x - 1.0)  # BAD

    w = jax.lax.fori_loop(0, 3, body, jnp.array([1.0, 3.0]))
    jax.grad(loss)(w - w)


def checked_by_the_script() -> None:
    scores = jnp.arccos(jnp.array([0.5, 1.5]))  # BAD
    assert bool(jnp.isfinite(scores).all())


def checked_by_name() -> None:
    scores = jnp.power(jnp.array([-0.5, 1.5]), 0.3)  # BAD
    if jnp.isnan(scores.sum()):
        raise ValueError("the score is NaN")


def state_of_a_sampler() -> jax.Array:
    x = jnp.array([0.5, 2.0])
    for _ in range(6):
        x = x + 0.1 * jnp.log(x - 1.0)  # BAD
    return x


def scaler_that_was_saved_in_float16() -> None:
    mean = jnp.asarray(np.array([np.inf], np.float32))
    scaled = (jnp.ones(1) - mean) / mean
    jax.grad(loss)(jnp.ones(2) * scaled)


def exponential_under_a_mask() -> None:
    mask = jnp.tril(jnp.ones((2, 2), bool))

    @jax.jit
    def step(w: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: jnp.where(mask, jnp.exp(w * X * 50.0 * ~mask), 0.0).sum())(w)
        return w - gradient

    step(jnp.ones(2))


FAILING = (
    quasi_newton, adam_from_step_0, rate_read_as_a_number, through_shapes, eager_loop, checked_by_the_script,
    checked_by_name, state_of_a_sampler,
)  # fmt: skip


@pytest.mark.parametrize("script", FAILING)
def test_the_operation_that_made_the_first_bad_number_is_named(
    session: Session, script: Callable[[], Any]
) -> None:
    kept: list[Any] = []

    def run() -> None:
        try:
            kept.append(script())
        except (AssertionError, ValueError) as error:
            kept.append(error)
            for told in session.on_error:
                told(error)

    report = found(session, run)
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# BAD"), str(report)
    assert report.verdict.cause is Cause.DOMAIN, str(report)
    assert not any(s.name for s in first.inputs)


def test_an_input_that_was_bad_before_an_operation_is_placed_where_it_is_read(session: Session) -> None:
    report = found(session, scaler_that_was_saved_in_float16)
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code == "scaled = (jnp.ones(1) - mean) / mean"
    assert str(first).endswith(": input holds inf before the step")
    assert report.verdict.cause is Cause.BATCH


def test_a_discarded_overflow_in_a_whole_step_is_a_trap(session: Session) -> None:
    report = found(session, exponential_under_a_mask)
    assert (report.findings[0].operation, report.verdict.cause) == ("exp", Cause.WHERE_TRAP), str(report)


def test_the_report_shows_the_calls_and_the_lines_around(session: Session) -> None:
    report = found(session, quasi_newton)
    first = report.findings[0]
    assert [place.function for place in first.frames][-1] == "quasi_newton"
    assert len(first.around) == 3
    assert session.outcome.failure is not None
    assert str(session.outcome.failure) == "the result of div is not finite before call 0"


def masked_logarithm() -> None:
    counts = jnp.array([0.0, 2.0])
    w = jnp.where(counts > 0, jnp.log(counts), 0.0)
    jax.grad(loss)(w)


def mask_of_infinities() -> None:
    mask = jnp.log(jnp.tril(jnp.ones((2, 2))))
    jax.grad(lambda w: jax.nn.softmax(X * w + mask).max())(jnp.ones(2))


def metric_of_an_empty_class() -> list[jax.Array]:
    metrics = []
    for _ in range(5):
        metrics.append(jnp.zeros(()) / jnp.zeros(()))
        jax.grad(loss)(jnp.ones(2))
    return [*metrics, jnp.nanmean(jnp.stack(metrics))]


def repaired_gradients() -> None:
    w = jnp.ones(2)
    for _ in range(4):
        gradients = jnp.nan_to_num(jnp.zeros(2) / jnp.zeros(2))
        w = w - gradients
        jax.grad(loss)(w)


def missing_values_written_by_the_script() -> list[jax.Array]:
    kept = [jnp.zeros(()) / jnp.zeros(())]
    for _ in range(4):
        x = jnp.ones((2, 2)).at[0, 0].set(jnp.nan)
        w = jax.grad(lambda w, x=x: jnp.sum((jnp.nan_to_num(x) @ w) ** 2))(jnp.ones(2))
        assert w.shape == (2,)
    return kept


def best_so_far() -> None:
    best = jnp.inf
    for _ in range(4):
        best = jnp.minimum(best, jax.jit(loss)(jnp.ones(2)))


def factorization_that_is_tried_again() -> None:
    jitter, matrix = 0.0, jnp.array([[1.0, 2.0], [2.0, 1.0]])
    while True:
        factor = jnp.linalg.cholesky(matrix + jitter * jnp.eye(2))
        if not jnp.isnan(factor).any():
            break
        jitter += 1.0
    jax.grad(loss)(factor[0])


def start_inside_the_support() -> None:
    def density(x: jax.Array) -> jax.Array:
        return jnp.where(x > 0, -x, -jnp.inf)

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return x + 0.01 * jax.grad(density)(x)

    for start in (-2.0, -1.0, 1.0):
        if jnp.isfinite(jax.value_and_grad(density)(jnp.asarray(start))[0]):
            break
    x = jnp.asarray(start)
    for _ in range(5):
        x = step(x)


HEALTHY = (
    masked_logarithm, missing_values_written_by_the_script, mask_of_infinities, metric_of_an_empty_class,
    repaired_gradients, best_so_far, factorization_that_is_tried_again, start_inside_the_support,
)  # fmt: skip


@pytest.mark.parametrize("script", HEALTHY)
def test_what_the_script_copes_with_is_passed_by(session: Session, script: Callable[[], Any]) -> None:
    kept = script()
    session.outcome.exit_code = 0
    assert_healthy(session)
    del kept


@pytest.mark.usefixtures("session")
def test_operations_do_what_they_did() -> None:
    x = np.array([1.0, -2.0], np.float32)
    assert pickle.loads(pickle.dumps(jnp.exp)) is jnp.exp
    assert jnp.add.reduce(x) == -1.0
    assert jax.grad(lambda y: jax.lax.reduce(y, 0.0, jax.lax.add, (0,)))(x).tolist() == [1.0, 1.0]
    assert jax.jit(jnp.abs)(x).tolist() == [1.0, 2.0]
    assert jax.vmap(jax.nn.relu)(x).tolist() == [1.0, 0.0]
    assert jnp.exp.__doc__
    y = jnp.asarray(x)
    assert (y.T + 1 - y).sum() == 2.0
    assert y.at[0].set(5.0).tolist() == [5.0, -2.0]
    assert (y == y).all()
    with pytest.raises(TypeError):
        y + "1"


@pytest.mark.usefixtures("session")
def test_an_operand_of_another_class_is_asked() -> None:
    class Unit:
        def __radd__(self, other: object) -> str:
            return "unit"

        __array_priority__ = 1000

    assert X + Unit() == "unit"  # type: ignore[operator, comparison-overlap]


def test_a_state_that_is_thrown_away_did_no_harm(session: Session) -> None:
    state_of_a_sampler()
    session.outcome.exit_code = 0
    assert_healthy(session)


def test_a_nan_that_the_script_writes_is_not_the_one_that_it_has_read(session: Session) -> None:
    def run() -> None:
        metric = float(jnp.zeros(()) / jnp.zeros(()))
        assert metric != metric
        x = jnp.ones(2).at[0].set(jnp.nan)
        jax.grad(loss)(x)  # BAD

    report = found(session, run)
    assert report.findings[0].operation != "div", str(report)


# ---------------------------------------------------------------------------------- NaN from the script


def set_in_one_batch() -> None:
    derivative = jax.jit(jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2)))
    for i in range(4):
        x = X if i < 3 else X.at[0, 1].set(jnp.nan)  # BAD
        derivative(jnp.ones(2), x)


def set_in_the_data() -> None:
    data = jnp.ones((8, 2))
    data = data.at[7, 0].set(float("nan"))  # BAD
    data = (data - data[0]).at[0].set(1.0)
    for i in range(4):
        jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(jnp.ones(2), data[2 * i : 2 * i + 2])


def chosen_by_where() -> None:
    x = jnp.where(X > 3.0, jnp.nan, X)  # BAD
    jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)))(jnp.ones(2), x)


def set_in_a_jitted_step() -> None:
    @jax.jit
    def step(w: jax.Array, i: int) -> jax.Array:
        spoiled = X.at[0, 1].set(jnp.nan)  # BAD
        x = jnp.where(i == 3, spoiled, X)
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    w = jnp.ones(2)
    for i in range(5):
        w = step(w, i)


@pytest.mark.parametrize(
    "script",
    [set_in_one_batch, set_in_the_data, chosen_by_where, set_in_a_jitted_step],
    ids=lambda f: f.__name__,
)
def test_a_nan_that_the_script_writes_is_bad_data(session: Session, script: Callable[[], Any]) -> None:
    report = found(session, script)
    first = report.findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# BAD"), str(report)
    assert (report.verdict.cause, first.phase, first.kind) == (Cause.BATCH, "before", "nan"), str(report)


def test_an_array_of_numpy_into_which_the_script_writes_a_nan_is_bad_data(session: Session) -> None:
    def run() -> None:
        x = np.ones((4, 2), np.float32)
        x[0, 0] = np.nan
        jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)))(jnp.ones(2), x)

    assert found(session, run).verdict.cause is Cause.BATCH


def test_a_number_that_is_written_after_a_bad_operation_leaves_its_origin(session: Session) -> None:
    def run() -> None:
        x = jnp.log(X - 1.5)  # BAD
        x = x.at[1, 1].set(0.0)
        jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)))(jnp.ones(2), x)

    report = found(session, run)
    first = report.findings[0]
    assert first.place is not None
    assert (first.operation, first.place.code[-5:]) == ("log", "# BAD"), str(report)


# ---------------------------------------------------------------------------- infinities from the script


def infinity_in_the_data_beside_a_mask() -> None:
    mask = jnp.zeros((8, 2)).at[0, 0].set(-jnp.inf)
    data = jnp.ones((8, 2)).at[7, 0].set(jnp.inf)  # BAD
    for i in range(0, 8, 2):
        jax.value_and_grad(lambda w, x, m: jnp.mean((jnp.exp(m) * x * w - x) ** 2))(
            jnp.ones(2), data[i : i + 2], mask[i : i + 2]
        )


def bound_that_is_taken_from_itself() -> None:
    bound = jnp.full(2, jnp.inf)
    left = bound - bound  # BAD
    jax.value_and_grad(lambda w, x: (x * w).sum())(jnp.ones(2), left)


@pytest.mark.parametrize("script", [infinity_in_the_data_beside_a_mask, bound_that_is_taken_from_itself])
def test_the_line_is_named_that_writes_an_infinity_or_makes_nan_of_it(
    session: Session, script: Callable[[], None]
) -> None:
    first = found(session, script).findings[0]
    assert first.place is not None
    assert first.place.code.endswith("# BAD"), str(first)
