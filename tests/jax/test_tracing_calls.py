"""The replay opens calls: jit, cond, remat, custom derivatives, vmap; any other call is one step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from stablenum_jax import replay
from tests.jax.replaying import check


def test_nested_jit() -> None:
    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return jnp.log(x)  # BAD

    report = replay(jax.jit(lambda x: inner(2.0 * x).sum()), jnp.zeros(3))
    check(report, test_nested_jit, "domain", "log")
    assert [f.function for f in report.findings[0].frames][-1] == "inner"


def test_branch_that_is_taken() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jax.lax.cond(
            x.sum() > 0,
            lambda x: jnp.log(x - 1.0).sum(),  # BAD
            lambda x: x.sum(),
            x,
        )

    check(replay(loss, jnp.ones(3)), test_branch_that_is_taken, "domain", "log")
    assert replay(loss, -jnp.ones(3)).ok


def test_switch_under_vmap_is_a_selection() -> None:
    def loss(x: jax.Array) -> jax.Array:
        def one(v: jax.Array) -> jax.Array:
            return jax.lax.cond(v > 0, lambda v: jnp.log(v), lambda v: v, v)

        return jax.vmap(one)(x).sum()

    x = jnp.array([1.0, 0.0])
    assert jnp.isfinite(jax.grad(loss)(x)).all()  # the derivative of log is selected away as well
    assert replay(loss, x).ok


def test_remat() -> None:
    @jax.checkpoint
    def block(x: jax.Array) -> jax.Array:
        return jnp.sqrt(x).sum()  # BAD

    report = replay(lambda x: 2.0 * block(x), jnp.zeros(3))
    check(report, test_remat, "boundary_derivative", "sqrt", "backward")


def test_remat_of_a_forward_failure() -> None:
    @jax.checkpoint
    def block(x: jax.Array) -> jax.Array:
        return jnp.log(x).sum()  # BAD

    check(replay(block, jnp.zeros(3)), test_remat_of_a_forward_failure, "domain", "log")


def test_custom_jvp_of_the_user() -> None:
    @jax.custom_jvp
    def f(x: jax.Array) -> jax.Array:
        return jnp.exp(x)

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        return f(x), t / x  # BAD

    report = replay(lambda x: f(x).sum(), jnp.zeros(3))
    check(report, test_custom_jvp_of_the_user, "domain", "div", "backward")
    assert not report.findings[0].derivative


def test_custom_vjp_of_the_user() -> None:
    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return jnp.exp(x)

    def forward(x: jax.Array) -> Any:
        return f(x), x

    def backward(x: jax.Array, g: jax.Array) -> Any:
        return (g / x,)  # BAD

    f.defvjp(forward, backward)
    report = replay(lambda x: f(x).sum(), jnp.zeros(3))
    check(report, test_custom_vjp_of_the_user, "domain", "div", "backward")
    assert not report.findings[0].derivative


@pytest.mark.parametrize("gradients", [True, False])
def test_forward_pass_of_a_custom_vjp(gradients: bool) -> None:
    @jax.custom_vjp
    def f(x: jax.Array) -> jax.Array:
        return jnp.exp(x)  # BAD

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * x,))
    report = replay(lambda x: f(x).sum(), jnp.full(3, 100.0), gradients=gradients)
    check(report, test_forward_pass_of_a_custom_vjp, "overflow", "exp")


def test_vmap() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: jnp.log(row).sum())(x).sum()  # BAD

    check(replay(loss, jnp.array([[1.0, 2.0], [0.0, 1.0]])), test_vmap, "domain", "log")


def test_gradient_of_a_gradient() -> None:
    def penalty(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.grad(lambda y: jnp.sqrt(y).sum())(x) ** 2)  # BAD

    report = replay(penalty, jnp.zeros(3))
    check(report, test_gradient_of_a_gradient, "boundary_derivative", "sqrt", "backward")


def test_function_that_begins_with_moves_inside_a_gradient_of_a_gradient() -> None:
    """``cumprod`` slices before it multiplies, and its products overflow in the forward pass."""

    def penalty(x: jax.Array) -> jax.Array:
        return jax.grad(lambda y: jnp.cumprod(y).sum())(x).sum()  # BAD

    report = replay(penalty, jnp.full(3, 1e30))
    test = test_function_that_begins_with_moves_inside_a_gradient_of_a_gradient
    check(report, test, "overflow", "cumprod")


def test_shard_map() -> None:
    """Of one shard, which is not named; ``test_tracing_shards.py`` has more of them."""
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(lambda x: jnp.log(x), mesh=mesh, in_specs=P("i"), out_specs=P("i"))  # BAD

    def loss(x: jax.Array) -> jax.Array:
        return sharded(x).sum()

    report = replay(loss, jnp.zeros(3))
    check(report, test_shard_map, "domain", "log")
    assert report.findings[0].shard == ""
    assert replay(loss, jnp.ones(3)).ok


def test_callback_is_one_step() -> None:
    def host(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(x > 0, x, np.nan).astype(np.float32)

    def loss(x: jax.Array) -> jax.Array:
        y = jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # BAD
        return y.sum()

    report = replay(loss, jnp.zeros(3), gradients=False)
    check(report, test_callback_is_one_step, "unknown", "callback")


def test_prints_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(x: jax.Array) -> jax.Array:
        jax.debug.print("x is {}", x)
        return jnp.log(x).sum()

    report = replay(loss, jnp.zeros(1))
    jax.effects_barrier()
    assert "x is" not in capsys.readouterr().out
    assert any("left out" in note for note in report.notes)


@pytest.mark.parametrize(
    ("function", "x", "operation", "phase"),
    [
        (lambda x: jnp.linalg.norm(x), jnp.zeros(3), "norm", "backward"),
        (lambda x: jnp.std(x), jnp.ones(3), "std", "backward"),
        (lambda x: jnp.var(x, ddof=1), jnp.ones(1), "var", "forward"),
        (lambda x: jnp.mean(x[:0]), jnp.ones(3), "mean", "forward"),
        (lambda x: (x**0.5).sum(), jnp.zeros(3), "pow", "backward"),
        (lambda x: jnp.sum(1.0 / x), jnp.zeros(3), "div", "forward"),
        (lambda x: jnp.sum(jnp.reciprocal(x)), jnp.zeros(3), "reciprocal", "forward"),
        (lambda x: jnp.sum(x @ x), jnp.full((2, 2), 1e30), "matmul", "forward"),
        (lambda x: jax.nn.softmax(x).sum(), jnp.full(3, -jnp.inf), "softmax", "forward"),
        (lambda x: jax.nn.log_softmax(x).sum(), jnp.full(3, -jnp.inf), "log_softmax", "forward"),
        (lambda x: jnp.arccos(x).sum(), jnp.ones(2), "acos", "backward"),
        (lambda x: optax.losses.cosine_similarity(x, x).sum(), jnp.zeros(3), "cosine_similarity", "forward"),
        (lambda x: optax.tree.norm({"x": x}), jnp.zeros(3), "norm", "backward"),
        (lambda x: jnp.linalg.cholesky(x).sum(), -jnp.eye(2), "cholesky", "forward"),
    ],
)
def test_operations_have_familiar_names(function: Any, x: jax.Array, operation: str, phase: str) -> None:
    first = replay(function, x).findings[0]
    assert (first.operation, first.phase) == (operation, phase)


def test_two_functions_on_one_line_are_distinguished() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (jnp.sqrt(x) + jnp.log(x + 1.0) + jnp.exp(x)).sum()  # BAD

    report = replay(loss, jnp.zeros(3))
    check(report, test_two_functions_on_one_line_are_distinguished, "boundary_derivative", "sqrt", "backward")


def test_equal_lines_of_two_functions_are_distinguished() -> None:
    """JAX caches traces, and code objects of equal content are equal: the second function must be named."""
    sources = dict.fromkeys("ab", "import jax.numpy as jnp\n\ndef loss(x):\n    return jnp.log(x).sum()\n")
    for name, source in sources.items():
        space: dict[str, Any] = {}
        exec(compile(source, f"/nowhere/{name}.py", "exec"), space)
        place = replay(space["loss"], jnp.zeros(2)).findings[0].place
        assert place is not None
        assert (place.file, place.line) == (f"/nowhere/{name}.py", 4)


def test_named_scopes_give_the_module() -> None:
    def loss(x: jax.Array) -> jax.Array:
        with jax.named_scope("head"):
            return jnp.log(x).sum()

    assert replay(loss, jnp.zeros(2)).findings[0].module == "head"
