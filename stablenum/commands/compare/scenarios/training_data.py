"""The numbers of a training: its examples, the batch of each step, and the parameters at the start."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stablenum.commands.compare.scenarios.training import Training

__all__ = ["NORM_EPS", "Batch", "Data", "batch_at", "data_of", "initial_params"]

Array: TypeAlias = "np.ndarray[Any, Any]"

_BATCH = 64
# Added to the mean square in "digits-normed", so that a row of zeros stays zeros.
NORM_EPS = 1e-6


class Data(NamedTuple):
    """Training and held-out examples: float32 inputs, and int64 labels or float32 targets."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


class Batch(NamedTuple):
    """The examples of one step, and the factor on their mean loss."""

    x: Array
    y: Array
    weight: np.float32


def data_of(training: Training) -> Data:
    """Return the examples of a training, from its model and seed."""
    return _data(training.model, training.seed)


@functools.lru_cache(maxsize=16)
def _data(model: str, seed: int) -> Data:
    rng = np.random.default_rng([seed, 0])
    if model.startswith("digits"):
        return _digits(rng)
    n, width = 256, 8
    x: Array
    y: Array
    x = rng.random((n, width)) if model == "deep" else rng.normal(size=(n, width))
    if model == "deep":
        y = np.ones(n)
    elif model == "sigmoid-bce":
        y = (x @ rng.normal(size=width) > 0) * 1.0
    else:
        y = np.sin(x @ rng.normal(size=width) / math.sqrt(width))
    x, y = x.astype(np.float32), y.astype(np.float32)
    return Data(x, y, x, y)


def _digits(rng: np.random.Generator) -> Data:
    """Return scikit-learn's 1797 images of 8 x 8 pixels in random order; the last 360 are held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = rng.permutation(len(labels))
    x, y = (images[order] / 16).astype(np.float32), labels[order].astype(np.int64)
    return Data(x[:-360], y[:-360], x[-360:], y[-360:])


def batch_at(training: Training, step: int, *, faults: bool = True) -> Batch:
    """Return the batch of one step, with or without its faults."""
    data = data_of(training)
    rng = np.random.default_rng([training.seed, 1, step])
    chosen = rng.choice(len(data.y), size=_BATCH, replace=False)
    x, weight = data.x[chosen].copy(), training.loss_factor
    for fault in training.faults:
        if not faults or fault.step != step:
            continue
        if fault.kind == "nan":
            x[0] = math.nan
        elif fault.kind == "scale":
            x *= np.float32(fault.factor)
        else:
            weight *= fault.factor
    return Batch(x, data.y[chosen], np.float32(weight))


def initial_params(training: Training) -> list[Array]:
    """Return the float32 parameters at the start."""
    rng = np.random.default_rng([training.seed, 2])

    def he(*shape: int, fan_in: int) -> Array:
        return (rng.normal(size=shape) * math.sqrt(2 / fan_in)).astype(np.float32)

    def zeros(n: int) -> Array:
        return np.zeros(n, np.float32)

    match training.model:
        case "sigmoid-bce":
            return [he(8, 1, fan_in=8), zeros(1)]
        case "deep":
            return [rng.uniform(1, 10, size=(8, 8)).astype(np.float32) for _ in range(training.depth)]
        case "regression":
            return [he(8, 32, fan_in=8), zeros(32), he(32, 1, fan_in=32), zeros(1)]
        case "digits-mlp" | "digits-normed":
            return [he(64, 48, fan_in=64), zeros(48), he(48, 10, fan_in=48), zeros(10)]
        case _:
            return [he(8, 1, 3, 3, fan_in=9), zeros(8), he(8 * 6 * 6, 10, fan_in=8 * 6 * 6), zeros(10)]
