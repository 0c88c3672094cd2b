"""Steps that are taken more carefully for a while after a rewind."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import stablenum_jax
from stablenum import EscalatePrecision
from stablenum.recovery.hooks import Easing
from stablenum.typing import Response
from stablenum_jax._recovery.easing import eased_state
from tests.jax.recovering import POLICY, batch_at, once, put, run, same

EASED = Response(skip_data=False, rate=0.5, clip=0.25, steps=10)


def followed(response: Response, hurt_at: int = 33) -> tuple[Any, list[tuple[float, float]]]:
    """Return a run that is hurt, and rate and threshold of each of its steps, of the last pass."""
    seen: dict[int, tuple[float, float]] = {}
    harm = once(hurt_at, put(("params", "last"), math.nan))

    def hurt(recovery: stablenum_jax.Recovery, step: int) -> None:
        harm(recovery, step)
        state = recovery.state["opt_state"][1]
        seen[step] = float(state.rate), float(state.clip_at)

    recovery = run(hurt=hurt, policy=dataclasses.replace(POLICY, responses=(response,)))
    return recovery, [seen[step] for step in range(1, 61)]


def test_rate_and_clip_hold_for_exactly_the_steps_named() -> None:
    recovery, steps = followed(EASED)
    (event,) = recovery.events
    assert (event.to_step, event.eased_until) == (20, 45)
    eased = (0.5, np.float32(event.clip_at))
    assert steps == [(1.0, 0.0)] * 20 + [eased] * 25 + [(1.0, 0.0)] * 15
    assert event.clip_at > 0


def test_a_fault_while_steps_are_eased_leaves_the_state_as_a_snapshot_had_it() -> None:
    gone: list[int] = []

    def hurt(recovery: stablenum_jax.Recovery, step: int) -> None:
        if step == 33 and not gone:
            recovery.state = put(("params", "last"), math.nan)(recovery.state)
            gone.append(step)
        elif step == 58 and len(gone) == 1:
            # The snapshot of step 40 was taken while steps were eased.
            recovery.state = put(("params", "last"), math.nan)(recovery.state)
            gone.append(step)
        elif step == 42 and len(gone) == 2:
            assert float(recovery.state["opt_state"][1].rate) == 0.5
            gone.append(step)

    policy = dataclasses.replace(POLICY, responses=(EASED, Response(skip_data=False)))
    recovery = run(hurt=hurt, policy=policy)
    assert [event.to_step for event in recovery.events] == [20, 40]
    assert gone == [33, 58, 42]
    assert float(recovery.state["opt_state"][1].rate) == 1.0


# --- the transformation ------------------------------------------------------------------------

PARAMS = {"a": jnp.asarray([1.0, -2.0]), "b": jnp.asarray([[0.5]], jnp.bfloat16)}
GRADS = {"a": jnp.asarray([3.0, 1e-40]), "b": jnp.asarray([[4.0]], jnp.bfloat16)}


def updates_of(tx: optax.GradientTransformation, easing: Easing | None = None, grads: Any = GRADS) -> Any:
    state = tx.init(PARAMS)
    if easing is not None:
        state = eased_state(state, easing)
    return jax.jit(tx.update)(grads, state, PARAMS)


def test_without_an_easing_updates_are_those_of_the_optimizer_bit_for_bit() -> None:
    inner = optax.adamw(optax.linear_schedule(0.1, 0.2, 5))
    updates, state = updates_of(stablenum_jax.eased(inner))
    want, inner_state = updates_of(inner)
    assert same(updates, want)
    assert same(state.inner, inner_state)
    # Here the update is among the numbers that a device may flush to zero when it multiplies them by 1.
    assert same(updates_of(stablenum_jax.eased(optax.sgd(1.0)))[0], updates_of(optax.sgd(1.0))[0])


def test_the_rate_multiplies_the_update_as_a_lower_learning_rate_does() -> None:
    half, _ = updates_of(stablenum_jax.eased(optax.adamw(0.1)), Easing(0.5, None, False, 9))
    want, _ = updates_of(optax.adamw(0.05))
    assert same(half, want)


def test_gradients_are_clipped_at_the_norm() -> None:
    clipped, _ = updates_of(stablenum_jax.eased(optax.sgd(1.0)), Easing(1.0, 2.5, False, 9))
    np.testing.assert_allclose(clipped["a"], [-1.5, 0.0], atol=1e-30)
    assert clipped["b"].dtype == jnp.bfloat16
    assert clipped["b"].tolist() == [[-2.0]]
    ordinary = {**GRADS, "a": jnp.asarray([3.0, 0.0])}
    wider, _ = updates_of(stablenum_jax.eased(optax.sgd(1.0)), Easing(1.0, 5.5, False, 9), ordinary)
    assert same(wider, updates_of(optax.sgd(1.0), grads=ordinary)[0])


def test_norms_beyond_float32_are_clipped() -> None:
    grads = {"a": jnp.asarray([3e38, 3e38]), "b": jnp.asarray([[3e38]], jnp.bfloat16)}
    clipped, _ = updates_of(stablenum_jax.eased(optax.sgd(1.0)), Easing(1.0, 3.0, False, 9), grads)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(clipped))


def test_each_of_several_eased_optimizers_is_set() -> None:
    tx = optax.partition(
        {"one": stablenum_jax.eased(optax.sgd(1.0)), "other": stablenum_jax.eased(optax.sgd(0.1))},
        {"a": "one", "b": "other"},
    )
    half, _ = updates_of(tx, Easing(0.5, None, False, 9))
    assert half["a"][0] == -1.5
    assert half["b"].tolist() == [[float(jnp.bfloat16(-0.2))]]


def test_arguments_of_update_reach_the_optimizer() -> None:
    seen = []

    def update(grads: Any, state: Any, params: Any = None, *, value: Any = None) -> Any:
        seen.append(value)
        return grads, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = stablenum_jax.eased(inner)
    tx.update(GRADS, tx.init(PARAMS), PARAMS, value=3.0)
    assert seen == [3.0]


def test_only_an_optimizer_can_be_eased() -> None:
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation"):
        stablenum_jax.eased(0.1)  # type: ignore[arg-type]


def test_over_mesh_axes_the_norm_is_that_of_all_devices() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    tx = stablenum_jax.eased(optax.sgd(1.0), axis_name="data")
    state = eased_state(tx.init(PARAMS), Easing(1.0, 2.5, False, 9))
    spec = {"a": PartitionSpec("data"), "b": PartitionSpec()}
    step = jax.shard_map(
        lambda grads: tx.update(grads, state)[0], mesh=mesh, in_specs=(spec,), out_specs=spec
    )
    np.testing.assert_allclose(jax.jit(step)(GRADS)["a"], [-1.5, 0.0], atol=1e-30)


# --- a wider format ----------------------------------------------------------------------------


def escalating() -> Any:
    guard = stablenum_jax.guard(escalate=EscalatePrecision(for_steps=7))
    return optax.chain(guard, optax.sgd(0.1)).init(PARAMS)


def level_of(state: Any) -> int:
    return int(stablenum_jax.guard_state(state).escalation.level)


def test_a_wider_format_holds_until_it_ends() -> None:
    easing = Easing(1.0, None, True, 9)
    usual = escalating()
    wide = eased_state(eased_state(usual, easing), easing)
    assert level_of(wide) == 1
    tx = optax.chain(stablenum_jax.guard(escalate=EscalatePrecision(for_steps=7)), optax.sgd(0.1))
    for _ in range(12):
        _, wide = stablenum_jax.step(tx, PARAMS, wide, GRADS)
    assert level_of(wide) == 1
    narrow = eased_state(wide, None, was_wider=True)
    assert level_of(narrow) == 0
    assert same(stablenum_jax.guard_state(narrow).escalation, stablenum_jax.guard_state(usual).escalation)


def test_a_level_that_the_guard_chose_itself_stays() -> None:
    state = eased_state(escalating(), Easing(1.0, None, True, 9))
    assert level_of(eased_state(state, None)) == 1


# --- what cannot be eased ----------------------------------------------------------------------


def plain_run(on_ease: Any = None) -> stablenum_jax.Recovery:
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    params = {"w": jnp.ones(4)}
    response = Response(rate=0.5, clip=1.0, wider=True, steps=3)
    recovery = stablenum_jax.Recovery(
        (params, tx.init(params)), dataclasses.replace(POLICY, responses=(response,) * 3), data=batch_at,
        on_ease=on_ease,
    )  # fmt: skip

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: ((batch[0] @ p["w"] - batch[1]) ** 2).mean())(params)
        return stablenum_jax.step(tx, params, opt_state, grads, value=loss)

    hurts = [38, 13]
    for batch in recovery.batches(50):
        if hurts and recovery.step == hurts[-1]:
            hurts.pop()
            recovery.report("hurt")
        recovery.state = step(recovery.state, batch)
    assert len(recovery.events) == 2
    return recovery


def test_what_cannot_be_eased_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stablenum"):
        recovery = plain_run()
    assert [event.response.eases for event in recovery.events] == [False, False]
    assert "learning rate" not in str(recovery.events[0])
    told = [record.message for record in caplog.records if "cannot ease" in record.message]
    assert len(told) == 2
    assert any("put stablenum_jax.eased around the optimizer" in text for text in told)
    assert any("a wider format (give the guard an EscalatePrecision" in text for text in told)


def test_on_ease_is_called_in_place_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Easing | None] = []
    with caplog.at_level(logging.WARNING, "stablenum"):
        plain_run(calls.append)
    assert not any("cannot ease" in record.message for record in caplog.records)
    first, end, second, last = calls
    assert (end, last) == (None, None)
    assert (first.rate, first.wider, first.until) == (0.5, True, 16)
    assert second.until == 41


def test_an_optimizer_of_nnx_is_eased_in_place() -> None:
    from flax import nnx

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = stablenum_jax.guard(stablenum_jax.eased(optax.sgd(1.0)), escalate=EscalatePrecision())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = eased_state((model, optimizer), Easing(0.5, None, True, 9))
    assert state[1] is optimizer
    assert float(optimizer.opt_state[1].rate[...]) == 0.5
    assert level_of(optimizer) == 1
    before = np.asarray(model.kernel[...])
    grads = nnx.grad(lambda m: m(jnp.ones((1, 2))).sum())(model)
    optimizer.update(model, grads)
    np.testing.assert_allclose(model.kernel[...], before - 0.5)
