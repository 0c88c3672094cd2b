"""What a skipped step does to collections that the forward pass changes."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import stablenum_jax


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(4)(x))
        return nn.Dense(1)(x)


def batch(step: int, bad: bool) -> jax.Array:
    x = jax.random.normal(jax.random.key(step), (8, 3))
    return x * jnp.nan if bad else x


def train_linen(steps: list[int], bad: set[int], *, keep: bool) -> Any:
    net = Net()
    variables = net.init(jax.random.key(0), batch(0, False))
    params, stats = variables["params"], variables["batch_stats"]
    tx = optax.chain(stablenum_jax.guard(), optax.adamw(0.1))
    opt_state = tx.init(params)

    @jax.jit
    def train(params: Any, stats: Any, opt_state: Any, x: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            y, changed = net.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
            return (y**2).mean(), changed["batch_stats"]

        (loss, new), grads = stablenum_jax.value_and_grad(loss_fn, opt_state, has_aux=True)(params)
        params, opt_state = stablenum_jax.step(tx, params, opt_state, grads, value=loss)
        return params, stablenum_jax.unless_skipped(opt_state, new, stats) if keep else new, opt_state

    for step in steps:
        params, stats, opt_state = train(params, stats, opt_state, batch(step, step in bad))
    return params, stats


def test_a_run_with_bad_batches_ends_bit_equal_to_the_run_without_them() -> None:
    found = train_linen([0, 1, 2, 3, 4], {0, 3}, keep=True)
    expected = train_linen([1, 2, 4], set(), keep=True)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_without_it_the_statistics_are_nan_for_good() -> None:
    params, stats = train_linen([0, 1, 2], {1}, keep=False)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert jnp.isnan(stats["BatchNorm_0"]["mean"]).all()


@pytest.mark.parametrize("bad", [False, True])
def test_the_state_of_an_nnx_module(bad: bool) -> None:
    norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    params = {"w": jnp.ones(3)}
    before = jax.tree.map(jnp.copy, nnx.state(norm, nnx.BatchStat))
    y = norm(batch(0, bad))
    grads = {"w": y.sum(0)}
    _, opt_state = stablenum_jax.step(tx, params, tx.init(params), grads)
    nnx.update(norm, stablenum_jax.unless_skipped(opt_state, nnx.state(norm, nnx.BatchStat), before))
    assert bool(jnp.isfinite(norm.mean[...]).all())
    assert bool((norm.mean[...] == 0).all()) is bad


def test_keys_and_leaves_that_are_no_arrays() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    params = {"w": jnp.ones(3)}
    _, opt_state = stablenum_jax.step(tx, params, tx.init(params), {"w": jnp.full(3, jnp.nan)})
    old = {"key": jax.random.key(0), "count": 1, "none": None, "f": jnp.tanh}
    new = {"key": jax.random.key(1), "count": 2, "none": None, "f": jnp.tanh}
    kept = stablenum_jax.unless_skipped(opt_state, new, old)
    assert kept["key"] == old["key"]
    assert kept["count"] == 1
    assert kept["f"] is jnp.tanh


def inside_multisteps() -> Any:
    return optax.MultiSteps(optax.chain(stablenum_jax.guard(), optax.sgd(0.1)), 3).gradient_transformation()


def test_a_good_micro_batch_after_a_bad_one_is_not_taken_for_a_skip() -> None:
    tx, params = inside_multisteps(), {"w": jnp.ones(2)}

    @jax.jit
    def train(params: Any, opt_state: Any, seen: Any, g: Any) -> Any:
        params, after = stablenum_jax.step(tx, params, opt_state, {"w": g})
        return params, after, stablenum_jax.unless_skipped(after, seen + 1, seen, before=opt_state)

    opt_state, seen, counts = tx.init(params), jnp.asarray(0), []
    for i in range(6):
        params, opt_state, seen = train(params, opt_state, seen, jnp.full(2, jnp.nan if i in {1, 3} else 1.0))
        counts.append(int(seen))
    assert counts == [1, 1, 2, 2, 3, 4]


def test_inside_multisteps_the_state_before_the_step_is_needed() -> None:
    tx, params = inside_multisteps(), {"w": jnp.ones(2)}
    opt_state = tx.init(params)
    with pytest.raises(
        ValueError, match=r"before must be the state before the step.*guard\(optax\.MultiSteps"
    ):
        stablenum_jax.unless_skipped(opt_state, 1, 0)


def test_a_halted_guard_keeps_the_old_collections_whether_or_not_the_state_before_is_known() -> None:
    tx, params = optax.chain(stablenum_jax.guard(max_skips_in_a_row=1), optax.sgd(0.1)), {"w": jnp.ones(2)}
    step = jax.jit(lambda s, g: stablenum_jax.step(tx, params, s, {"w": g})[1])
    halted = step(tx.init(params), jnp.full(2, jnp.nan))
    after = step(halted, jnp.ones(2))
    assert stablenum_jax.unless_skipped(after, 1, 0) == 0
    assert stablenum_jax.unless_skipped(after, 1, 0, before=halted) == 0
