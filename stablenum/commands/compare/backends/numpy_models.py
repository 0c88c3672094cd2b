"""The models in NumPy, with the backward pass written by hand.

``compute`` is the dtype of the activations, of the weights in use and of their gradients; products are
summed in float32 and rounded once, as in the frameworks. Losses are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stablenum.commands.compare.scenarios import Training
from stablenum.commands.compare.scenarios.training_data import NORM_EPS, Batch, Data

__all__ = ["evaluate", "loss_and_gradients"]

Array: TypeAlias = "np.ndarray[Any, Any]"
# Maps the gradient of the output to the gradients of the parameters.
Backward: TypeAlias = Callable[[Array], list[Array]]


class Forward(NamedTuple):
    """A model's output and its backward pass."""

    output: Array
    backward: Backward


def loss_and_gradients(
    training: Training, params: list[Array], batch: Batch, scale: float, compute: str
) -> tuple[np.float32, list[Array]]:
    """Return the unscaled loss, and the float32 gradients of the loss times ``scale``, computed in
    ``compute``."""
    dtype = np.dtype(compute)
    with np.errstate(all="ignore"):  # the scenarios overflow and produce NaN on purpose
        weights = [p.astype(dtype) for p in params]
        forward = _MODELS[training.model](weights, batch.x.astype(dtype))
        loss, d_output = _LOSSES[training.model](forward.output.astype(np.float32), batch.y)
        d_output = (d_output * (np.float32(scale) * batch.weight)).astype(dtype)
        gradients = [g.astype(np.float32) for g in forward.backward(d_output)]
        return np.float32(loss * batch.weight), gradients


def evaluate(training: Training, params: list[Array], data: Data, measure: str) -> float:
    """Return the held-out loss (or accuracy) of float32 parameters, computed in float32."""
    with np.errstate(all="ignore"):
        output = _MODELS[training.model](params, data.x_test).output
        if measure == "loss":
            return float(_LOSSES[training.model](output, data.y_test)[0] * np.float32(training.loss_factor))
        label = output.argmax(axis=1) if output.ndim == 2 and output.shape[1] > 1 else output[:, 0] > 0
        return float(np.mean(label == data.y_test))


# -------------------------------------------------------------------------------------- models


def _matmul(a: Array, b: Array) -> Array:
    """Return ``a @ b``, summed in float32 and rounded to the operands' dtype."""
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)


def _sum(a: Array) -> Array:
    """Return the sum over the first axis, computed in float32 and rounded to the dtype of ``a``."""
    return a.astype(np.float32).sum(axis=0).astype(a.dtype)


def _linear(weights: list[Array], x: Array) -> Forward:
    w, b = weights

    def backward(d: Array) -> list[Array]:
        return [_matmul(x.T, d), _sum(d)]

    return Forward(_matmul(x, w) + b, backward)


def _mlp(weights: list[Array], x: Array) -> Forward:
    w1, b1, w2, b2 = weights
    hidden = np.maximum(_matmul(x, w1) + b1, 0)

    def backward(d: Array) -> list[Array]:
        d_hidden = np.where(hidden > 0, _matmul(d, w2.T), np.zeros_like(hidden))
        return [_matmul(x.T, d_hidden), _sum(d_hidden), _matmul(hidden.T, d), _sum(d)]

    return Forward(_matmul(hidden, w2) + b2, backward)


def _normed(weights: list[Array], x: Array) -> Forward:
    """Run the network with its hidden activations divided by their root mean square, in float32."""
    w1, b1, w2, b2 = weights
    hidden = np.maximum(_matmul(x, w1) + b1, 0)
    wide = hidden.astype(np.float32)
    rms = np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + np.float32(NORM_EPS))
    unit = wide / rms
    normed = unit.astype(x.dtype)

    def backward(d: Array) -> list[Array]:
        d_unit = _matmul(d, w2.T).astype(np.float32)
        d_wide = (d_unit - unit * np.mean(d_unit * unit, axis=1, keepdims=True)) / rms
        d_hidden = np.where(hidden > 0, d_wide.astype(x.dtype), np.zeros_like(hidden))
        return [_matmul(x.T, d_hidden), _sum(d_hidden), _matmul(normed.T, d), _sum(d)]

    return Forward(_matmul(normed, w2) + b2, backward)


def _conv(weights: list[Array], x: Array) -> Forward:
    """Run a 3 x 3 convolution without padding, relu and a dense layer; all patches form one matrix."""
    kernel, b1, w2, b2 = weights
    n, channels = len(x), len(kernel)
    windows = np.lib.stride_tricks.sliding_window_view(x.reshape(n, 8, 8), (3, 3), axis=(1, 2))
    patches = windows.reshape(n * 36, 9)
    flat_kernel = kernel.reshape(channels, 9)
    hidden = np.maximum(_matmul(patches, flat_kernel.T) + b1, 0)  # (n * 36, channels)
    features = hidden.reshape(n, 36, channels).transpose(0, 2, 1).reshape(n, channels * 36)

    def backward(d: Array) -> list[Array]:
        d_features = _matmul(d, w2.T).reshape(n, channels, 36).transpose(0, 2, 1).reshape(n * 36, channels)
        d_hidden = np.where(hidden > 0, d_features, np.zeros_like(hidden))
        d_kernel = _matmul(d_hidden.T, patches).reshape(kernel.shape)
        return [d_kernel, _sum(d_hidden), _matmul(features.T, d), _sum(d)]

    return Forward(_matmul(features, w2) + b2, backward)


def _deep(weights: list[Array], x: Array) -> Forward:
    """Run layers without bias, each followed by a leaky relu (slope 0.1)."""
    inputs, slopes = [], []
    for w in weights:
        inputs.append(x)
        x = x @ w
        slopes.append(np.where(x >= 0, np.float32(1), np.float32(0.1)))
        x = x * slopes[-1]

    def backward(d: Array) -> list[Array]:
        gradients = []
        for w, layer_input, slope in zip(reversed(weights), reversed(inputs), reversed(slopes), strict=True):
            d = d * slope
            gradients.append(layer_input.T @ d)
            d = d @ w.T
        return gradients[::-1]

    return Forward(x, backward)


# -------------------------------------------------------------------------------------- losses


def _nll(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Return the cross entropy of logits, and its gradient."""
    n = len(labels)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    d = np.exp(log_p)
    d[np.arange(n), labels] -= 1
    return -log_p[np.arange(n), labels].mean(), d / np.float32(n)


def _bce_with_log(z: Array, y: Array) -> tuple[Array, Array]:
    """Return the binary cross entropy as it is often written, with the log of a sigmoid that saturates."""
    n, z = np.float32(len(y)), z[:, 0]
    p = 1 / (1 + np.exp(-z))
    loss = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    d_p = -(y / p - (1 - y) / (1 - p)) / n
    return loss, (d_p * p * (1 - p))[:, None]


def _squares(output: Array, y: Array) -> tuple[Array, Array]:
    error = output[:, 0] - y
    return np.mean(error * error), (2 * error / np.float32(len(y)))[:, None]


def _absolute(output: Array, y: Array) -> tuple[Array, Array]:
    error = output - y[:, None]
    return np.mean(np.abs(error)), np.sign(error) / np.float32(error.size)


_MODELS: dict[str, Callable[[list[Array], Array], Forward]] = {
    "sigmoid-bce": _linear,
    "deep": _deep,
    "regression": _mlp,
    "digits-mlp": _mlp,
    "digits-normed": _normed,
    "digits-conv": _conv,
}
_LOSSES: dict[str, Callable[[Array, Array], tuple[Array, Array]]] = {
    "sigmoid-bce": _bce_with_log,
    "deep": _absolute,
    "regression": _squares,
    "digits-mlp": _nll,
    "digits-normed": _nll,
    "digits-conv": _nll,
}
