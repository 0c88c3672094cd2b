"""Loops: the iteration is named, in short loops, which are opened, and in long ones, which run compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stablenum_jax import replay
from stablenum_jax._diagnosis.replay import control_flow
from stablenum_jax._diagnosis.replay.cells import Context
from stablenum_jax._diagnosis.replay.interpreter import Interpreter
from tests.jax.replaying import check


@pytest.mark.parametrize("length", [6, 3000])
def test_iteration_of_a_scan(length: int) -> None:
    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        def body(carry: jax.Array, x: jax.Array) -> Any:
            return carry + jnp.log(x * w).sum(), carry  # BAD

        return jax.lax.scan(body, jnp.float32(0.0), xs)[0]

    at = length - 2
    report = replay(loss, jnp.ones(3), jnp.ones((length, 3)).at[at, 1].set(0.0))
    check(report, test_iteration_of_a_scan, "domain", "log")
    assert report.findings[0].where == f"iteration {at} of scan"


@pytest.mark.parametrize("length", [6, 3000])
def test_derivative_in_a_scan(length: int) -> None:
    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        def body(carry: jax.Array, x: jax.Array) -> Any:
            root = jnp.sqrt(x * w)  # BAD
            return carry + jnp.where(x > 0, root, 0.0).sum(), None

        return jax.lax.scan(body, jnp.float32(0.0), xs)[0]

    report = replay(loss, jnp.ones(3), jnp.ones((length, 3)).at[2, 1].set(0.0))
    check(report, test_derivative_in_a_scan, "where_trap", "sqrt", "backward")
    assert report.findings[0].where == "iteration 2 of scan"


def test_reversed_scan_counts_as_the_user_does() -> None:
    def loss(xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (c + jnp.log(x), None), 0.0, xs, reverse=True)[0]  # BAD

    report = replay(loss, jnp.ones(5).at[1].set(0.0))
    check(report, test_reversed_scan_counts_as_the_user_does, "domain", "log")
    assert report.findings[0].where == "iteration 1 of scan"


def test_a_loop_of_training_steps() -> None:
    """The losses are -inf at one step and NaN at the next."""

    def train(w: jax.Array, xs: jax.Array) -> Any:
        def step(w: jax.Array, x: jax.Array) -> Any:
            loss, gradient = jax.value_and_grad(lambda w: jnp.log(w * x).sum())(w)  # BAD
            return w - gradient, loss

        return jax.lax.scan(step, w, xs)

    report = replay(train, jnp.ones(2), jnp.ones((6, 2)))
    check(report, test_a_loop_of_training_steps, "domain", "log")
    assert report.findings[0].where == "iteration 1 of scan"


def test_nested_scans() -> None:
    def loss(xs: jax.Array) -> jax.Array:
        def outer(c: jax.Array, row: jax.Array) -> Any:
            return jax.lax.scan(lambda c, x: (c + jnp.log(x), None), c, row)[0], None  # BAD

        return jax.lax.scan(outer, jnp.float32(0.0), xs)[0]

    report = replay(loss, jnp.ones((3, 4)).at[1, 2].set(0.0))
    check(report, test_nested_scans, "domain", "log")
    assert report.findings[0].where == "iteration 1 of scan, iteration 2 of scan"


@pytest.mark.parametrize("opened", [0, 2000])
def test_iteration_of_a_while_loop(opened: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_flow, "OPENED_EQUATIONS", opened)

    def run(x: jax.Array) -> jax.Array:
        def body(c: Any) -> Any:
            return c[0] + 1, c[1] * 1e8  # BAD

        return jax.lax.while_loop(lambda c: c[0] < 10, body, (0, x))[1]

    report = replay(run, jnp.float32(1.0), gradients=False)
    check(report, test_iteration_of_a_while_loop, "overflow", "mul")
    assert report.findings[0].where == "iteration 4 of while"


def test_fori_loop_with_gradient() -> None:
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 9, lambda i, c: c * 1e8, x)  # BAD

    report = replay(run, jnp.float32(1.0))
    check(report, test_fori_loop_with_gradient, "overflow", "mul")


@pytest.mark.parametrize("opened", [0, 2000])
@pytest.mark.parametrize("reverse", [False, True])
def test_opened_and_compiled_loops_compute_the_same(
    opened: int, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against JAX's own scan: carries, stacked outputs, keys, empty loops."""
    monkeypatch.setattr(control_flow, "OPENED_EQUATIONS", opened)

    def run(w: jax.Array, xs: jax.Array, key: jax.Array) -> Any:
        def body(c: Any, x: jax.Array) -> Any:
            h, k = c
            k, now = jax.random.split(k)
            h = jnp.tanh(h * w + x) + jax.random.normal(now, h.shape)
            return (h, k), (h.sum(), now)

        return jax.lax.scan(body, (jnp.zeros(3), key), xs, reverse=reverse)

    for length in (0, 1, 7):
        args = (jnp.arange(3.0), jnp.ones((length, 3)), jax.random.key(0))
        closed, shape = jax.make_jaxpr(run, return_shape=True)(*args)
        interpreter = Interpreter()
        cells = interpreter.run(closed.jaxpr, [], [interpreter.outside(a, "input") for a in args], Context())
        got = jax.tree.unflatten(jax.tree.structure(shape), [c.data for c in cells])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(run(*args)), strict=True):
            if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


@pytest.mark.parametrize(("opened", "compiled"), [(12, 0), (11, 5)])
def test_a_loop_is_opened_whole_if_its_equations_are_not_more_than_the_limit(
    opened: int, compiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six iterations of two equations; of a longer loop only the first iteration is opened."""
    from stablenum_jax._diagnosis.replay.cells import Context
    from stablenum_jax._diagnosis.replay.interpreter import Interpreter

    monkeypatch.setattr(control_flow, "OPENED_EQUATIONS", opened)

    def run(xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (c * x + 1.0, None), jnp.float32(0.0), xs)[0]

    xs = jnp.ones(6)
    interpreter = Interpreter()
    interpreter.run(jax.make_jaxpr(run)(xs).jaxpr, [], [interpreter.outside(xs, "input")], Context())
    operations = [step.operation for step in interpreter.trace.steps]
    assert operations.count("scan") == compiled
    assert operations.count("mul") == operations.count("add") == 6 - compiled


def test_masks_in_a_long_scan_are_legitimate() -> None:
    mask = jnp.triu(jnp.full((4, 4), -jnp.inf), 1)

    def loss(x: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> Any:
            return jax.nn.softmax(c @ c.T + mask) @ c, (c @ c.T + mask).max()

        y, _ = jax.lax.scan(body, x, None, length=400)
        return y.sum()

    assert replay(loss, jnp.eye(4)).ok


def test_few_iterations_of_a_long_loop_are_opened_for_an_inf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask puts an inf into the result of every iteration: the first and eight more are opened."""
    monkeypatch.setattr(control_flow, "OPENED_EQUATIONS", 0)

    def run(x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, _: (c, jnp.where(c > 0, c, -jnp.inf)), x, None, length=20)

    x = jnp.zeros(2)
    interpreter = Interpreter()
    interpreter.run(jax.make_jaxpr(run)(x).jaxpr, [], [interpreter.outside(x, "input")], Context())
    opened = [step.where for step in interpreter.trace.steps if step.operation == "gt"]
    assert opened == [f"iteration {i} of scan" for i in range(9)]
