"""Models given as they are: equinox modules and flax nnx modules, with what they hold besides parameters."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stablenum
import stablenum_jax as sj
from tests.jax.helpers import assert_same_bits
from tests.selection import slow_but_for

X, Y = jax.random.normal(jax.random.key(1), (5, 3)), jnp.ones(5)


class Net(eqx.Module):
    """Functions, numbers, a key, an integer array and None among the parameters."""

    first: eqx.nn.Linear
    drop: eqx.nn.Dropout
    act: Any
    scale: float
    nothing: Any
    key: jax.Array
    count: jax.Array
    last: eqx.nn.Linear

    def __init__(self) -> None:
        first, last = jax.random.split(jax.random.key(0))
        self.first, self.last = eqx.nn.Linear(3, 4, key=first), eqx.nn.Linear(4, 1, use_bias=False, key=last)
        self.drop, self.act, self.scale, self.nothing = eqx.nn.Dropout(0.5), jnp.tanh, 2.0, None
        self.key, self.count = jax.random.key(2), jnp.asarray(3)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(self.act(self.first(x)), key=self.key) * self.scale)[0]


def loss_of(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def floats(model: Any) -> Any:
    return eqx.filter(model, eqx.is_inexact_array)


def spoiled(grads: Any) -> Any:
    return eqx.tree_at(lambda g: g.last.weight, grads, grads.last.weight.at[0, 0].set(jnp.nan))


def test_the_gradients_of_an_equinox_model_are_those_of_equinox() -> None:
    model = Net()
    tx = optax.chain(sj.guard(loss_scale=8.0), optax.adam(0.1))
    loss, grads = sj.value_and_grad(loss_of, tx.init(floats(model)))(model, X, y=Y)
    expected, of_equinox = eqx.filter_value_and_grad(loss_of)(model, X, Y)
    assert loss == expected
    assert_same_bits(grads, jax.tree.map(lambda g: g * 8.0, of_equinox))


def test_gradients_of_a_model_with_aux_and_of_two_models() -> None:
    opt_state = sj.guard(optax.sgd(0.1)).init(jnp.ones(1))
    fun = sj.value_and_grad(lambda a, b: (loss_of(a, X, Y) + loss_of(b, X, Y), a), opt_state, (0, 1), True)
    (_, aux), (one, other) = fun(Net(), Net())
    assert aux.act is jnp.tanh
    assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("form", "jit"),
    slow_but_for([("step", False), ("guard", True)], itertools.product(["step", "guard"], [False, True])),
)
def test_an_equinox_model_is_trained_as_it_is(form: str, jit: bool) -> None:
    model = Net()
    rules = {"clip": [stablenum.AdaGC(), stablenum.AdaptiveGradClip()]} if form == "step" else {}
    chained = optax.chain(sj.guard(**rules), optax.adamw(0.1))
    tx = chained if form == "step" else sj.guard(optax.adamw(0.1))
    opt_state = tx.init(floats(model) if form == "step" else model)

    def train(model: Any, opt_state: Any, bad: bool) -> Any:
        loss, grads = sj.value_and_grad(loss_of, opt_state)(model, X, Y)
        grads = spoiled(grads) if bad else grads
        if form == "step":
            return sj.step(tx, model, opt_state, grads, value=loss)
        updates, opt_state = tx.update(grads, opt_state, model, value=loss)
        return eqx.apply_updates(model, updates), opt_state

    train = eqx.filter_jit(train) if jit else train
    after, opt_state = train(model, opt_state, False)
    assert (after.last.weight != model.last.weight).all()
    assert (after.drop.p, after.scale, after.act, after.nothing) == (0.5, 2.0, jnp.tanh, None)
    assert int(after.count) == 3
    skipped, opt_state = train(after, opt_state, True)
    assert_same_bits(floats(skipped), floats(after))
    assert sj.metrics(opt_state)["worst"] == (2, "last.weight")


def test_a_frozen_model_has_the_right_parameter_blamed() -> None:
    model = Net()
    trained = jax.tree.map(lambda _: False, model)
    part, rest = eqx.partition(model, eqx.tree_at(lambda m: m.last.weight, trained, True))
    grads = jax.grad(lambda p: loss_of(eqx.combine(p, rest), X, Y))(part)
    tx = optax.chain(sj.guard(), optax.adam(0.1))
    for params in (part, model):
        after, opt_state = sj.step(tx, params, tx.init(part), spoiled(grads))
        assert sj.metrics(opt_state)["worst"].name == "last.weight"
        assert_same_bits(floats(after), floats(params))


def test_a_plain_tree_with_a_function_and_a_word() -> None:
    params = {"name": "net", "f": jnp.sin, "w": jnp.ones(2), "x": 1.5}
    tx = sj.guard(optax.sgd(0.5))
    opt_state = tx.init(params)
    loss, grads = sj.value_and_grad(lambda p: p["f"](p["w"]).sum() * p["x"], opt_state)(params)
    assert grads["f"] is None
    assert grads["x"] is None
    after, opt_state = sj.step(tx, params, opt_state, grads, value=loss)
    np.testing.assert_allclose(after["w"], 1.0 - 0.75 * np.cos(1.0), rtol=1e-6)
    assert (after["name"], after["f"]) == ("net", jnp.sin)


def test_arguments_without_a_number_to_differentiate_are_still_refused_by_jax() -> None:
    opt_state = sj.guard(optax.sgd(0.5)).init(jnp.ones(1))
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        sj.value_and_grad(lambda i, w: w.sum() * i, opt_state)(jnp.asarray(3), jnp.ones(2))


class Block(nnx.Module):
    """Running statistics, a generator that counts, and a function."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.act = jnp.tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(self.act(self.norm(self.first(x)))))[:, 0]


def loss_of_block(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1.0) ** 2)


def test_value_and_grad_of_an_nnx_module_does_what_nnx_does() -> None:
    one, other = Block(), Block()
    opt_state = sj.guard(optax.adam(0.1), loss_scale=8.0).init(one)
    for _ in range(2):
        loss, grads = sj.value_and_grad(loss_of_block, opt_state)(one, x=X)
        expected, of_nnx = nnx.value_and_grad(loss_of_block)(other, X)
        assert loss == expected
        assert_same_bits(grads, jax.tree.map(lambda g: g * 8.0, of_nnx))
    assert_same_bits(*(nnx.to_pure_dict(nnx.state(m, nnx.BatchStat)) for m in (one, other)))
    assert one.drop.rngs.count[...] == 2
    assert (one.norm.mean[...] != 0).all()


@pytest.mark.parametrize("escalate", [None, stablenum.EscalatePrecision(after=2)])
def test_statistics_and_generators_are_kept_under_a_policy(escalate: Any) -> None:
    model = Block()
    opt_state = sj.guard(optax.adam(0.1), escalate=escalate).init(model)

    @nnx.jit
    def gradients(model: Any) -> Any:
        return sj.value_and_grad(loss_of_block, opt_state, policy="c=f16")(model, X)

    for _ in range(2):
        _, grads = gradients(model)
    assert model.drop.rngs.count[...] == 2
    assert (model.norm.mean[...] != 0).all()
    assert model.norm.mean[...].dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))


def test_step_changes_an_nnx_module_in_place() -> None:
    model = Block()
    tx = optax.chain(sj.guard(), optax.adamw(0.1))
    opt_state = tx.init(nnx.state(model, nnx.Param))
    assert sj.guard_state_dict(opt_state)["names"] == sj.guard_state_dict(sj.guard().init(model))["names"]

    @nnx.jit
    def train(model: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = sj.value_and_grad(loss_of_block, opt_state)(model, x)
        return sj.step(tx, model, opt_state, grads, value=loss)[1]

    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    opt_state = train(model, opt_state, X)
    good = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert (good["last"]["kernel"] != before["last"]["kernel"]).any()
    assert model.drop.rngs.count[...] == 1
    opt_state = train(model, opt_state, X * jnp.nan)
    assert_same_bits(nnx.to_pure_dict(nnx.state(model, nnx.Param)), good)
    assert sj.metrics(opt_state)["reason"].name == "NONFINITE_LOSS"


def test_gradients_of_another_nnx_module_are_refused() -> None:
    model = Block()
    tx = optax.chain(sj.guard(), optax.sgd(0.1))
    opt_state = tx.init(nnx.state(model, nnx.Param))
    with pytest.raises(ValueError, match="it has no bias"):
        sj.step(tx, model, opt_state, nnx.state(model.first, nnx.Param))


def test_nnx_objects_may_come_with_keyword_arguments_and_partial_functions() -> None:
    model, x = Block(), jnp.arange(6.0).reshape(2, 3)
    opt_state = sj.chain(sj.guard(), optax.sgd(0.1)).init({"w": jnp.ones(2)})

    def loss(model: Any, x: jax.Array, *, factor: float, **more: Any) -> jax.Array:
        return factor * loss_of_block(model, x)

    whole, _ = sj.value_and_grad(lambda model, x: loss_of_block(model, x), opt_state)(Block(), x)
    twice, _ = sj.value_and_grad(functools.partial(loss, factor=2.0), opt_state)(model, x)
    named, _ = sj.value_and_grad(loss, opt_state)(Block(), x=x, factor=2.0, unused=1)
    assert float(twice) == float(named) == 2 * float(whole)
    drawn, grads = sj.value_and_grad(
        lambda p, *, rngs: (p["w"] * rngs.params.uniform((2,))).sum(), opt_state
    )({"w": jnp.ones(2)}, rngs=nnx.Rngs(0))
    assert float(drawn) == pytest.approx(float(grads["w"].sum()))


class Sowing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer, self.norm = nnx.Linear(2, 1, rngs=rngs), nnx.BatchNorm(1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.layer(x))
        self.seen = nnx.Intermediate(y)
        return y


def test_variables_that_a_forward_pass_creates_are_kept_under_a_policy() -> None:
    model = Sowing(nnx.Rngs(0))
    opt_state = sj.chain(sj.guard(), optax.sgd(0.1)).init({"w": jnp.ones(2)})
    sj.value_and_grad(lambda m, x: m(x).sum(), opt_state, policy="bfloat16")(model, jnp.ones((3, 2)))
    assert len(nnx.state(model, nnx.Intermediate)) == 1
    assert model.norm.mean[...].dtype == jnp.float32


class Bias(nnx.Pytree):
    """An object of nnx that is not a module."""

    def __init__(self) -> None:
        self.b = nnx.Param(jnp.ones(()))


def nnx_containers() -> dict[str, tuple[Any, Any]]:
    """Return trees that hold objects of nnx, each with its loss."""

    def layer(seed: int) -> Any:
        return nnx.Linear(3, 3, rngs=nnx.Rngs(seed))

    tied = {"a": layer(0), "b": layer(1)}
    tied["b"].kernel = tied["a"].kernel
    in_turn = lambda m, x: jnp.mean(m["b"](m["a"](x)) ** 2)  # noqa: E731
    return {
        "dict": ({"a": layer(0), "b": layer(1)}, in_turn),
        "list": ([layer(0), layer(1)], lambda m, x: jnp.mean(m[1](m[0](x)) ** 2)),
        "tuple": ((layer(0), {"b": layer(1)}), lambda m, x: jnp.mean(m[1]["b"](m[0](x)) ** 2)),
        "mixed": (
            {"a": layer(0), "w": jnp.ones(3), "none": None},
            lambda m, x: jnp.mean((m["a"](x) * m["w"]) ** 2),
        ),
        "tied": (tied, in_turn),
        "another object": ({"a": layer(0), "b": Bias()}, lambda m, x: jnp.mean((m["a"](x) + m["b"].b) ** 2)),
    }


@pytest.mark.parametrize(
    ("kind", "jit"),
    slow_but_for(
        [("list", True), ("tied", False), ("mixed", True), ("another object", True)],
        itertools.product(nnx_containers(), [False, True]),
    ),
)
def test_a_container_of_nnx_objects_is_trained_as_one_module_is(kind: str, jit: bool) -> None:
    model, loss_of_model = nnx_containers()[kind]
    tx = sj.chain(sj.guard(loss_scale=8.0), optax.adamw(0.1))
    opt_state = tx.init(model)

    def train(model: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = sj.value_and_grad(loss_of_model, opt_state)(model, x)
        model, opt_state = sj.step(tx, model, opt_state, grads, value=loss)
        return loss, (None if jit else model), opt_state

    train = nnx.jit(train) if jit else train
    losses = [float(train(model, opt_state, X)[0])]
    for x in (X, X, X * jnp.nan):
        before = jax.tree.map(jnp.copy, model)
        loss, after, opt_state = train(model, opt_state, x)
        losses.append(float(loss))
        model = model if jit else after
    assert_same_bits(model, before)
    assert sj.metrics(opt_state)["skipped_total"] == 1
    assert losses[2] < losses[0]
    names = sj.guard_state_dict(opt_state)["names"]
    assert len(names) == len(set(names)) == {"tied": 3, "mixed": 3, "another object": 3}.get(kind, 4)


def test_gradients_that_do_not_fit_a_container_of_nnx_modules() -> None:
    model, loss_of_model = nnx_containers()["dict"]
    tx = sj.chain(sj.guard(), optax.sgd(0.1))
    _, grads = sj.value_and_grad(loss_of_model, tx.init(model))(model, X)
    for wrong in ({"a": grads["a"]}, list(grads.values()), 3.0):
        with pytest.raises(ValueError, match=r"grads must be a tree like params.*Nothing was changed"):
            sj.step(tx, model, tx.init(model), wrong)


def a_linear_equinox_model() -> Any:
    return eqx.nn.Linear(3, 3, key=jax.random.key(0))


FIRST_STATES = {
    "nnx": (lambda: nnx_containers()["list"][0][0], r"tx\.init\(nnx\.state\(params, nnx\.Param\)\)"),
    "nnx in a list": (lambda: nnx_containers()["list"][0], r"tx is stablenum_jax\.chain\(guard, optimizer\)"),
    "equinox": (a_linear_equinox_model, r"tx\.init\(equinox\.filter\(params, equinox\.is_inexact_array\)\)"),
}


@pytest.mark.parametrize("kind", FIRST_STATES)
def test_a_state_that_optax_made_of_a_model_is_refused_with_the_call_that_makes_it(kind: str) -> None:
    make, advice = FIRST_STATES[kind]
    model = make()
    tx = optax.chain(sj.guard(), optax.adam(0.1))
    opt_state = tx.init({"w": jnp.ones(2)} if kind == "equinox" else model)
    loss = lambda m: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(m))  # noqa: E731
    _, grads = sj.value_and_grad(loss, opt_state)(model)
    with pytest.raises(ValueError, match=f"opt_state must be the state of tx .*Make it with .*{advice}"):
        sj.step(tx, model, opt_state, grads)
