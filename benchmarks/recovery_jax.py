"""A training in JAX with and without a recovery, for :mod:`benchmarks.recovery_cost`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum_jax
from benchmarks.recovery_cost import Training
from stablenum_jax._recovery.captured import Captured

__all__ = ["training"]

_LAYERS, _BATCH = 4, 64
_TX = optax.chain(stablenum_jax.guard(clip=1.0), stablenum_jax.eased(optax.adamw(1e-3)))


@functools.partial(jax.jit, donate_argnums=0)
def _train_step(state: Any, batch: Any) -> Any:
    params, opt_state = state

    def loss_fn(params: Any) -> Any:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return ((x - batch) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return stablenum_jax.step(_TX, params, opt_state, grads, value=loss)


def training(width: int, options: Mapping[str, Any] | None, device: str = "cpu") -> Training:
    """Return a training of four layers.

    Args:
        width: the width of each layer.
        options: settings of the recovery; None for none.
        device: where the training runs.
    """
    with jax.default_device(jax.devices(device)[0]):
        return _training(width, options)


def _training(width: int, options: Mapping[str, Any] | None) -> Training:
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32) for _ in range(_LAYERS)]
    state = params, _TX.init(params)
    batches = [jnp.asarray(rng.normal(size=(_BATCH, width)), jnp.float32) for _ in range(8)]
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    held = 0
    if options is not None:
        held = sum(array.nbytes for array in _arrays(Captured.of(state, {}).to_plain()))
    run = _steps(state, batches, options)
    next(run)
    return Training(run.send, size, held)


def _steps(state: Any, batches: Any, options: Mapping[str, Any] | None) -> Any:
    """Take the number of steps that it is sent, again and again."""
    if options is None:
        number = 0
        while True:
            for _ in range((yield) or 0):
                state = _train_step(state, batches[number % len(batches)])
                number += 1
            jax.block_until_ready(state)
    recovery = stablenum_jax.Recovery(state, data=batches, **options)
    del state
    following: Iterator[Any] = recovery.batches(10**9)
    while True:
        for _ in range((yield) or 0):
            recovery.state = _train_step(recovery.state, next(following))
        jax.block_until_ready(recovery.state)


def _arrays(plain: Any) -> Iterator[np.ndarray]:
    if isinstance(plain, np.ndarray):
        yield plain
    for part in plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ():
        yield from _arrays(part)
