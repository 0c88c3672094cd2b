"""The digits data set (1797 images of 8 x 8) and a small network on it, for tests of JAX."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

__all__ = ["accuracy", "digits", "mlp", "predict"]


@functools.cache
def _shuffled() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.data[order] / 16.0).astype(np.float32), data.target[order].astype(np.int32)


def digits(part: str) -> tuple[Any, Any]:
    """1297 images to train with, or 500 to test with, and their labels."""
    x, y = _shuffled()
    return (x[500:].copy(), y[500:].copy()) if part == "train" else (x[:500].copy(), y[:500].copy())


def mlp(seed: int, sizes: tuple[int, ...] = (64, 64, 10), dtype: Any = jnp.float32) -> dict[str, Any]:
    """The weights of a network of dense layers."""
    rng = np.random.default_rng(seed)
    return {
        f"layer_{i}": {
            "w": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), dtype),
            "b": jnp.zeros(b, dtype),
        }
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    }


def predict(params: dict[str, Any], x: Any) -> Any:
    """Logits, in the dtype of the parameters."""
    layers = list(params.values())
    x = jnp.asarray(x, layers[0]["w"].dtype)
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def accuracy(params: dict[str, Any]) -> float:
    """On the images to test with, computed in float32."""
    x, y = digits("test")
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    return float((predict(wide, x).argmax(-1) == y).mean())
