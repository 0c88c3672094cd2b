"""flax nnx: what a skipped step leaves as it was besides the parameters, and the state in Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import stablenum_jax
from stablenum_jax.integrations.orbax import GuardedRestore, GuardedSave
from tests.jax.helpers import all_finite, assert_same_bits, without_guard
from tests.selection import REPEATS


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(4, momentum=0.9, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.drop(self.norm(self.first(x))))


def started(tx: Any = None) -> tuple[Any, Any]:
    model = Net()
    tx = stablenum_jax.guard(optax.adamw(1e-2), clip=1.0, loss_scale="dynamic") if tx is None else tx
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def train(model: Any, optimizer: Any, x: jax.Array) -> None:
    """The recipe of docs/recipes/nnx.md, for a guard inside MultiSteps too."""
    held = lambda: nnx.as_pure((nnx.state(model, nnx.Not(nnx.Param)), optimizer.step))  # noqa: E731
    before, old = nnx.as_pure(optimizer.opt_state), held()
    loss, grads = stablenum_jax.value_and_grad(lambda model: (model(x) ** 2).mean(), optimizer)(model)
    optimizer.update(model, grads, value=loss)
    kept, optimizer.step[...] = stablenum_jax.unless_skipped(optimizer, held(), old, before=before)
    nnx.update(model, kept)


def trained(step: Any, steps: list[int], bad: set[int], now: Any = None) -> tuple[Any, Any]:
    model, optimizer = started() if now is None else now
    for i in steps:
        x = jax.random.normal(jax.random.key(i), (8, 3))
        step(model, optimizer, x.at[0, 0].set(jnp.nan) if i in bad else x)
    return model, optimizer


def ended(now: tuple[Any, Any]) -> Any:
    model, optimizer = now
    whole = nnx.as_pure((nnx.state(model), optimizer.step, optimizer.opt_state))
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return without_guard(jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, whole))


@pytest.mark.parametrize("how", [pytest.param("eager", marks=REPEATS), "jit"])
def test_statistics_counters_and_the_step_are_those_of_the_run_without_the_bad_batches(how: str) -> None:
    step = train if how == "eager" else nnx.jit(train)
    found, expected = trained(step, [0, 1, 2, 3, 4], {1, 4}), trained(step, [0, 2, 3], set())
    assert_same_bits(ended(found), ended(expected))
    model, optimizer = found
    assert int(optimizer.step[...]) == int(model.drop.rngs.count[...]) == 3
    assert all_finite(nnx.as_pure(nnx.state(model, nnx.BatchStat)))


def test_without_the_recipe_the_step_advances_and_the_statistics_are_nan() -> None:
    @nnx.jit
    def plain(model: Any, optimizer: Any, x: jax.Array) -> None:
        loss, grads = stablenum_jax.value_and_grad(lambda model: (model(x) ** 2).mean(), optimizer)(model)
        optimizer.update(model, grads, value=loss)

    model, optimizer = trained(plain, [0, 1], {1})
    assert int(optimizer.step[...]) == 2
    assert bool(jnp.isnan(model.norm.mean[...]).all())


def test_a_window_of_multisteps_ends_one_micro_batch_later() -> None:
    tx = stablenum_jax.guard(optax.MultiSteps(optax.adamw(1e-2), 3).gradient_transformation())
    found = trained(nnx.jit(train), [0, 1, 2, 3], {1}, started(tx))
    expected = trained(nnx.jit(train), [0, 2, 3], set(), started(tx))
    assert_same_bits(ended(found), ended(expected))


def test_the_optimizer_s_state_goes_through_orbax(tmp_path: Path) -> None:
    step = nnx.jit(train)
    model, optimizer = trained(step, [0, 1, 2], {1})
    saved = {"model": nnx.to_pure_dict(nnx.state(model)), "opt_state": nnx.as_pure(optimizer.opt_state)}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=GuardedSave(saved | {"step": optimizer.step[...]}))
    new_model, new_optimizer = started()
    like = {
        "model": nnx.to_pure_dict(nnx.state(new_model)),
        "opt_state": nnx.as_pure(new_optimizer.opt_state),
        "step": new_optimizer.step[...],
    }
    with ocp.CheckpointManager(tmp_path) as manager:
        found = manager.restore(0, args=GuardedRestore(like))
    state = nnx.state(new_model)
    nnx.replace_by_pure_dict(state, found["model"])
    nnx.update(new_model, state)
    nnx.update(new_optimizer.opt_state, nnx.state(found["opt_state"]))
    new_optimizer.step[...] = found["step"]
    assert_same_bits(ended((new_model, new_optimizer)), ended((model, optimizer)))
    assert stablenum_jax.guard_state_dict(new_optimizer) == stablenum_jax.guard_state_dict(optimizer)
    rest = [[3, 4], {3}]
    assert_same_bits(
        ended(trained(step, *rest, (new_model, new_optimizer))),
        ended(trained(step, *rest, (model, optimizer))),
    )
