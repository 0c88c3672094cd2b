"""The small classifier in JAX, with switches for faults."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import stablenum_jax
from tests.lockfile.data import WEIGHTS, X, Y


def in_jax(*, rate: float = 1e-2, epsilon: float = 1e-5, form: Any = jnp.float32, **switches: Any) -> Any:
    """The same with optax."""
    params = {name: jnp.asarray(array) for name, array in WEIGHTS.items()}

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = jnp.tanh(x @ p["up"].T + p["up_bias"])
        if switches.get("centred", True):
            h = h - h.mean(-1, keepdims=True)
        var = jnp.square(h).mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt(var + epsilon) * p["gain"]
        logits = (h.astype(form) @ p["head"].T.astype(form)).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits / switches.get("temperature", 1.0))
        return -jnp.take_along_axis(logp, y[:, None], 1).mean()

    return stablenum_jax.program(loss, params, jnp.asarray(X), jnp.asarray(Y), optimizer=optax.adam(rate))


def program() -> Any:
    """The classifier as it is, for the command."""
    return in_jax()
