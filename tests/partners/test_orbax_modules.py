"""Orbax: models with lists of layers, of flax nnx, equinox and linen, are restored as they were saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import stablenum
import stablenum_jax
from stablenum.commands.verify.looking import look_at
from stablenum_jax.integrations.orbax import GuardedCheckpointHandler, GuardedRestore, GuardedSave
from tests.jax.helpers import assert_same_bits


class Net(nnx.Module):
    """Layers as ``make`` holds them, each called in turn, then dropout."""

    def __init__(self, make: Callable[[Callable[[], Any]], Any], seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.layers = make(lambda: nnx.Linear(4, 4, rngs=rngs))
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.norm(called(self.layers, x)))


def called(layers: Any, x: jax.Array) -> jax.Array:
    if callable(layers):
        return layers(x)
    parts = [layers[name] for name in ("a", "b")] if isinstance(layers, nnx.Dict) else layers
    for part in parts:
        x = called(part, x)
    return x


MODELS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "attribute": lambda layer: layer(),
    "List": lambda layer: nnx.List([layer(), layer()]),
    "List of eleven": lambda layer: nnx.List([layer() for _ in range(11)]),
    "Sequential": lambda layer: nnx.Sequential(layer(), nnx.relu, layer()),
    "Sequential that starts with a function": lambda layer: nnx.Sequential(nnx.relu, layer()),
    "List of Lists": lambda layer: nnx.List([nnx.List([layer(), layer()]), nnx.List([layer()]), layer()]),
    "List of a Sequential": lambda layer: nnx.List([nnx.Sequential(layer(), nnx.relu), layer()]),
    "Dict": lambda layer: nnx.Dict({"a": layer(), "b": layer()}),
    "Dict of Lists": lambda layer: nnx.Dict({"a": nnx.List([layer()]), "b": nnx.List([layer(), layer()])}),
}
every_model = pytest.mark.parametrize("kind", MODELS)


def started(kind: str, seed: int = 0) -> dict[str, Any]:
    model = Net(MODELS[kind], seed)
    tx = stablenum_jax.guard(optax.adamw(1e-2), clip=1.0, loss_scale="dynamic")
    return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}


@nnx.jit
def step(model: Any, optimizer: Any, x: jax.Array) -> None:
    loss_fn = lambda model: (model(x) ** 2).mean()  # noqa: E731
    loss, grads = stablenum_jax.value_and_grad(loss_fn, optimizer)(model)
    optimizer.update(model, grads, value=loss)


def trained(state: dict[str, Any], steps: range) -> dict[str, Any]:
    """Train for some steps, of which the second is bad."""
    for i in steps:
        x = jax.random.normal(jax.random.key(i), (8, 4))
        step(state["model"], state["optimizer"], x.at[0, 0].set(jnp.nan) if i == 1 else x)
    return state


def bare(state: Any) -> Any:
    """The state's arrays by their paths, and the data of random keys in place of the keys."""
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return {jax.tree_util.keystr(path): data(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}


def assert_resumes(found: dict[str, Any], state: dict[str, Any]) -> None:
    """The two are the same training, now and some steps later."""
    assert jax.tree.structure(found["model"]) == jax.tree.structure(state["model"])
    assert stablenum_jax.guard_state_dict(found["optimizer"]) == stablenum_jax.guard_state_dict(
        state["optimizer"]
    )
    assert_same_bits(bare(found), bare(state))
    assert_same_bits(bare(trained(found, range(3, 5))), bare(trained(state, range(3, 5))))


def save(folder: Path, state: Any, number: int = 0) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(number, args=GuardedSave(state))


def restored(folder: Path, like: Any, number: int = 0) -> Any:
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(number, args=GuardedRestore(like))


@every_model
def test_modules_of_nnx_resume_exactly(tmp_path: Path, kind: str) -> None:
    state = trained(started(kind), range(3))
    save(tmp_path, state)
    assert_resumes(restored(tmp_path, started(kind, seed=1)), state)


def test_alone_in_a_composite_and_onto_abstract_arrays(tmp_path: Path) -> None:
    state = trained(started("List of Lists"), range(3))
    with ocp.Checkpointer(GuardedCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "alone", args=GuardedSave(state))
        like = GuardedRestore(started("List of Lists", seed=1))
        assert_same_bits(bare(checkpointer.restore(tmp_path / "alone", args=like)), bare(state))
    is_guard = lambda x: isinstance(x, stablenum_jax.typing.GuardOptState)  # noqa: E731
    to_shape = lambda x: x if is_guard(x) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # noqa: E731
    like = jax.tree.map(to_shape, started("List of Lists", seed=1), is_leaf=is_guard)
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(0, args=ocp.args.Composite(state=GuardedSave(state), note=ocp.args.JsonSave({"a": 1})))
        manager.wait_until_finished()
        found = manager.restore(0, args=ocp.args.Composite(state=GuardedRestore(like))).state
    assert_resumes(found, state)


def test_other_rules_start_from_scratch_beside_a_list(tmp_path: Path) -> None:
    state = trained(started("List"), range(3))
    save(tmp_path, state)
    model = Net(MODELS["List"], 1)
    tx = stablenum_jax.guard(optax.adamw(1e-2), clip=2.0, spike="skip")
    with pytest.warns(stablenum.StatisticsNotLoadedWarning):
        found = restored(tmp_path, {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)})
    assert_same_bits(bare(found["model"]), bare(state["model"]))
    trained(found, range(3, 5))


def test_orbax_describes_what_is_saved(tmp_path: Path) -> None:
    save(tmp_path, started("List"))
    with ocp.CheckpointManager(tmp_path, item_handlers=GuardedCheckpointHandler()) as manager:
        found = manager.item_metadata(0)
    assert found["model"]["layers"]["1"]["kernel"]["value"].shape == (4, 4)


@pytest.mark.parametrize("kind", ["List", "Sequential", "List of Lists"])
def test_verify_reads_modules_and_says_which_of_them_orbax_cannot_restore(tmp_path: Path, kind: str) -> None:
    state = trained(started(kind), range(1))
    save(tmp_path, state)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"model": state["model"]}))
    outcomes, _ = look_at(tmp_path)
    assert [(outcome.word, outcome.why) for outcome in outcomes] == [("good", ""), ("good", "")]
    ours, without_us = (outcome.verdict.notes for outcome in outcomes)
    assert not any("cannot restore" in note for note in ours)
    (note,) = without_us
    assert "Orbax cannot restore default" in note
    assert "nnx.state" in note


def test_equinox_with_a_list_of_layers(tmp_path: Path) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-2))

    def new(seed: int) -> dict[str, Any]:
        params = eqx.filter(eqx.nn.MLP(4, 4, 4, 2, key=jax.random.key(seed)), eqx.is_array)
        return {"params": params, "opt_state": tx.init(params)}

    state = new(0)
    grads = jax.tree.map(jnp.ones_like, state["params"])
    _, state["opt_state"] = stablenum_jax.step(tx, state["params"], state["opt_state"], grads)
    save(tmp_path, state)
    assert_same_bits(restored(tmp_path, new(1)), state)


@pytest.mark.parametrize("keys", [["0", "1", "10", "2"], [0, 1, 2, 10], ["a", "0"]])
def test_dicts_whose_keys_look_like_numbers(tmp_path: Path, keys: list[Any]) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adamw(1e-2))

    def new(seed: int) -> dict[str, Any]:
        params = {
            key: nn.Dense(3).init(jax.random.key(seed + i), jnp.ones(2))["params"]
            for i, key in enumerate(keys)
        }
        return {"params": params, "opt_state": tx.init(params)}

    state = new(0)
    save(tmp_path, state)
    assert_same_bits(restored(tmp_path, new(100)), state)
