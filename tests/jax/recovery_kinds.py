"""Kinds of data and of states that a recovery takes up again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from tests.jax.recovering import INPUTS, TARGETS, batch_at

BATCHES = [(INPUTS[i], TARGETS[i]) for i in range(16)]


class Shuffled:
    """Batches in a new order in each epoch, by a generator of the process."""

    def __init__(self, shuffle: Callable[[list[int]], object]) -> None:
        self._shuffle = shuffle

    def __iter__(self) -> Iterator[Any]:
        order = list(range(16))
        self._shuffle(order)
        for i in order:
            yield BATCHES[i]


def _numpys() -> Any:
    np.random.seed(5)
    return Shuffled(np.random.shuffle)


def _pythons() -> Any:
    random.seed(5)
    return Shuffled(random.shuffle)


def _torchs() -> Any:
    data = pytest.importorskip("torch.utils.data")
    pytest.importorskip("torch").manual_seed(5)
    return data.DataLoader(BATCHES, batch_size=None, shuffle=True, collate_fn=list)


def keyed_loader() -> Any:
    """A DataLoader of torch with a generator of its own."""
    data = pytest.importorskip("torch.utils.data")
    generator = pytest.importorskip("torch").Generator().manual_seed(5)
    return data.DataLoader(BATCHES, batch_size=None, shuffle=True, collate_fn=list, generator=generator)


def _grains_dataset() -> Any:
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(BATCHES).shuffle(seed=5).repeat().to_iter_dataset()


def _grains_iterator() -> Any:
    return iter(_grains_dataset())


def _grains_loader() -> Any:
    grain = pytest.importorskip("grain.python")
    sampler = grain.IndexSampler(16, shuffle=True, seed=5, shard_options=grain.NoSharding())
    return grain.DataLoader(data_source=BATCHES, sampler=sampler, operations=[], worker_count=0)


DATA = {
    "a list": lambda: BATCHES,
    "a function": lambda: batch_at,
    "shuffled by NumPy": _numpys,
    "shuffled by Python": _pythons,
    "a DataLoader of torch": _torchs,
    "a dataset of grain": _grains_dataset,
    "an iterator of grain": _grains_iterator,
    "a DataLoader of grain": _grains_loader,
}


# --- states: the first one, a step, and a harm -------------------------------------------------


def _optimizer() -> Any:
    return stablenum_jax.guard(stablenum_jax.eased(optax.adam(0.01)), loss_scale="dynamic")


def _linen() -> tuple[Any, Any, Any]:
    """flax: a TrainState with the statistics of a batch norm, and a key for dropout."""
    from flax import linen as nn

    from stablenum_jax.integrations.flax import TrainState

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(8, param_dtype=jnp.bfloat16)(x))
            return nn.Dense(1)(nn.Dropout(0.1, deterministic=False)(nn.relu(x)))[..., 0]

    class KeyedState(TrainState):
        key: Any = None

    model, tx = Model(), _optimizer()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, INPUTS[0])

    def first() -> Any:
        return KeyedState.create(
            apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"],
            tx=tx, key=jax.random.key(2),
        )  # fmt: skip

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        key, dropout = jax.random.split(state.key)

        def loss_fn(params: Any) -> Any:
            out, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, batch[0],
                mutable=["batch_stats"], rngs={"dropout": dropout},
            )  # fmt: skip
            return ((out - batch[1]) ** 2).mean(), new["batch_stats"]

        (loss, stats), grads = stablenum_jax.value_and_grad(loss_fn, state, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, value=loss, batch_stats=stats, key=key)

    def hurt(state: Any) -> Any:
        stats = jax.tree.map(lambda x: x.at[0].set(jnp.nan), state.batch_stats)
        return state.replace(batch_stats=stats)

    return first, step, hurt


def _nnx() -> tuple[Any, Any, Any]:
    """nnx: a module with batch norm and dropout, and its optimizer, which are changed in place."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.dropout, self.last = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))[..., 0]

    tx = stablenum_jax.guard(optax.adam(0.01))

    def first() -> Any:
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train(model: Any, optimizer: Any, batch: Any) -> None:
        loss, grads = nnx.value_and_grad(lambda m: ((m(batch[0]) - batch[1]) ** 2).mean())(model)
        optimizer.update(model, grads, value=loss)

    def step(state: Any, batch: Any) -> Any:
        train(*state, batch)
        return state

    def hurt(state: Any) -> Any:
        state[0].norm.var[...] = state[0].norm.var[...].at[0].set(jnp.nan)
        return state

    return first, step, hurt


def _equinox() -> tuple[Any, Any, Any]:
    """equinox: a module, whose activation functions are leaves."""
    eqx = pytest.importorskip("equinox")
    tx = stablenum_jax.guard(optax.adam(0.01))

    @eqx.filter_jit
    def step(state: Any, batch: Any) -> Any:
        model, opt_state, key = state
        key, noise = jax.random.split(key)
        inputs = batch[0] + 0.1 * jax.random.normal(noise, batch[0].shape)
        loss, grads = eqx.filter_value_and_grad(lambda m: ((jax.vmap(m)(inputs) - batch[1]) ** 2).mean())(
            model
        )
        return *stablenum_jax.step(tx, model, opt_state, grads, value=loss), key

    def hurt(state: Any) -> Any:
        bad = eqx.tree_at(lambda m: m.layers[0].bias, state[0], replace_fn=lambda b: b.at[0].set(jnp.nan))
        return bad, *state[1:]

    def first() -> Any:
        model = eqx.nn.MLP(4, "scalar", 8, 1, key=jax.random.key(0))
        return model, tx.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(3)

    return first, step, hurt


KINDS = {"linen": _linen, "nnx": _nnx, "equinox": _equinox}
