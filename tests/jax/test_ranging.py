"""``range_report`` in JAX: which module a value belongs to, exact gradients, and nothing changed."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import Primitive

import stablenum_jax
from stablenum_jax import range_report

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)


def rows(report):
    return {(row.kind, row.module): row for row in report.rows}


def modules(report, kind="activation"):
    return {row.module for row in report.rows if row.kind == kind}


def scoped(w, x):
    with jax.named_scope("a"):
        with jax.named_scope("inside"):
            h = x @ w
        h = jnp.tanh(h)
    with jax.named_scope("b"):
        y = h * h * 3.0
    return (y + h).sum()


def test_a_value_is_counted_in_the_module_it_leaves_with_its_whole_gradient():
    w = jnp.eye(4) * 0.5
    found = rows(range_report(scoped, w, X))
    h = jnp.tanh(X @ w)
    assert found["activation", "a"].amax == pytest.approx(float(jnp.abs(h).max()))
    assert found["activation", "a.inside"].amax == pytest.approx(float(jnp.abs(X @ w).max()))
    assert found["activation", "b"].elements == h.size
    # h is read in b and outside.
    assert found["activation gradient", "a"].amax == pytest.approx(float(jnp.abs(6 * h + 1).max()), rel=1e-5)
    assert found["activation gradient", "b"].amax == 1.0
    grad = jax.grad(scoped)(w, X)
    assert found["gradient", ""].amax == pytest.approx(float(jnp.abs(grad).max()), rel=1e-5)


def test_the_name_of_an_outermost_scope_is_kept_as_it_was_written():
    def run(w, x):
        with jax.named_scope(".head"):
            return (x * w).sum()

    assert modules(range_report(run, jnp.ones(4), X)) == {".head"}


def body(c, w):
    with jax.named_scope("step"):
        c = jnp.tanh(c @ w)
    return c * 2, None


def scanned(ws, x):
    return jax.lax.scan(body, x, ws)[0].sum()


def branched(ws, x):
    with jax.named_scope("around"):
        return jax.lax.cond(x.sum() > 0, lambda: body(x, ws[0])[0] * 2, lambda: x).sum()


def rematted(ws, x):
    for w in ws:
        x = jax.checkpoint(lambda x, w: body(x, w)[0])(x, w)
    return x.sum()


def called(ws, x):
    for w in ws:
        x = jax.jit(body)(x, w)[0]
    return x.sum()


@pytest.mark.parametrize("fun", [scanned, rematted, called])
def test_loops_checkpoints_and_calls_are_opened(fun):
    ws = jnp.stack([jnp.eye(4), 2 * jnp.eye(4), 3 * jnp.eye(4)])
    report = range_report(fun, ws, X)
    assert report.notes == ()
    assert rows(report)["activation", "step"].elements == 3 * X.size
    assert rows(report)["activation gradient", "step"].elements == 3 * X.size
    grad = jax.grad(fun)(ws, X)
    assert rows(report)["gradient", ""].amax == pytest.approx(float(jnp.abs(grad).max()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "parameter"), [("remat", "jaxpr"), ("call", "call_jaxpr"), ("eval_jaxpr", "jaxpr")]
)
def test_calls_by_the_names_of_other_versions_of_jax_are_opened(name, parameter):
    # These primitives cannot be evaluated, so the report must look inside.
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(
        lambda *_, **params: [jax.core.ShapedArray(v.shape, v.dtype) for v in params[parameter].out_avals]
    )
    inner = jax.make_jaxpr(lambda x, w: body(x, w)[0])(X, jnp.eye(4))

    def fun(w, x):
        return primitive.bind(x, w, **{parameter: inner})[0].sum()

    report = range_report(fun, 0.5 * jnp.eye(4), X)
    assert report.notes == ()
    assert rows(report)["activation", "step"].elements == X.size
    plain = jax.grad(lambda w: body(X, w)[0].sum())(0.5 * jnp.eye(4))
    assert rows(report)["gradient", ""].amax == pytest.approx(float(jnp.abs(plain).max()), rel=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_branch_that_is_taken_is_opened(sign):
    ws, x = jnp.stack([jnp.eye(4)]), sign * jnp.abs(X)
    report = range_report(branched, ws, x)
    assert ("around.step" in modules(report)) is (sign > 0)
    expected = float(jnp.abs(jax.grad(branched)(ws, x)).max())
    assert rows(report)["gradient", ""].amax == pytest.approx(expected, rel=1e-5)


def test_calls_that_are_not_opened_are_reported():
    @jax.custom_vjp
    def own(x):
        with jax.named_scope("hidden"):
            return x * 1e6

    own.defvjp(lambda x: (own(x), None), lambda _, g: (g * 7.0,))

    def loss(w, x):
        with jax.named_scope("around"):
            return own(x * w).sum()

    report = range_report(loss, jnp.ones(()), X)
    assert report.notes == ("Modules inside custom_vjp_call were not looked at one by one.",)
    assert modules(report) == {"around"}
    assert rows(report)["gradient", ""].amax == pytest.approx(abs(7 * float(X.sum())), rel=1e-5)


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4, name="d")
        return layer(layer(x))


class TwiceNnx(nnx.Module):
    def __init__(self):
        self.d = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.d(self.d(x))


def test_a_module_that_is_called_twice_in_a_row_counts_twice():
    linen = Twice()
    params = linen.init(jax.random.key(0), X)
    for fun, given in ((linen.apply, params), (lambda net, x: net(x), TwiceNnx())):
        found = rows(range_report(fun, given, X))
        assert found["activation", "d"].elements == 2 * X.size
        assert found["activation", ""].elements == X.size


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        class Step(nn.Module):
            @nn.compact
            def __call__(self, c, _):
                return jnp.tanh(nn.Dense(4, name="d")(c)), None

        scan = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = scan(name="layers")(x, None)
        x = nn.BatchNorm(use_running_average=not train, name="bn")(x)
        x = nn.Dropout(0.5, deterministic=not train, name="drop")(x)
        return nn.remat(nn.Dense)(2, name="out")(x)


def test_linen_with_collections_randomness_and_lifted_modules():
    net = Layers()
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    @jax.jit
    def loss(variables, x):
        out, changed = net.apply(variables, x, rngs={"dropout": jax.random.key(2)}, mutable=["batch_stats"])
        return jnp.square(out).mean(), changed

    loss(variables, X)  # fills jit's cache with a trace without names, which must not matter
    report = range_report(loss, variables, X, has_aux=True)
    assert modules(report) == {"layers", "layers.d", "bn", "drop", "out", ""}
    assert modules(report, "weight") == {"layers.d", "bn", "out"}
    assert rows(report)["activation", "bn"].elements == X.size  # not the statistics
    (grads, _) = jax.grad(loss, has_aux=True)(variables, X)
    expected = float(jnp.abs(grads["params"]["out"]["kernel"]).max())
    assert rows(report)["gradient", "out"].amax >= expected * (1 - 1e-5)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.d, self.bn = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.bn(self.d(x)))


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([NnxBlock(rngs), NnxBlock(rngs)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_an_nnx_module_is_not_changed():
    net = NnxNet()
    before = [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.tree.map(_bits, nnx.state(net)))]
    calls = [NnxBlock.__dict__["__call__"], nnx.Linear.__dict__["__call__"]]

    @nnx.jit
    def loss(net, x):
        return jnp.square(net(x)).mean()

    report = range_report(loss, net, X, optimizer=optax.sgd(0.1))
    assert {"blocks.0", "blocks.1.d", "blocks.1.bn", "blocks.0.drop", ""} <= modules(report)
    assert modules(report, "gradient") == {f"blocks.{i}.{m}" for i in (0, 1) for m in ("d", "bn")}
    after = [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.tree.map(_bits, nnx.state(net)))]
    assert after == before
    assert [NnxBlock.__dict__["__call__"], nnx.Linear.__dict__["__call__"]] == calls


def _bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_classes_are_restored_when_the_function_raises():
    calls = [nnx.Linear.__dict__["__call__"], eqx.nn.Linear.__dict__["__call__"]]

    def loss(net, x):
        net(x)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        range_report(loss, NnxNet(), X)
    assert [nnx.Linear.__dict__["__call__"], eqx.nn.Linear.__dict__["__call__"]] == calls
    assert not jax.config.jax_disable_jit


def test_equinox_modules_are_named_by_their_paths():
    net = eqx.nn.Sequential(
        [eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Lambda(jax.nn.relu), eqx.nn.LayerNorm(4)]
    )

    @eqx.filter_jit
    def loss(net, x):
        return jnp.square(jax.vmap(net)(x)).mean()

    report = range_report(loss, net, X)
    assert {"layers.0", "layers.2", ""} <= modules(report)
    assert modules(report, "weight") == {"layers.0", "layers.2"}
    assert rows(report)["activation", "layers.0"].elements == X.size


def test_narrow_parameters_and_arguments_are_widened():
    w = jnp.eye(4, dtype=jnp.float16) * 0.5
    narrow = range_report(scoped, w, X.astype(jnp.float16))
    wide = range_report(scoped, w.astype(jnp.float32), X.astype(jnp.float16).astype(jnp.float32))
    assert rows(narrow) == rows(wide)


def test_the_update_with_a_guard_is_the_same_as_without():
    w, tx = jnp.eye(4) * 0.5, optax.chain(stablenum_jax.guard(loss_scale=1024.0), optax.sgd(0.1))
    guarded = range_report(scoped, w, X, optimizer=tx, opt_state=tx.init(w))
    plain = range_report(scoped, w, X, optimizer=optax.sgd(0.1))
    a, b = (rows(report)["update", ""] for report in (guarded, plain))
    assert a.amax == pytest.approx(b.amax, rel=1e-5)
    assert a.elements == b.elements == 16


def test_without_a_scalar_there_is_no_backward_pass():
    def forward(w, x):
        with jax.named_scope("a"):
            return {"out": x @ w, "n": 3}

    report = range_report(forward, jnp.eye(4), X)
    assert report.notes == ("No gradients: the function returns no scalar loss.",)
    assert [(row.kind, row.module) for row in report.rows] == [("activation", "a"), ("weight", "")]


def test_a_nonfinite_loss_is_reported():
    report = range_report(lambda w: (w * jnp.inf).sum(), jnp.ones(2))
    assert report.notes == ("The loss is not finite in float32.",)
    assert rows(report)["gradient", ""].inf == 2


def test_formats_are_checked():
    with pytest.raises(ValueError, match="format must be one of"):
        range_report(scoped, jnp.eye(4), X, formats=("float12",))
