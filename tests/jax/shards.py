"""Replays of ``shard_map`` and ``pmap``. ``test_tracing_shards.py`` runs them, with four devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from stablenum.diagnosis import Report
from stablenum_jax import replay
from stablenum_jax._diagnosis.replay.cells import Context
from stablenum_jax._diagnosis.replay.interpreter import Interpreter
from stablenum_jax._diagnosis.replay.shards import described
from tests.jax.replaying import check, marked_line

lax = jax.lax


def mesh_of(*axes: str, types: Any = AxisType.Auto) -> jax.sharding.Mesh:
    shape = (4,) if len(axes) == 1 else (2, 2)
    return jax.make_mesh(shape, axes, axis_types=(types,) * len(axes))


ONE, TWO = mesh_of("data"), mesh_of("data", "model")


def opened(fun: Callable[..., Any], *args: Any) -> Interpreter:
    """The interpreter after it has evaluated the function, whose results are those of JAX."""
    closed = jax.make_jaxpr(fun)(*args)
    run = Interpreter(opens_shards=True)
    given = [run.outside(a, "input") for a in jax.tree.leaves(args)]
    cells = run.run(closed.jaxpr, [run.constant(c) for c in closed.consts], given, Context())
    assert not run.closed, run.closed
    want = jax.tree.leaves(jax.jit(fun)(*args))
    for cell, b in zip(cells, want, strict=True):
        a = cell.data
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-6, atol=1e-6)
    return run


# ------------------------------------------------------------------------------------------- values

BOTH = ("data", "model")
COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda x: lax.psum(x, "data"),
    "psum over both axes": lambda x: lax.psum(x, BOTH),
    "psum of a number": lambda x: x * lax.psum(1, "model"),
    "psum of truth values": lambda x: x + lax.psum(x > 5.0, "data"),
    "pmean": lambda x: lax.pmean(x, "model"),
    "pmax": lambda x: lax.pmax(x, "data"),
    "pmin": lambda x: lax.pmin(x, BOTH),
    "all_gather": lambda x: lax.all_gather(x, "model").sum(0),
    "all_gather, tiled": lambda x: lax.all_gather(x, "model", axis=1, tiled=True)[:, ::2],
    "all_gather over both axes": lambda x: lax.all_gather(x, ("model", "data"))[1],
    "psum_scatter": lambda x: lax.psum_scatter(jnp.stack([x, 2 * x]), "model"),
    "psum_scatter, tiled": lambda x: lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "model", [(0, 1), (1, 0)]),
    "ppermute, not all": lambda x: lax.ppermute(x, "data", [(0, 1)]),
    "pshuffle": lambda x: lax.pshuffle(x, "data", [1, 0]),
    "all_to_all": lambda x: lax.all_to_all(jnp.stack([x, -x]), "data", 0, 0)[0],
    "all_to_all, tiled": lambda x: lax.all_to_all(x, "model", 0, 1, tiled=True),
    "all_to_all, other axis": lambda x: lax.all_to_all(jnp.stack([x, -x], 1), "data", 1, 0)[1],
    "axis_index": lambda x: x * lax.axis_index("data") + lax.axis_index(("model", "data")),
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_computes_what_jax_computes_and_so_does_its_derivative(name: str, checked: bool) -> None:
    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        y = COLLECTIVES[name](x * w)
        return lax.pcast(y, missing, to="varying") if checked and (missing := _missing(y)) else y

    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        specs = {"in_specs": (P(), P("data", "model")), "out_specs": P("data", "model")}
        return jax.shard_map(body, mesh=TWO, check_vma=checked, **specs)(w, x)

    x = jnp.arange(1.0, 33.0).reshape(4, 8)
    opened(fun, jnp.float32(1.5), x)
    # The maximum has no derivative in JAX, and that of the last one raises an error there.
    if name not in ("pmax", "pmin", "all_to_all, other axis"):
        opened(jax.grad(lambda w, x: (fun(w, x) ** 2).sum(), argnums=(0, 1)), jnp.float32(1.5), x)


def _missing(y: Any) -> tuple[str, ...]:
    return tuple(a for a in BOTH if a not in jax.typeof(y).mat.varying)


@pytest.mark.parametrize("operation", [lax.psum, lax.pmax, partial(lax.all_gather, axis=0)])
def test_groups_of_an_axis(operation: Callable[..., Any]) -> None:
    def body(x: jax.Array) -> jax.Array:
        return operation(x, "data", axis_index_groups=[[0, 3], [1, 2]])

    fun = jax.shard_map(body, mesh=ONE, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    opened(fun, jnp.arange(8.0))


def test_parts_are_split_and_joined_by_the_specs() -> None:
    """Several axes on one dimension, in another order than in the mesh; copies; keys of random generators."""

    def body(x: jax.Array, y: jax.Array, keys: jax.Array) -> Any:
        assert (x.shape, y.shape, keys.shape) == ((2, 1), (3, 2), (2,))
        number = lax.axis_index(("data", "model"))
        return x + y.sum() * number, 2 * y - number, jax.vmap(lambda k: jax.random.split(k)[0])(keys)

    specs = (P("model", "data"), P(None, ("model", "data")), P("model"))
    fun = jax.shard_map(body, mesh=TWO, in_specs=specs, out_specs=specs, check_vma=False)
    keys = jax.random.split(jax.random.key(0), 4)
    opened(fun, jnp.arange(8.0).reshape(4, 2), jnp.arange(24.0).reshape(3, 8), keys)


def test_axes_that_are_left_to_the_compiler() -> None:
    fun = jax.shard_map(
        lambda x: lax.psum(x * 2.0, "data"), mesh=TWO, in_specs=P("data"), out_specs=P(), axis_names={"data"}
    )
    run = opened(fun, jnp.arange(12.0).reshape(4, 3))
    assert described(list(run.shards)[:1], list(run.shards)) == "the shard data=0 (devices 0, 1)"


def test_a_shard_map_inside_a_shard_map() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return lax.psum(x, "model") + lax.psum(x, "data") * lax.axis_index("model")

    def outer(x: jax.Array) -> jax.Array:
        again = jax.shard_map(inner, in_specs=P(None, "model"), out_specs=P(None, "model"), check_vma=False,
                              axis_names={"model"})  # fmt: skip
        return again(x) + lax.psum(x, "data")

    fun = jax.shard_map(
        outer, mesh=TWO, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    run = opened(fun, jnp.arange(16.0).reshape(4, 4))
    assert sorted(len(m) for m in run.meshes) == [2, 2, 2]


@pytest.mark.parametrize("length", [4, 1000])
def test_loops_and_branches_of_shards(length: int) -> None:
    """A loop with a collective; one that shards leave at different times; a branch that some take."""

    def body(x: jax.Array) -> Any:
        c, ys = lax.scan(lambda c, x: (0.5 * c + lax.pmean(x, "data"), c), jnp.float32(0.0), x)
        d = lax.while_loop(lambda d: d < 50.0, lambda d: d * 1.5, x[0] + 1.0)
        n = lax.while_loop(lambda n: lax.psum(n, "data") < 20.0, lambda n: n + 1.0, x[0])
        e = lax.cond(lax.axis_index("data") < 2, lambda x: jnp.exp(-x), lambda x: x + 1.0, x[1])
        f = lax.scan(lambda c, x: (jnp.sin(c + x), None), x[0], x)[0]
        return c[None], ys, d[None], n[None], e[None], f[None]

    fun = jax.shard_map(body, mesh=ONE, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    opened(fun, jnp.arange(4.0 * length) / length)


def test_a_shard_map_inside_a_scan_and_a_checkpoint() -> None:
    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array) -> jax.Array:
            return lax.pmean(jnp.tanh(x * w).mean(), "data")

        def step(c: jax.Array, x: jax.Array) -> Any:
            return c + jax.shard_map(block, mesh=ONE, in_specs=P("data"), out_specs=P())(x), None

        return lax.scan(step, jnp.float32(0.0), xs)[0]

    opened(jax.value_and_grad(loss), jnp.float32(0.5), jnp.arange(24.0).reshape(3, 8) / 24)


def test_custom_derivatives_and_linear_algebra_of_a_shard() -> None:
    @jax.custom_vjp
    def twice(x: jax.Array) -> jax.Array:
        return 2 * x

    twice.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))

    def body(x: jax.Array) -> jax.Array:
        y = jnp.linalg.solve(jnp.eye(2) * 2 + x[:2, :2], twice(x[:2, 0]))
        z = jax.scipy.sparse.linalg.cg(lambda v: 2 * v, y)[0]
        return (y + z + jax.random.normal(jax.random.key(1), (2,)))[None]

    fun = jax.shard_map(body, mesh=ONE, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    opened(jax.grad(lambda x: fun(x).sum()), jnp.arange(24.0).reshape(8, 3) / 24)


def test_pmap() -> None:
    fun = jax.pmap(
        lambda w, x: (x * w - lax.pmean(x, "i"), lax.axis_index("i")), axis_name="i", in_axes=(None, 1)
    )
    opened(fun, jnp.float32(2.0), jnp.arange(12.0).reshape(3, 4))


def test_what_is_the_same_in_all_shards_is_computed_once() -> None:
    def body(w: jax.Array, x: jax.Array) -> jax.Array:
        return x * jnp.exp(w)

    fun = jax.shard_map(body, mesh=ONE, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    operations = [s.operation for s in opened(fun, jnp.ones(2), jnp.ones((4, 2))).trace.steps]
    assert (operations.count("exp"), operations.count("mul")) == (1, 4)


# ------------------------------------------------------------------------------------------ reports


def of_shard(report: Report, text: str, rank: int | None) -> None:
    first = report.findings[0]
    assert (first.shard, first.rank) == (text, rank), str(report)
    again = Report.from_dict(report.to_dict())
    assert again.to_dict() == report.to_dict()
    if text:
        assert f" on {text}" in str(report).splitlines()[0]
        assert text in report.to_html()


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("jitted", [True, False])
def test_the_shard_and_the_way_to_the_others_are_named(checked: bool, jitted: bool) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(w: jax.Array, x: jax.Array) -> jax.Array:
            y = jnp.log(x * w)  # BAD
            return lax.pmean(y.mean(), "data")

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        return jax.shard_map(body, mesh=ONE, check_vma=checked, **specs)(w, x)

    report = replay(jax.jit(loss) if jitted else loss, jnp.ones(3), jnp.ones((8, 3)).at[5, 1].set(0.0))
    check(report, test_the_shard_and_the_way_to_the_others_are_named, "domain", "log")
    of_shard(report, "the shard data=2 (device 2)", 2)
    line = marked_line(test_the_shard_and_the_way_to_the_others_are_named) + 1
    assert report.findings[0].spread == (f"psum (line {line})",)
    assert f"from the shard data=2 (device 2) it spread through psum (line {line})" in report.verdict.evidence


def test_a_derivative_belongs_to_the_forward_pass_of_its_own_shard() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(w: jax.Array, x: jax.Array) -> jax.Array:
            y = x * w
            root = jnp.sqrt(y)  # BAD
            return lax.pmean(jnp.where(y > 0, root, 0.0).mean(), "data")

        return jax.shard_map(body, mesh=ONE, in_specs=(P(), P("data")), out_specs=P())(w, x)

    report = replay(loss, jnp.ones(3), jnp.ones((8, 3)).at[3, 0].set(0.0))
    check(
        report,
        test_a_derivative_belongs_to_the_forward_pass_of_its_own_shard,
        "where_trap",
        "sqrt",
        "backward",
    )
    of_shard(report, "the shard data=1 (device 1)", 1)
    assert report.findings[0].inputs[0].zero == 1


def test_a_step_that_differentiates_inside() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def body(w: jax.Array, x: jax.Array) -> Any:
            loss, grad = jax.value_and_grad(lambda w: jnp.sqrt(x @ w).mean())(w)  # BAD
            return w - 0.1 * lax.pmean(grad, "data"), lax.pmean(loss, "data")

        return jax.shard_map(body, mesh=ONE, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)(w, x)

    report = replay(step, jnp.ones(3), jnp.ones((8, 3)).at[7].set(0.0))
    check(report, test_a_step_that_differentiates_inside, "boundary_derivative", "sqrt", "backward")
    of_shard(report, "the shard data=3 (device 3)", 3)


def test_one_fault_in_several_shards_is_one_finding() -> None:
    def loss(x: jax.Array) -> jax.Array:
        body = lambda x: lax.psum(jnp.log(x).sum(), BOTH)  # noqa: E731  # BAD
        return jax.shard_map(body, mesh=TWO, in_specs=P("data", "model"), out_specs=P())(x)

    x = jnp.ones((4, 4))
    row, corners = x.at[0].set(0.0), x.at[0, 0].set(0.0).at[3, 3].set(0.0)
    for bad, text in (
        (row, "the shards data=0 (devices 0, 1)"),
        (corners, "the shards data=0, model=0 (device 0); data=1, model=1 (device 3)"),
        (jnp.zeros((4, 4)), "every shard"),
    ):
        report = replay(loss, bad, gradients=False)
        check(report, test_one_fault_in_several_shards_is_one_finding, "domain", "log")
        of_shard(report, text, None)
        assert len(report.findings) == 1


def test_what_is_computed_from_parameters_alone_fails_in_every_shard() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(w: jax.Array, x: jax.Array) -> jax.Array:
            scale = jnp.log(w)  # BAD
            return lax.pmean((x * scale).mean(), "data")

        return jax.shard_map(body, mesh=ONE, in_specs=(P(), P("data")), out_specs=P())(w, x)

    report = replay(loss, jnp.zeros(3), jnp.ones((8, 3)))
    check(report, test_what_is_computed_from_parameters_alone_fails_in_every_shard, "domain", "log")
    of_shard(report, "every shard", None)


def test_a_sum_over_shards_that_overflows() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda x: lax.psum(x.sum(), "data"),  # BAD
            mesh=ONE, in_specs=P("data"), out_specs=P(),
        )(x)  # fmt: skip

    report = replay(loss, jnp.full(4, 2e38), gradients=False)
    check(report, test_a_sum_over_shards_that_overflows, "overflow", "sum")
    of_shard(report, "every shard", None)


def test_bad_data_is_in_the_shard_that_reads_it() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(w: jax.Array, x: jax.Array) -> jax.Array:
            return lax.pmean((x @ w).mean(), "data")  # BAD

        return jax.shard_map(body, mesh=ONE, in_specs=(P(), P("data")), out_specs=P())(w, x)

    x = jnp.ones((8, 3)).at[6, 0].set(jnp.nan)
    for given in (x, jax.device_put(x, NamedSharding(ONE, P("data")))):
        report = replay(loss, jnp.ones(3), given)
        check(report, test_bad_data_is_in_the_shard_that_reads_it, "batch", "input", "before")
        of_shard(report, "the shard data=3 (device 3)", 3)


def test_bad_data_of_pmap_is_read_on_a_line_of_the_function() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.pmean(x @ w, "i")  # BAD

    x = jnp.ones((4, 2, 3)).at[1, 0, 0].set(jnp.nan)
    report = replay(jax.pmap(step, axis_name="i", in_axes=(None, 0)), jnp.ones(3), x, gradients=False)
    check(report, test_bad_data_of_pmap_is_read_on_a_line_of_the_function, "batch", "input", "before")
    of_shard(report, "the shard i=1 (device 1)", 1)


def test_pmap_without_a_name_for_its_axis() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jnp.log(x)  # BAD

    report = replay(jax.pmap(step), jnp.ones((4, 2)).at[2, 0].set(0.0), gradients=False)
    check(report, test_pmap_without_a_name_for_its_axis, "domain", "log")
    of_shard(report, "the shard of device 2", 2)


def test_the_iteration_of_a_loop_in_a_shard() -> None:
    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        def body(w: jax.Array, xs: jax.Array) -> jax.Array:
            def step(c: jax.Array, x: jax.Array) -> Any:
                return c + jnp.log(x * w).sum(), None  # BAD

            return lax.pmean(lax.scan(step, jnp.float32(0.0), xs)[0], "data")

        return jax.shard_map(body, mesh=ONE, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)(w, xs)

    for rows in (8, 4000):
        xs = jnp.ones((rows, 3)).at[rows // 2 + 1, 1].set(0.0)
        report = replay(loss, jnp.ones(3), xs)
        check(report, test_the_iteration_of_a_loop_in_a_shard, "domain", "log")
        assert report.findings[0].where == "iteration 1 of scan"
        of_shard(report, "the shard data=2 (device 2)", 2)


def test_a_loop_around_a_shard_map() -> None:
    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        def body(w: jax.Array, x: jax.Array) -> jax.Array:
            return lax.pmean(jnp.log(x * w).mean(), "data")  # BAD

        inner = jax.shard_map(body, mesh=ONE, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        return lax.scan(lambda c, x: (c + inner(w, x), None), jnp.float32(0.0), xs)[0]

    report = replay(loss, jnp.float32(1.0), jnp.ones((3, 8)).at[1, 5].set(0.0))
    check(report, test_a_loop_around_a_shard_map, "domain", "log")
    assert report.findings[0].where == "iteration 1 of scan"
    of_shard(report, "the shard data=2 (device 2)", 2)


def test_a_shard_map_that_cannot_be_opened_is_one_step_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stablenum_jax._diagnosis.replay import collectives

    monkeypatch.delitem(collectives._RULES, "psum")

    def loss(x: jax.Array) -> jax.Array:
        body = lambda x: lax.psum(jnp.log(x).sum(), "data")  # noqa: E731
        return jax.shard_map(body, mesh=ONE, in_specs=P("data"), out_specs=P())(x)  # BAD

    report = replay(loss, jnp.ones(8).at[1].set(0.0), gradients=False)
    assert report.findings[0].operation == "shard_map"
    assert report.findings[0].place is not None
    line = marked_line(test_a_shard_map_that_cannot_be_opened_is_one_step_and_the_report_says_so)
    assert report.findings[0].place.line == line
    assert any(note.startswith("a shard_map was evaluated as one step") for note in report.notes)


def test_an_error_in_one_shard_ends_all_of_them() -> None:
    import threading

    class Failing(Interpreter):
        def compute(self, eqn: Any, inputs: list[Any], params: Any = None) -> list[Any]:
            if eqn.primitive.name == "sin":
                raise ZeroDivisionError("in a shard")
            return super().compute(eqn, inputs, params)

    def body(x: jax.Array) -> jax.Array:
        return jnp.sin(lax.psum(x, "data"))

    fun = jax.shard_map(body, mesh=ONE, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    run, before = Failing(opens_shards=True), threading.active_count()
    run.run(jax.make_jaxpr(fun)(jnp.ones(4)).jaxpr, [], [run.outside(jnp.ones(4), "input")], Context())
    assert run.closed == {"ZeroDivisionError: in a shard"}
    assert [s.operation for s in run.trace.steps] == ["shard_map"]
    assert threading.active_count() == before


# --------------------------------------------------------------------------- jit with sharded arrays


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_under_jit_the_devices_are_named_that_hold_the_bad_part(types: Any) -> None:
    mesh = mesh_of("data", "model", types=types)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = x @ w
        n = h / (h * h).sum(1, keepdims=True)  # BAD

        def step(c: jax.Array, row: jax.Array) -> Any:
            return 0.5 * c + (row * n).sum(), None

        return lax.scan(step, jnp.float32(0.0), jnp.ones((3, 1, 1)))[0]

    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.eye(4), NamedSharding(mesh, P(None, "model")))
        x = jax.device_put(jnp.ones((8, 4)).at[6].set(0.0), NamedSharding(mesh, P("data", None)))
        report = replay(jax.jit(loss), w, x)
    check(report, test_under_jit_the_devices_are_named_that_hold_the_bad_part, "domain", "div")
    of_shard(report, "the shards data=1 (devices 2, 3)", None)


def test_bad_parts_of_a_sharded_argument_are_named() -> None:
    x = jax.device_put(jnp.ones((8, 4)).at[3].set(jnp.nan), NamedSharding(ONE, P("data")))
    report = replay(lambda w, x: (x * w).sum(), jnp.ones(4), x)
    assert report.verdict.cause.value == "batch"
    of_shard(report, "the shard data=1 (device 1)", 1)


def test_an_array_that_all_devices_have_names_none() -> None:
    x = jax.device_put(jnp.zeros(4), NamedSharding(ONE, P()))
    of_shard(replay(lambda x: jnp.log(x).sum(), x), "", None)


def test_a_shard_map_under_a_mesh_with_explicit_axes() -> None:
    mesh = mesh_of("data", types=AxisType.Explicit)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        body = lambda w, x: jnp.log(x * w)  # noqa: E731  # BAD
        y = jax.shard_map(body, in_specs=(P(), P("data")), out_specs=P("data"))(w, x)
        return (y * x).sum()

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(8).at[5].set(0.0), NamedSharding(mesh, P("data")))
        report = replay(loss, jnp.float32(1.0), x)
    check(report, test_a_shard_map_under_a_mesh_with_explicit_axes, "domain", "log")
    of_shard(report, "the shard data=2 (device 2)", 2)
