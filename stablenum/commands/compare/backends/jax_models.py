"""The models in JAX: the loss as a pure function of parameters and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from stablenum.commands.compare.scenarios import Training
from stablenum.commands.compare.scenarios.training_data import NORM_EPS

__all__ = ["loss_function"]

Array: TypeAlias = Any
Loss: TypeAlias = Callable[[list[Array], Array, Array, Array], Array]


def loss_function(training: Training, compute: str | None) -> Loss:
    """Return ``loss(params, x, y, weight)`` of a training: () float32, computed in ``compute``.

    With None, parameters and inputs are left unchanged, because a surrounding policy has cast them.
    """
    model, criterion = _MODELS[training.model], _LOSSES[training.model]

    def loss(params: list[Array], x: Array, y: Array, weight: Array) -> Array:
        if compute is not None:
            params, x = [p.astype(compute) for p in params], x.astype(compute)
        return criterion(model(params, x).astype(jnp.float32), y) * weight

    return loss


def _linear(weights: list[Array], x: Array) -> Array:
    return x @ weights[0] + weights[1]


def _mlp(weights: list[Array], x: Array) -> Array:
    w1, b1, w2, b2 = weights
    return jax.nn.relu(x @ w1 + b1) @ w2 + b2


def _normed(weights: list[Array], x: Array) -> Array:
    w1, b1, w2, b2 = weights
    hidden = jax.nn.relu(x @ w1 + b1)
    wide = hidden.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(jnp.square(wide), axis=1, keepdims=True) + NORM_EPS)
    return (wide / rms).astype(hidden.dtype) @ w2 + b2


def _conv(weights: list[Array], x: Array) -> Array:
    kernel, b1, w2, b2 = weights
    images = lax.conv_general_dilated(
        x.reshape(-1, 1, 8, 8), kernel, (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    return jax.nn.relu(images + b1[:, None, None]).reshape(len(x), -1) @ w2 + b2


def _deep(weights: list[Array], x: Array) -> Array:
    for w in weights:
        x = jax.nn.leaky_relu(x @ w, 0.1)
    return x


def _nll(logits: Array, labels: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


def _bce_with_log(z: Array, y: Array) -> Array:
    p = jax.nn.sigmoid(z[:, 0])
    return -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p)).mean()


def _squares(output: Array, y: Array) -> Array:
    return jnp.square(output[:, 0] - y).mean()


def _absolute(output: Array, y: Array) -> Array:
    return jnp.abs(output - y[:, None]).mean()


_MODELS: dict[str, Callable[[list[Array], Array], Array]] = {
    "sigmoid-bce": _linear,
    "deep": _deep,
    "regression": _mlp,
    "digits-mlp": _mlp,
    "digits-normed": _normed,
    "digits-conv": _conv,
}
_LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    "sigmoid-bce": _bce_with_log,
    "deep": _absolute,
    "regression": _squares,
    "digits-mlp": _nll,
    "digits-normed": _nll,
    "digits-conv": _nll,
}
