"""Train a small network in JAX; print the milliseconds of a step. The arguments: optimizer and steps."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

INPUTS, WIDTH, ROWS, BATCH, BLOCK = 32, 96, 8192, 512, 10
RATES = {"sgd": 1e-2, "adam": 1e-3}


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    """The mean squared error."""
    *hidden, last = params
    for p in hidden:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return jnp.mean((x @ last["w"] + last["b"] - y) ** 2)


def main(name: str, steps: int) -> None:
    """Train, and print the time of a step in the fastest block after the first quarter."""
    tx = getattr(optax, name)(RATES[name])
    shapes = ((INPUTS, WIDTH), (WIDTH, WIDTH), (WIDTH, 1))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = [
        {"w": jax.random.normal(key, shape) / shape[0] ** 0.5, "b": jnp.zeros(shape[1])}
        for key, shape in zip(keys, shapes, strict=True)
    ]
    state = tx.init(params)

    @jax.jit
    def train_step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    inputs = np.random.default_rng(0).standard_normal((ROWS, INPUTS)).astype(np.float32)
    targets = np.sin(inputs.sum(1, keepdims=True))
    blocks = []
    for block in range(steps // BLOCK):
        begin = time.perf_counter()
        for step in range(BLOCK):
            at = (block * BLOCK + step) * BATCH % ROWS
            params, state, loss = train_step(params, state, inputs[at : at + BATCH], targets[at : at + BATCH])
        loss.block_until_ready()
        blocks.append((time.perf_counter() - begin) / BLOCK)
    print(1e3 * min(blocks[len(blocks) // 4 :]))


main(sys.argv[1], int(sys.argv[2]))
