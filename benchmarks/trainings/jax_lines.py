"""Train a small causal transformer in JAX on sums modulo 97; the argument is the number of steps."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, LAYERS, TOKENS, BATCH, CLASSES = 128, 4, 48, 32, 97
TX = optax.adamw(1e-3)


def made(key: Any) -> dict[str, Any]:
    """Parameters for a key."""
    keys = iter(jax.random.split(key, 64))

    def matrix(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    sizes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    return {
        "embed": matrix(CLASSES, WIDTH),
        "places": matrix(TOKENS, WIDTH),
        "head": matrix(WIDTH, CLASSES),
        "layers": [{name: matrix(*shape) for name, shape in sizes.items()} for _ in range(LAYERS)],
    }


def norm(x: Any) -> Any:
    """Standardise the last axis."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def layer(p: dict[str, Any], x: Any) -> Any:
    """Attention and a feed-forward part, each after a norm."""
    q, k, v = (
        t.reshape(BATCH, TOKENS, 4, -1).swapaxes(1, 2) for t in jnp.split(norm(x) @ p["qkv"], 3, axis=-1)
    )
    keep = jnp.tril(jnp.ones((TOKENS, TOKENS), dtype=bool))
    scores = jnp.where(keep, q @ k.swapaxes(-1, -2) / (WIDTH // 4) ** 0.5, -1e30)
    mixed = jax.nn.softmax(scores, axis=-1) @ v
    x = x + mixed.swapaxes(1, 2).reshape(BATCH, TOKENS, WIDTH) @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def loss_fn(params: dict[str, Any], ids: Any) -> Any:
    """The cross-entropy of each next token."""
    x = params["embed"][ids[:, :-1]] + params["places"]
    for p in params["layers"]:
        x = layer(p, x)
    logits = norm(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


@jax.jit
def train_step(params: Any, state: Any, ids: Any) -> Any:
    """One step."""
    loss, grads = jax.value_and_grad(loss_fn)(params, ids)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def main(steps: int) -> None:
    """Train, and print the loss at times."""
    rng = np.random.default_rng(0)
    params = made(jax.random.key(0))
    state = TX.init(params)
    for step in range(steps):
        columns = list(rng.integers(0, CLASSES, (2, BATCH)))
        while len(columns) <= TOKENS:
            columns.append((columns[-1] + columns[-2]) % CLASSES)
        params, state, loss = train_step(params, state, jnp.asarray(np.stack(columns, axis=1)))
        if step % 50 == 0:
            print(step, float(loss))


main(int(sys.argv[1]))
