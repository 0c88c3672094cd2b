"""The traps that optax, flax, jmp and others fall into, one test each.

Where it is cheap, the test also shows that the installed version of the peer fails.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import stablenum_jax
from stablenum import DynamicLossScale
from stablenum_jax import GuardPlacementWarning, NotATrueSkipWarning
from tests.jax.helpers import (
    all_finite,
    assert_same_bits,
    every_mode,
    make_grads,
    make_params,
    reason,
    run_on_four_devices,
    spoil,
    without_guard,
)


def test_trap_01_apply_if_finite_applies_bad_step_n_plus_1(stepper: Any, updater: Any) -> None:
    params, bad = make_params(), spoil(make_grads(0))
    peer = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3)
    poisoned, state = params, peer.init(params)
    for _ in range(4):
        poisoned, state = updater(peer)(poisoned, state, bad)
    assert not all_finite(poisoned)

    tx = optax.chain(stablenum_jax.guard(max_skips_in_a_row=50), optax.adam(1e-2))
    after, opt_state = params, tx.init(params)
    step = stepper(tx)
    for _ in range(20):
        after, opt_state = step(after, opt_state, bad)
    assert_same_bits(after, params)
    assert stablenum_jax.metrics(opt_state)["skipped_in_a_row"] == 20


def test_trap_02_conditionally_transform_passes_the_raw_gradient_on(updater: Any) -> None:
    params, bad = make_params(), spoil(make_grads(0))
    peer = optax.conditionally_transform(optax.adam(1e-2), lambda step: step < 0)
    poisoned, _ = updater(peer)(params, peer.init(params), bad)
    assert not all_finite(poisoned)

    for tx in (
        stablenum_jax.guard(optax.adam(1e-2)),
        stablenum_jax.chain(stablenum_jax.guard(), optax.adam(1e-2)),
    ):
        updates, _ = tx.update(bad, tx.init(params), params)
        assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(updates))


def test_trap_03_zeroed_gradients_are_not_a_skip(stepper: Any, updater: Any) -> None:
    params = make_params()
    zeros = jax.tree.map(jnp.zeros_like, params)
    peer = optax.adamw(1e-2)
    state = peer.init(params)
    before, state = updater(peer)(params, state, make_grads(0))
    moved, _ = updater(peer)(before, state, zeros)
    a_step, zeroed = (jnp.abs(x["out"] - y["out"]).max() for x, y in ((before, params), (moved, before)))
    assert zeroed > 0.5 * a_step  # the "skipped" step moved the weights by momentum and decay

    tx = optax.chain(stablenum_jax.guard(), peer)
    step = stepper(tx)
    before, opt_state = step(params, tx.init(params), make_grads(0))
    after, after_state = step(before, opt_state, spoil(make_grads(1)))
    assert_same_bits(after, before)
    assert_same_bits(without_guard(after_state), without_guard(opt_state))


def test_trap_03_float16_adam_makes_nan_of_zero_gradients(stepper: Any, updater: Any) -> None:
    params = make_params(jnp.float16)
    peer = optax.adam(1e-2)
    poisoned, _ = updater(peer)(params, peer.init(params), jax.tree.map(jnp.zeros_like, params))
    assert not all_finite(poisoned)

    tx = optax.chain(stablenum_jax.guard(), peer)
    bad = spoil(make_grads(0, params), np.inf)
    after, _ = stepper(tx)(params, tx.init(params), bad)
    assert_same_bits(after, params)


@pytest.mark.parametrize(("value", "dtype"), [(1e20, jnp.float32), (300.0, jnp.float16)])
def test_trap_04_clip_by_global_norm_zeroes_finite_gradients(
    value: float, dtype: Any, stepper: Any, updater: Any
) -> None:
    params = {"w": jnp.zeros(4, dtype)}
    grads = {"w": jnp.full(4, value, dtype)}
    peer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    stalled, _ = updater(peer)(params, peer.init(params), grads)
    assert not np.asarray(stalled["w"]).any()

    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(1.0))
    after, opt_state = stepper(tx)(params, tx.init(params), grads)
    np.testing.assert_allclose(np.asarray(after["w"], np.float32), -0.5, rtol=1e-3)
    assert reason(opt_state) == "CLIPPED"


def test_trap_04_one_inf_becomes_a_nan_and_zeros(stepper: Any, updater: Any) -> None:
    params, bad = make_params(), spoil(make_grads(0), np.inf)
    peer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    poisoned, _ = updater(peer)(params, peer.init(params), bad)
    assert np.isnan(np.asarray(poisoned["out"])).sum() == 1

    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(1.0))
    after, _ = stepper(tx)(params, tx.init(params), bad)
    assert_same_bits(after, params)


def test_trap_05_jmp_loses_min_loss_scale_under_jit(stepper: Any) -> None:
    peer = jmp.DynamicLossScale(jnp.float32(2.0), min_loss_scale=jnp.float32(2.0))
    shrunk = jax.jit(lambda s: s.adjust(jnp.asarray(False)))(jax.jit(lambda s: s)(peer))
    assert shrunk.loss_scale < 2.0

    rule = DynamicLossScale(init_scale=4.0, min_scale=2.0)
    tx = optax.chain(stablenum_jax.guard(loss_scale=rule), optax.sgd(0.1))
    params, bad = make_params(), spoil(make_grads(0), np.inf)
    opt_state = tx.init(params)
    for _ in range(3):
        _, opt_state = stepper(tx)(params, opt_state, bad)
    assert stablenum_jax.loss_scale(opt_state) == 2.0


def test_trap_05_a_float16_loss_times_the_scale_is_inf(stepper: Any) -> None:
    x = jnp.asarray(3.0, jnp.float16)
    assert jnp.isinf(jmp.StaticLossScale(jnp.asarray(2.0**15, jnp.float16)).scale(x))
    fun = lambda w: w * jnp.asarray(0.5, jnp.float16)  # noqa: E731
    _, finite, _, _ = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(65536.0)).value_and_grad(fun)(x)
    assert not finite  # flax skips its first step

    tx = optax.chain(stablenum_jax.guard(loss_scale=65536.0), optax.sgd(1.0))
    opt_state = tx.init(x)
    assert stablenum_jax.scale_loss(x, opt_state) == 196608.0
    loss, grads = stablenum_jax.value_and_grad(fun, opt_state)(x)
    assert (loss, loss.dtype, grads) == (1.5, jnp.float16, 32768.0)
    after, opt_state = stepper(tx)(x, opt_state, grads, value=loss)
    assert (after, reason(opt_state)) == (2.5, "OK")


def test_trap_06_bfloat16_gradients_with_float32_parameters_break_cond(stepper: Any, updater: Any) -> None:
    params, grads = make_params(), make_grads(0, make_params(jnp.bfloat16))
    peer = optax.apply_if_finite(optax.adamw(1e-2), 3)
    with pytest.raises(TypeError, match="cond"):
        updater(peer)(params, peer.init(params), grads)

    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-2))
    opt_state = tx.init(params)
    after, state_after = stepper(tx)(params, opt_state, grads)
    for old, new in ((params, after), (opt_state, state_after)):
        assert jax.tree.map(lambda x: x.dtype, old) == jax.tree.map(lambda x: x.dtype, new)
    wrapper = stablenum_jax.guard(optax.adamw(1e-2), clip=1.0)
    after, _ = updater(wrapper)(params, wrapper.init(params), grads)
    assert all_finite(after)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_trap_07_one_nan_in_the_statistics_blocks_for_128_steps(bad: float, stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0, loss_scale="dynamic"), optax.adam(1e-2))
    params = make_params()
    opt_state = tx.init(params)
    step = stepper(tx)
    params, opt_state = step(params, opt_state, spoil(make_grads(0), bad), value=jnp.asarray(bad))
    for seed in range(5):
        params, opt_state = step(params, opt_state, make_grads(seed), value=jnp.asarray(1.0))
        assert stablenum_jax.metrics(opt_state)["applied"]
    guard = stablenum_jax.guard_state(opt_state)
    assert all_finite((guard.loss_scale, guard.clip, params))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, optax, stablenum_jax
from jax.sharding import Mesh, PartitionSpec as P
from jax import shard_map

mesh = Mesh(np.array(jax.devices()), ("data",))
assert mesh.size == 4
params = {"b": jnp.ones(4), "w": jnp.arange(8.0)}

def train(axis_name, bad, check_vma=True):
    tx = optax.chain(stablenum_jax.guard(clip=1.0, axis_name=axis_name, loss_scale=2.0), optax.adam(0.1))
    state = tx.init(params)
    spec = lambda tree: jax.tree.map(lambda x: P("data") if x.shape in ((4,), (8,)) else P(), tree)
    step = shard_map(
        lambda p, s, g, loss: stablenum_jax.step(tx, p, s, g, value=loss[0]), mesh=mesh,
        in_specs=(spec(params), spec(state), spec(params), P("data")), out_specs=(spec(params), spec(state)),
        check_vma=check_vma)
    grads = {"b": 2 * jnp.ones(4), "w": 2 * jnp.arange(8.0).at[5].set(bad)}
    loss = jnp.arange(4.0)
    after, state = jax.jit(step)(params, state, grads, loss)
    return {k: np.asarray(v) for k, v in after.items()}, stablenum_jax.metrics(state), grads

def same(after, names):
    return [name for name in names if (after[name] == np.asarray(params[name])).all()]

# Without axis_name only the bad shard skips: the model is torn apart.
after, _, _ = train(None, jnp.nan, check_vma=False)
assert (after["w"][4:6] == np.arange(4, 6)).all() and (after["w"][:4] != np.arange(4)).any()

for bad in (jnp.nan, jnp.inf):
    after, seen, _ = train("data", bad)
    assert same(after, params) == ["b", "w"], after
    assert not seen["applied"] and seen["worst"].name == "w", seen

for value in (5.0, 1e30, 1e-30, 1.5e38):
    after, seen, grads = train("data", value)
    whole = np.sqrt(sum(np.sum((np.asarray(g, np.float64) / 2) ** 2) for g in grads.values()))
    np.testing.assert_allclose(seen["grad_norm"], whole, rtol=1e-6)
    assert seen["applied"] and "w" not in same(after, params) and seen["loss"] == 1.5

# pmap, with one state a device
tx = optax.chain(stablenum_jax.guard(axis_name="data"), optax.adam(0.1))
shards = jax.tree.map(lambda x: x.reshape(4, -1), params)
states = jax.vmap(tx.init)(shards)
bad = {"b": jnp.ones((4, 1)), "w": jnp.arange(8.0).reshape(4, 2).at[3, 1].set(jnp.nan)}
step = jax.pmap(lambda p, s, g: stablenum_jax.step(tx, p, s, g), axis_name="data")
after, states = step(shards, states, bad)
assert all((after[k] == shards[k]).all() for k in params)
assert states[0].guard.skipped_total.tolist() == [1, 1, 1, 1]

# Under jit with sharded arrays the check is global by itself.
place = jax.NamedSharding(mesh, P("data"))
tx = optax.chain(stablenum_jax.guard(), optax.adam(0.1))
sharded = jax.device_put(params, place)
grads = jax.device_put({"b": jnp.ones(4), "w": jnp.arange(8.0).at[5].set(jnp.nan)}, place)
after, state = jax.jit(lambda p, s, g: stablenum_jax.step(tx, p, s, g))(sharded, tx.init(sharded), grads)
assert all((after[k] == params[k]).all() for k in params) and after["w"].sharding == place

# Two mesh axes, one leaf replicated along one of them: an all-reduce of the maximum drops its NaN.
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
places = {"b": jax.NamedSharding(mesh, P("model")), "w": jax.NamedSharding(mesh, P("data"))}
sharded = jax.device_put(params, places)
step = jax.jit(lambda p, s, g: stablenum_jax.step(tx, p, s, g))
for key in params:
    for bad, name in ((jnp.nan, "NAN_GRADIENT"), (jnp.inf, "INF_GRADIENT"), (1e30, "OK"), (1e-30, "OK")):
        for whole in (True, False):
            leaf = jnp.full_like(params[key], bad) if whole else params[key].at[-1].set(bad)
            grads = jax.device_put({**params, key: leaf}, places)
            after, state = step(sharded, tx.init(sharded), grads)
            seen = stablenum_jax.metrics(state)
            norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in grads.values()))
            np.testing.assert_allclose(seen["grad_norm"], norm, rtol=1e-6)
            assert seen["reason"].name == name, (key, bad, whole, seen)
            assert all((after[k] == params[k]).all() for k in params) == (name != "OK")
"""


def test_trap_08_under_shard_map_only_the_bad_shard_skips() -> None:
    code = "os.environ['JAX_PLATFORMS'] = 'cpu'\n" + SHARDED
    run_on_four_devices(code)


def test_trap_08_under_vmap_each_run_decides_for_itself() -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-2))
    params = jax.tree.map(lambda x: jnp.stack([x, x, x]), make_params())
    opt_state = jax.vmap(tx.init)(params)
    grads = jax.tree.map(lambda *g: jnp.stack(g), make_grads(0), spoil(make_grads(1)), make_grads(2))
    after, state_after = jax.jit(jax.vmap(lambda p, s, g: stablenum_jax.step(tx, p, s, g)))(
        params, opt_state, grads
    )
    pick = lambda tree, i: jax.tree.map(lambda x: x[i], tree)  # noqa: E731
    assert_same_bits(pick(after, 1), pick(params, 1))
    assert_same_bits(without_guard(pick(state_after, 1)), without_guard(pick(opt_state, 1)))
    assert [stablenum_jax.metrics(pick(state_after, i))["applied"] for i in range(3)] == [True, False, True]
    alone, _ = stablenum_jax.step(tx, pick(params, 2), pick(opt_state, 2), make_grads(2))
    np.testing.assert_allclose(pick(after, 2)["out"], alone["out"], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_trap_09_a_guard_after_a_clip_sees_finite_zeros(bad: float, stepper: Any) -> None:
    params, grads = make_params(), spoil(make_grads(0), bad)
    tx = optax.chain(optax.clip(1.0), stablenum_jax.guard(), optax.adam(1e-2))
    opt_state = tx.init(params)
    clipped, _ = optax.clip(1.0).update(spoil(make_grads(0), np.inf), optax.EmptyState())
    assert all_finite(clipped)  # all that a guard after the clip sees of an inf
    with pytest.warns(GuardPlacementWarning, match="put the guard first"):
        after, state_after = stepper(tx)(params, opt_state, grads)
    assert_same_bits(after, params)
    assert_same_bits(without_guard(state_after), without_guard(opt_state))
    assert not stablenum_jax.metrics(state_after)["applied"]
    with pytest.raises(ValueError, match="in its first transformation"):
        stablenum_jax.chain(optax.clip(1.0), stablenum_jax.guard(), optax.adam(1e-2)).init(params)


def test_trap_10_a_chain_with_optax_monitor_is_rejected(stepper: Any, updater: Any) -> None:
    params, grads = make_params(), make_grads(0)
    monitor = optax.monitor({"norm": optax.tree.norm})
    state = monitor.init(params)
    _, state_after = monitor.update(grads, state, params)
    assert jax.tree.structure(state) != jax.tree.structure(state_after)

    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-2), monitor)
    with pytest.raises(ValueError, match="must keep the structure of opt_state"):
        stepper(tx)(params, tx.init(params), grads)
    for tx in (
        optax.chain(stablenum_jax.guard(clip=1.0), optax.adam(1e-2)),
        stablenum_jax.guard(optax.adam(1e-2)),
    ):
        update = stepper(tx) if len(tx.init(params)) else updater(tx)
        _, opt_state = update(params, tx.init(params), grads)
        assert jax.tree.structure(opt_state) == jax.tree.structure(tx.init(params))


def test_trap_11_fp8_statistics_bypass_the_guard(stepper: Any) -> None:
    params = {
        "params": make_params(),
        "_overwrite_with_gradient": {"amax": jnp.ones(3), "scale": jnp.ones(1)},
    }
    statistics = {"amax": jnp.asarray([jnp.inf, 2.0, 3.0]), "scale": jnp.asarray([1e30])}
    grads = {"params": make_grads(0), "_overwrite_with_gradient": statistics}
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adam(1e-2))
    opt_state = tx.init(params["params"])  # as flax's TrainState does
    after, opt_state = stepper(tx)(params, opt_state, grads)
    seen = stablenum_jax.metrics(opt_state)
    norm = float(optax.tree.norm(grads["params"]))
    assert seen["applied"]
    assert seen["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert_same_bits(after["_overwrite_with_gradient"], statistics)  # replaced, neither added nor clipped
    assert (after["params"]["out"] != params["params"]["out"]).any()
    skipped, opt_state = stepper(tx)(after, opt_state, {**grads, "params": spoil(make_grads(1))})
    assert_same_bits(skipped, after)


def test_trap_11_fp8_statistics_inside_a_guarded_tree_are_left_alone(updater: Any) -> None:
    params = {"w": jnp.ones(2), "_overwrite_with_gradient": {"amax": jnp.ones(2)}}
    grads = {"w": jnp.full(2, 10.0), "_overwrite_with_gradient": {"amax": jnp.asarray([jnp.inf, 7.0])}}
    tx = stablenum_jax.guard(optax.sgd(1.0), clip=1.0)
    updates, opt_state = tx.update(grads, tx.init(params), params)
    assert stablenum_jax.metrics(opt_state)["applied"]
    np.testing.assert_array_equal(updates["_overwrite_with_gradient"]["amax"], [-np.inf, -7.0])


def test_trap_12_the_loss_is_optional(stepper: Any, updater: Any) -> None:
    params, grads = make_params(), make_grads(0)
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-2))
    _, opt_state = stepper(tx)(params, tx.init(params), grads)
    assert np.isnan(stablenum_jax.metrics(opt_state)["loss"])
    _, opt_state = stepper(tx)(params, tx.init(params), grads, value=jnp.asarray(2.5))
    assert stablenum_jax.metrics(opt_state)["loss"] == 2.5
    wrapper = stablenum_jax.guard(optax.adam(1e-2))
    _, opt_state = updater(wrapper)(params, wrapper.init(params), grads)
    assert stablenum_jax.metrics(opt_state)["applied"]


def test_trap_12_an_optimizer_that_needs_the_loss_gets_it(stepper: Any) -> None:
    params, grads = make_params(), make_grads(0)
    tx = optax.chain(stablenum_jax.guard(), optax.polyak_sgd())
    after, _ = stepper(tx)(params, tx.init(params), grads, value=jnp.asarray(1.0))
    assert (after["out"] != params["out"]).any()


@every_mode
def test_a_chain_form_guard_under_plain_update_warns_that_it_does_not_skip(mode: str) -> None:
    params = make_params()
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adam(1e-2))
    update = tx.update if mode == "eager" else jax.jit(tx.update)
    with pytest.warns(NotATrueSkipWarning, match=r"stablenum_jax\.step"):
        _, opt_state = update(make_grads(0), tx.init(params), params)
    updates, opt_state = update(spoil(make_grads(1)), opt_state, params)  # no second warning
    assert all_finite((updates, opt_state[1:]))  # sanitised,
    assert np.asarray(updates["out"]).any()  # but not zero: the parameters change
    assert stablenum_jax.metrics(opt_state)["skipped_total"] == 1
