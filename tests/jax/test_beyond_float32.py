"""Finite gradients are clipped to what was asked, whatever their size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax
from stablenum import AdaptiveGradClip, ClipByNorm
from stablenum_jax._step.measure.norms import ordinary_norms
from stablenum_jax._step.measure.over_axes import norms_over_axes
from tests.huge_gradients import HUGE_GRADIENTS, recorded_norm
from tests.jax.helpers import every_mode
from tests.selection import only, slow_but_for


def moved(mode: str, grads: list[Any], *, clip: Any = 1.0, scale: float | None = None) -> tuple[Any, Any]:
    """How far one step of SGD with learning rate 1 moves each parameter, in float64, and the record."""
    tx = optax.chain(stablenum_jax.guard(clip=clip, loss_scale=scale), optax.sgd(1.0))
    params = [jnp.zeros_like(g) for g in grads]

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        return stablenum_jax.step(tx, params, opt_state, grads)

    run = jax.jit(step) if mode == "jit" else step
    after, opt_state = run(params, tx.init(params), grads)
    norms = [np.linalg.norm(np.asarray(p, np.float64)) for p in after]
    return norms, stablenum_jax.metrics(opt_state)


# Scaled up, not scaled, and scaled down, of one element and of many; the core is tested with all of them.
SOME = [
    (1.0, *HUGE_GRADIENTS[0], "jit"),
    (1e-6, *HUGE_GRADIENTS[3], "eager"),
    (1e-6, *HUGE_GRADIENTS[4], "jit"),
]
ROWS = [(limit, *huge, mode) for limit in (1.0, 1e-6) for huge in HUGE_GRADIENTS for mode in ("eager", "jit")]


@pytest.mark.parametrize(("limit", "element", "n", "scale", "mode"), slow_but_for(SOME, ROWS))
def test_float32_gradients_keep_the_norm_that_was_asked_for(mode, element, n, scale, limit):
    (norm,), record = moved(mode, [jnp.full(n, element)], clip=limit, scale=scale)
    assert norm == pytest.approx(limit, rel=1e-5)
    assert record["grad_norm"] == pytest.approx(recorded_norm(element, n, scale), rel=1e-6)


@pytest.mark.sampled
@every_mode
@pytest.mark.parametrize("size", [1e39, 1e100, 1e200, 1e307])
def test_float64_gradients_keep_the_norm_that_was_asked_for(mode, size):
    with jax.enable_x64(True):
        norms, _ = moved(mode, [jnp.full(4, size), jnp.ones(3, jnp.float32)])
    assert norms[0] == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("mode", only(["jit"], ["eager", "jit"]))
def test_a_small_tensor_beside_a_huge_one_keeps_its_own_factor(mode):
    with jax.enable_x64(True):
        grads = [jnp.full(4, 1e200), jnp.full(4, 0.25), jnp.full(4, 3e38, jnp.float32)]
        norms, _ = moved(mode, grads, clip=ClipByNorm(1.0))
        np.testing.assert_allclose(norms, [1.0, 0.5, 1.0], rtol=1e-5)
        by_row = [jnp.asarray([[1e200, 1.0], [1e200, 1.0]])]  # a unit is a column
        tx = stablenum_jax.guard(optax.sgd(1.0), clip=AdaptiveGradClip(clipping=0.5, eps=1.0))
        params = [jnp.zeros((2, 2))]
        updates, _ = tx.update(by_row, tx.init(params), params)
        np.testing.assert_allclose(jnp.linalg.norm(updates[0], axis=0), [0.5, 0.5], rtol=1e-5)


@pytest.mark.parametrize("mode", only(["jit"], ["eager", "jit"]))
def test_an_update_through_the_wrapper_form_and_multi_steps(mode):
    """There the gradients are unscaled before they are summed, and scaled again to be judged."""
    inner = optax.chain(stablenum_jax.guard(clip=1.0, loss_scale=65536.0), optax.sgd(1.0))
    tx = optax.MultiSteps(inner, 2)
    params, grads = [jnp.zeros(100)], [jnp.full(100, 3.1e38)]

    def train(params: Any) -> Any:
        opt_state = tx.init(params)
        for _ in range(2):
            params, opt_state = stablenum_jax.step(tx, params, opt_state, grads)
        return params

    (after,) = (jax.jit(train) if mode == "jit" else train)(params)
    assert float(jnp.linalg.norm(after)) == pytest.approx(1.0, rel=1e-5)


def test_shards_are_joined_beyond_float32():
    grads = np.full((1, 400), 3e38, np.float32)
    tx = stablenum_jax.guard(clip=1.0, axis_name="shard")
    state = tx.init(np.zeros((400,), np.float32))

    def update(g: Any) -> Any:
        return stablenum_jax.guard(optax.sgd(1.0), clip=1.0, axis_name="shard").update(
            g, stablenum_jax.guard(optax.sgd(1.0), clip=1.0).init(g), g
        )[0]

    moved_by = jax.vmap(update, axis_name="shard")(jnp.asarray(grads.reshape(4, 100)))
    assert float(np.linalg.norm(np.asarray(moved_by, np.float64))) == pytest.approx(1.0, rel=1e-5)
    assert stablenum.GuardState._fields == state.guard._fields


@pytest.mark.parametrize("each", [3e38, 3e30])
def test_the_joint_norm_of_shards_may_be_beyond_float32(each):
    shards = jnp.full((4, 1), each)
    joint = jax.vmap(lambda n: norms_over_axes(ordinary_norms(n), "shards"), axis_name="shards")(shards)
    assert joint.power is not None
    found = np.asarray(joint.value, np.float64) * 2.0 ** np.asarray(joint.power)
    np.testing.assert_allclose(found, 2 * each, rtol=1e-6)
