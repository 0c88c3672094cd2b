"""flax TrainState, flax nnx, equinox; serialisation of the state."""

from __future__ import annotations

import pickle
from typing import Any

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import stablenum
import stablenum_jax
from stablenum_jax._trees import names
from tests.jax.helpers import (
    all_finite,
    assert_same_bits,
    every_mode,
    make_grads,
    make_params,
    spoil,
    without_guard,
)


def _train_state(tx: Any, params: Any) -> TrainState:
    return TrainState.create(apply_fn=lambda p, x: x, params=params, tx=tx)


@pytest.mark.parametrize("form", ["wrapper", "chain"])
def test_train_state_apply_gradients_skips_truly(form: str, mode: str) -> None:
    guard = stablenum_jax.guard
    tx = guard(optax.adamw(1e-2)) if form == "wrapper" else stablenum_jax.chain(guard(), optax.adamw(1e-2))
    state = _train_state(tx, make_params())
    apply = lambda s, g: s.apply_gradients(grads=g)  # noqa: E731
    apply = apply if mode == "eager" else jax.jit(apply)
    state = apply(state, make_grads(0))
    after = apply(state, spoil(make_grads(1)))
    assert_same_bits(after.params, state.params)
    assert_same_bits(without_guard(after.opt_state), without_guard(state.opt_state))
    assert stablenum_jax.metrics(after)["skipped_total"] == 1  # the whole TrainState is searched
    assert stablenum_jax.loss_scale(after) == 1.0


def test_step_with_the_parts_of_a_train_state(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-2))
    state = _train_state(tx, make_params())
    params, opt_state = stepper(tx)(state.params, state.opt_state, spoil(make_grads(0)))
    assert_same_bits(params, state.params)
    state = state.replace(params=params, opt_state=opt_state)
    assert not stablenum_jax.metrics(state)["applied"]


def test_train_state_with_fp8_statistics(mode: str) -> None:
    params = {"params": make_params(), "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    grads = {"params": make_grads(0), "_overwrite_with_gradient": {"scale": jnp.full(1, 5.0)}}
    state = _train_state(stablenum_jax.guard(optax.adam(1e-2)), params)
    apply = lambda s, g: s.apply_gradients(grads=g)  # noqa: E731
    after = (apply if mode == "eager" else jax.jit(apply))(state, grads)
    assert after.params["_overwrite_with_gradient"]["scale"] == 5.0
    assert stablenum_jax.metrics(after)["applied"]


class _Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(jnp.tanh(self.first(x)))


def test_nnx_optimizer_skips_truly(mode: str) -> None:
    model = _Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, stablenum_jax.guard(optax.adamw(1e-2), clip=1.0), wrt=nnx.Param)

    def train(model: Any, optimizer: Any, x: Any) -> None:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads, value=loss)

    train = train if mode == "eager" else nnx.jit(train)
    snapshot = lambda: jax.tree.map(  # noqa: E731
        np.array, (nnx.to_pure_dict(nnx.state(model)), without_guard(nnx.as_pure(optimizer.opt_state)))
    )
    x = jnp.ones((2, 3))
    train(model, optimizer, x)
    before = snapshot()
    train(model, optimizer, x.at[0, 0].set(jnp.nan))
    assert_same_bits(snapshot(), before)
    for place in (optimizer, optimizer.opt_state):
        seen = stablenum_jax.metrics(place)
        assert seen["reason"].name == "NONFINITE_LOSS"
        assert seen["skipped_total"] == 1
    assert stablenum_jax.guard_state_dict(optimizer)["names"] == [
        "first.bias",
        "first.kernel",
        "last.bias",
        "last.kernel",
    ]
    train(model, optimizer, x)
    assert stablenum_jax.metrics(optimizer)["applied"]
    optimizer.opt_state = nnx.data(stablenum_jax.clear_halt(optimizer.opt_state))
    train(model, optimizer, x)
    assert stablenum_jax.guard_state(optimizer).step == 4


def test_nnx_state_as_parameters_of_step(stepper: Any) -> None:
    graph, params = nnx.split(_Model(nnx.Rngs(0)), nnx.Param)
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-2))
    grads = jax.grad(lambda p: (nnx.merge(graph, p)(jnp.ones((2, 3))) ** 2).mean())(params)
    after, opt_state = stepper(tx)(params, tx.init(params), grads)
    assert stablenum_jax.metrics(opt_state)["applied"]
    assert jax.tree.structure(after) == jax.tree.structure(params)


def test_equinox_filtered_trees(mode: str) -> None:
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-2))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def train(model: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: jax.vmap(m)(x).sum())(model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        params, opt_state = stablenum_jax.step(tx, params, opt_state, grads, value=loss)
        return eqx.combine(params, static), opt_state

    train = train if mode == "eager" else eqx.filter_jit(train)
    good, opt_state = train(model, opt_state, jnp.ones((2, 3)))
    names_seen = stablenum_jax.guard_state_dict(opt_state)["names"]
    assert names_seen == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    after, opt_state = train(good, opt_state, jnp.full((2, 3), jnp.nan))
    assert_same_bits(eqx.filter(after, eqx.is_array), eqx.filter(good, eqx.is_array))
    assert stablenum_jax.metrics(opt_state)["skipped_total"] == 1


def test_the_state_survives_flax_serialization_and_pickle() -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0, loss_scale="dynamic"), optax.adam(1e-2))
    params = make_params()
    opt_state = tx.init(params)
    _, opt_state = stablenum_jax.step(tx, params, opt_state, spoil(make_grads(0), np.inf))
    restored = flax.serialization.from_bytes(tx.init(params), flax.serialization.to_bytes(opt_state))
    assert_same_bits(restored, opt_state)
    assert stablenum_jax.metrics(restored)["worst"].name == "out"
    assert_same_bits(pickle.loads(pickle.dumps(opt_state)), opt_state)


def test_names_are_unknown_until_the_guard_has_seen_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-2))
    params = make_params()
    _, opt_state = stablenum_jax.step(tx, params, tx.init(params), spoil(make_grads(0)))
    monkeypatch.setattr(names, "_NAMES", {})  # as in another process
    assert stablenum_jax.metrics(opt_state)["worst"] == (2, None)
    assert stablenum_jax.guard_state_dict(opt_state)["names"] is None
    jax.jit(lambda p, s, g: stablenum_jax.step(tx, p, s, g)).lower(params, opt_state, make_grads(0))
    assert stablenum_jax.metrics(opt_state)["worst"] == (2, "out")


def test_trees_with_the_same_checksum_have_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_NAMES", {})
    # Two names, found by trial, whose checksums have the same lowest 31 bits.
    one, other = {"w3985819": jnp.ones(2)}, {"w4420602": jnp.ones(2)}
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    _, opt_state = stablenum_jax.step(tx, one, tx.init(one), {"w3985819": jnp.ones(2)})
    assert stablenum_jax.metrics(opt_state)["worst"].name == "w3985819"
    with pytest.warns(UserWarning, match="share the checksum.*w3985819.*w4420602"):
        others = tx.init(other)
    assert opt_state[0].names_id == others[0].names_id
    assert stablenum_jax.metrics(opt_state)["worst"] == (0, None)
    assert stablenum_jax.guard_state_dict(others)["names"] is None
    tx.init(one)  # does not warn again


def test_names_are_known_after_init_under_a_trace() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-2))
    params = {"layers": [{"kernel": jnp.ones(2)}, {"kernel": jnp.ones(2)}]}
    opt_state = jax.jit(tx.init)(params)
    assert stablenum_jax.guard_state_dict(opt_state)["names"] == ["layers.0.kernel", "layers.1.kernel"]
    assert jax.tree.structure(jax.eval_shape(tx.init, params)) == jax.tree.structure(opt_state)
    assert stablenum_jax.guard_state_dict(tx.init(jnp.ones(2)))["names"] == ["param"]


def test_trees_with_none_integers_keys_and_masked_nodes(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(0.1))
    params = {"a": jnp.ones(2), "none": None, "masked": optax.MaskedNode(), "nested": ({}, [])}
    grads = {"a": jnp.asarray([3.0, 4.0]), "none": None, "masked": optax.MaskedNode(), "nested": ({}, [])}
    after, opt_state = stepper(tx)(params, tx.init(params), grads)
    np.testing.assert_allclose(after["a"], [0.94, 0.92], rtol=1e-5)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert stablenum_jax.guard_state_dict(opt_state)["names"] == ["a"]


def test_float0_gradients_of_integers_are_unchanged(stepper: Any) -> None:
    trained = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    tx = optax.GradientTransformation(
        lambda p: trained.init({"w": p["w"]}),
        lambda g, s, p=None: _only_w(trained, g, s, p),
    )
    params = {"n": jnp.arange(3), "w": jnp.ones(2)}
    grads = jax.grad(lambda p: (p["w"] ** 2).sum() * p["n"].sum(), allow_int=True)(params)
    assert grads["n"].dtype == jax.dtypes.float0
    after, opt_state = stepper(tx)(params, tx.init(params), grads)
    np.testing.assert_array_equal(after["n"], [0, 1, 2])
    assert stablenum_jax.metrics(opt_state)["grad_norm"] == pytest.approx(72**0.5, rel=1e-6)


def _only_w(inner: Any, grads: Any, state: Any, params: Any) -> Any:
    updates, state = inner.update({"w": grads["w"]}, state, params and {"w": params["w"]})
    return {"n": jnp.zeros(3, jnp.int32), **updates}, state


@every_mode
def test_missing_gradients_keep_the_numbering_of_the_parameters(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    params = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)}
    grads = {"a": None, "b": None, "c": jnp.asarray([1.0, jnp.nan])}
    _, opt_state = stepper(tx)(params, tx.init(params), grads)
    assert stablenum_jax.metrics(opt_state)["worst"] == (2, "c")


@pytest.mark.sampled
@every_mode
@pytest.mark.parametrize("clip", [None, 1.0, "per tensor"])
def test_an_empty_tree_is_a_step_like_any_other(clip: Any, stepper: Any) -> None:
    rules = stablenum.ClipByNorm(1.0) if clip == "per tensor" else clip
    tx = optax.chain(stablenum_jax.guard(clip=rules, loss_scale="dynamic"), optax.adam(0.1))
    params, opt_state = stepper(tx)({}, tx.init({}), {})
    assert params == {}
    seen = stablenum_jax.metrics(opt_state)
    assert (seen["applied"], seen["grad_norm"], seen["worst"]) == (True, 0.0, (-1, None))
    _, opt_state = stepper(tx)({}, opt_state, {}, value=jnp.asarray(jnp.nan))
    assert stablenum_jax.metrics(opt_state)["skipped_total"] == 1


@every_mode
def test_parameters_that_are_plain_numbers(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adam(0.1))
    params, opt_state = stepper(tx)(1.0, tx.init(1.0), 3.0)
    assert float(params) == pytest.approx(0.9, rel=1e-5)
    assert stablenum_jax.metrics(opt_state)["grad_norm"] == 3.0


@every_mode
def test_numpy_gradients_and_parameters(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(0.1))
    params = {"w": np.ones(3, np.float32)}
    after, opt_state = stepper(tx)(params, tx.init(params), {"w": np.asarray([1, np.nan, 1], np.float32)})
    assert_same_bits(after, params)
    assert all_finite(without_guard(opt_state))


@pytest.mark.parametrize("form", ["chain form", "wrapper"])
def test_complex_parameters(form: str, stepper: Any, updater: Any) -> None:
    params = {"z": jnp.asarray([complex(-0.0, -0.0), 1 + 1j], jnp.complex64)}
    clip = [2.0, stablenum.ClipByValue(1.0)]
    if form == "wrapper":
        tx: Any = stablenum_jax.guard(optax.sgd(1.0), clip=clip)
        step = updater(tx)
    else:
        tx = optax.chain(stablenum_jax.guard(clip=clip), optax.sgd(1.0))
        step = stepper(tx)
    bad = {"z": jnp.asarray([0, complex(1, np.nan)], jnp.complex64)}
    after, opt_state = step(params, tx.init(params), bad)
    assert_same_bits(after, params)
    after, opt_state = step(params, opt_state, {"z": jnp.asarray([0, 6 + 8j], jnp.complex64)})
    assert stablenum_jax.metrics(opt_state)["grad_norm"] == pytest.approx(10.0)
    np.testing.assert_allclose(after["z"][1], 1 + 1j - (1 + 1j), atol=1e-6)  # (1.2 + 1.6j), then clamped
