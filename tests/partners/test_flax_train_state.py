"""The guard's ``TrainState``: what a skipped step leaves as it was, where it runs, and flax's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.core import freeze
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale

import stablenum
import stablenum_jax
from stablenum_jax.integrations.flax import TrainState
from tests.jax.helpers import all_finite, assert_same_bits, make_grads, make_params, spoil, without_guard
from tests.selection import REPEATS


class Net(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(4, dtype=self.dtype)(x))
        return nn.Dense(1, dtype=self.dtype)(x)


def batch(step: int, *, bad: bool = False) -> jax.Array:
    return jax.random.normal(jax.random.key(step), (8, 3)).at[0, 0].multiply(jnp.nan if bad else 1.0)


def first_state(tx: Any = None, dtype: Any = jnp.float32) -> TrainState:
    net = Net(dtype)
    variables = net.init(jax.random.key(0), batch(0))
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(0.1)) if tx is None else tx
    return TrainState.create(apply_fn=net.apply, tx=tx, **variables)


def train(state: TrainState, x: jax.Array, target: float = 0.0) -> TrainState:
    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, changed = state.apply_fn(variables, x, mutable=["batch_stats"])
        return ((y.astype(jnp.float32) - target) ** 2).mean(), changed["batch_stats"]

    (loss, stats), grads = stablenum_jax.value_and_grad(loss_fn, state, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, value=loss, batch_stats=stats)


def ended(state: TrainState) -> Any:
    """All that a skipped step must leave alone."""
    return without_guard((state.step, state.params, state.opt_state, state.batch_stats))


def trained(step: Any, steps: list[int], bad: set[int], state: Any = None) -> TrainState:
    state = first_state() if state is None else state
    for i in steps:
        state = step(state, batch(i, bad=i in bad))
    return state


@pytest.mark.parametrize("how", [pytest.param("eager", marks=REPEATS), "jit", "donated"])
def test_a_run_with_bad_batches_ends_bit_equal_to_the_run_without_them(how: str) -> None:
    step = {"eager": train, "jit": jax.jit(train), "donated": jax.jit(train, donate_argnums=0)}[how]
    found = trained(step, [0, 1, 2, 3, 4], {0, 3})
    assert_same_bits(ended(found), ended(trained(step, [1, 2, 4], set())))
    assert int(found.step) == 3
    assert all_finite(ended(found))
    assert [row["applied"] for row in stablenum_jax.history(found)] == [False, True, True, False, True]
    assert stablenum_jax.scalars(found)["skipped_total"] == 2


def test_in_a_scan_the_state_is_the_carry() -> None:
    xs = jnp.stack([batch(i, bad=i == 1) for i in range(4)])
    found, _ = jax.jit(lambda s: jax.lax.scan(lambda s, x: (train(s, x), None), s, xs))(first_state())
    expected = trained(jax.jit(train), [0, 2, 3], set())
    np.testing.assert_array_equal(found.step, 3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), ended(found), ended(expected)
    )


@pytest.mark.parametrize("bad", [False, True])
def test_structure_and_types_never_change_after_create(bad: bool) -> None:
    first = first_state()
    after = jax.eval_shape(lambda s: train(s, batch(0, bad=bad)), first)
    assert jax.tree.structure(first) == jax.tree.structure(after)
    assert [jax.typeof(x) for x in jax.tree.leaves(first)] == [
        jax.core.ShapedArray(x.shape, x.dtype) for x in jax.tree.leaves(after)
    ]


def test_with_nothing_to_clip_it_does_what_flax_does() -> None:
    tx = optax.adamw(1e-2)
    theirs = train_state.TrainState.create(apply_fn=None, params=make_params(), tx=tx)
    ours = TrainState.create(apply_fn=None, params=make_params(), tx=optax.chain(stablenum_jax.guard(), tx))
    for i in range(3):
        theirs = jax.jit(lambda s, g: s.apply_gradients(grads=g))(theirs, make_grads(i))
        ours = jax.jit(lambda s, g: s.apply_gradients(grads=g))(ours, make_grads(i))
    assert int(ours.step) == int(theirs.step) == 3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours.params, theirs.params)


def test_a_loss_scale_shrinks_at_a_skip_and_the_gradients_are_unscaled() -> None:
    tx = optax.chain(stablenum_jax.guard(loss_scale="dynamic"), optax.sgd(0.1))
    plain = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    state = trained(jax.jit(train), [0, 1, 2], set(), first_state(tx))
    expected = trained(jax.jit(train), [0, 1, 2], set(), first_state(plain))
    assert_same_bits(ended(state)[1], ended(expected)[1])  # a power of two changes no bit
    half = first_state(tx, jnp.float16)
    after = jax.jit(train)(half, batch(0), 100.0)  # 65536 times the gradient does not fit in float16
    assert stablenum_jax.metrics(after)["reason"].name in ("INF_GRADIENT", "NAN_GRADIENT")
    assert stablenum_jax.loss_scale(after) == 2.0**15
    assert_same_bits(ended(after), ended(half))


@pytest.mark.parametrize("frozen", [False, True])
def test_8_bit_statistics_are_replaced_and_kept_at_a_skip(frozen: bool) -> None:
    params = {"params": make_params(), "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    params = freeze(params) if frozen else params
    state = TrainState.create(
        apply_fn=None, params=params, tx=optax.chain(stablenum_jax.guard(), optax.adam(1e-2))
    )
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    grads = {"params": make_grads(0), "_overwrite_with_gradient": {"scale": jnp.full(1, 5.0)}}
    bad = {"params": spoil(make_grads(1)), "_overwrite_with_gradient": {"scale": jnp.full(1, 7.0)}}
    grads, bad = (freeze(g) if frozen else g for g in (grads, bad))
    after = step(state, grads)
    assert after.params["_overwrite_with_gradient"]["scale"] == 5.0
    skipped = step(after, bad)
    assert_same_bits(ended(skipped), ended(after))
    assert not stablenum_jax.metrics(skipped)["applied"]


def test_inside_multisteps_a_good_micro_batch_after_a_bad_one_is_kept() -> None:
    tx = optax.MultiSteps(optax.chain(stablenum_jax.guard(), optax.sgd(0.1)), 3).gradient_transformation()
    found = trained(jax.jit(train), [0, 1, 2, 3, 4], {1}, first_state(tx))
    expected = trained(jax.jit(train), [0, 2, 3, 4], set(), first_state(tx))
    assert_same_bits(ended(found), ended(expected))
    assert int(found.step) == 4


def test_flax_serialization_and_orbax_restore_it_exactly(tmp_path: Path) -> None:
    state = trained(jax.jit(train), [0, 1, 2], {1})
    packed = flax.serialization.from_bytes(first_state(), flax.serialization.to_bytes(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        stored = checkpointer.restore(tmp_path / "state", first_state())
    expected = trained(jax.jit(train), [3, 4], {3}, state)
    for restored in (packed, stored):
        assert_same_bits(jax.tree.leaves(restored), jax.tree.leaves(state))
        resumed = trained(jax.jit(train), [3, 4], {3}, restored)
        assert_same_bits(jax.tree.leaves(resumed), jax.tree.leaves(expected))


class WithMore(TrainState):
    key: jax.Array
    dynamic_scale: Any = None


def test_a_subclass_holds_its_own_fields_but_a_dynamic_scale_shrinks() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    state = WithMore.create(
        apply_fn=None,
        params=make_params(),
        tx=tx,
        key=jax.random.key(0),
        dynamic_scale=DynamicScale(fin_steps=jnp.asarray(0), scale=jnp.asarray(64.0)),
    )

    @jax.jit
    def step(state: Any, factor: jax.Array) -> Any:
        loss_fn = lambda params: factor * sum(jnp.sum(p) for p in jax.tree.leaves(params))  # noqa: E731
        scale, _, loss, grads = state.dynamic_scale.value_and_grad(loss_fn)(state.params)
        key = jax.random.split(state.key)[0]
        return state.apply_gradients(grads=grads, value=loss, key=key, dynamic_scale=scale)

    after = step(state, jnp.asarray(jnp.inf))
    assert after.key == state.key
    assert after.dynamic_scale.scale == 32.0
    applied = step(after, jnp.asarray(1.0))
    assert applied.key == jax.random.split(state.key)[0]
    assert applied.dynamic_scale.fin_steps == 1


def test_an_optimizer_without_a_guard_or_with_two_is_refused() -> None:
    make = lambda tx: TrainState.create(apply_fn=None, params=make_params(), tx=tx)  # noqa: E731
    with pytest.raises(ValueError, match=r"tx must hold exactly one guard; got none\. Write optax\.chain\("):
        make(optax.adam(1e-2))
    with pytest.raises(ValueError, match=r"tx must hold exactly one guard; got 2"):
        make(optax.chain(stablenum_jax.guard(), stablenum_jax.guard(optax.adam(1e-2))))
    with pytest.raises(TypeError, match=r"tx must be an optax\.GradientTransformation"):
        make("adam")


def test_a_halt_raises_and_the_state_is_still_good() -> None:
    tx = stablenum_jax.guard(optax.adam(1e-2), max_skips_in_a_row=1)
    state = TrainState.create(apply_fn=None, params=make_params(), tx=tx)
    with pytest.raises(stablenum.NonFiniteError, match="out") as caught:
        state.apply_gradients(grads=spoil(make_grads(0)))
    halted = state.replace(opt_state=caught.value.opt_state)
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    assert int(step(halted, make_grads(1)).step) == 0
    assert int(step(stablenum_jax.clear_halt(halted), make_grads(1)).step) == 1


def test_unknown_fields_and_fields_of_another_structure_are_named() -> None:
    state = TrainState.create(apply_fn=None, params=make_params(), tx=stablenum_jax.guard(optax.adam(1e-2)))
    with pytest.raises(TypeError, match=r"loss must be a field of TrainState besides .*The loss is value="):
        state.apply_gradients(grads=make_grads(0), loss=jnp.asarray(1.0))
    with pytest.raises(
        ValueError, match=r"batch_stats must keep the structure.*Give the first value to create"
    ):
        state.apply_gradients(grads=make_grads(0), batch_stats={"mean": jnp.ones(2)})


def test_a_state_is_shown_in_one_line_without_its_arrays() -> None:
    class WithStatistics(TrainState):
        ema: Any = None

    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    for cls in (TrainState, WithStatistics):
        state = cls.create(apply_fn=jnp.dot, params={"w": jnp.ones(2)}, tx=tx)
        count = len(jax.tree.leaves((state.params, state.opt_state)))
        shown = f"(apply_fn=dot, tx={type(tx).__name__}, arrays={count})"
        jax.tree.map(lambda x: x.delete(), (state.params, state.opt_state))
        assert repr(state) == cls.__name__ + shown


def test_without_a_loss_the_logs_show_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-2))
    state = TrainState.create(apply_fn=None, params={"no_loss": jnp.ones(2)}, tx=tx)
    with stablenum_jax.RunLog(tmp_path / "run.jsonl") as log:
        for bad in (False, True, True, True):
            state = state.apply_gradients(grads={"no_loss": jnp.full(2, jnp.nan if bad else 1.0)})
            log(state, state.params)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text("utf-8").splitlines()[1:]]
    assert len(lines) == 4
    assert not any("loss" in line for line in lines)
    assert "loss" not in stablenum_jax.scalars(state)
    assert "3 steps in a row" in caplog.text
    assert "loss nan" not in caplog.text
