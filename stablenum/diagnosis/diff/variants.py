"""Functions that ports confuse, each as a formula of NumPy, to be tried on what an operation reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Variant", "variants_of"]

_EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


class Variant(NamedTuple):
    """A function with its settings.

    Attributes:
        family: what the function is, such as "gelu" or "softmax".
        setting: (name, value) of everything that distinguishes it within the family.
        values: what it gives.
    """

    family: str
    setting: tuple[tuple[str, Any], ...]
    values: Any

    def __str__(self) -> str:
        shown = ", ".join(f"{k} {v}" for k, v in self.setting)
        return f"{self.family} ({shown})" if shown else self.family


def variants_of(x: Any) -> Iterator[Variant]:
    """Return all functions of one array, evaluated."""
    x = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        yield Variant("identity", (), x)
        for family, setting, function in _ELEMENTWISE:
            yield Variant(family, setting, function(x))
        for axes in _axes(x.ndim):
            yield from _over_rows(x, axes)


def _axes(ndim: int) -> list[tuple[int, ...]]:
    """Return the sets of axes over which functions of rows may go."""
    every = range(min(ndim, 4))
    return [c for n in range(1, min(ndim, 4) + 1) for c in itertools.combinations(every, n)]


def _over_rows(x: Any, axes: tuple[int, ...]) -> Iterator[Variant]:
    at: tuple[str, Any] = ("axis", axes if len(axes) > 1 else axes[0])
    count = int(np.prod([x.shape[a] for a in axes]))
    mean = x.mean(axis=axes, keepdims=True)
    yield Variant("reduction", (("kind", "mean"), at), mean)
    yield Variant("reduction", (("kind", "sum"), at), mean * count)
    yield Variant("reduction", (("kind", "max"), at), x.max(axis=axes, keepdims=True))
    centered = x - mean
    squares = (x * x).mean(axis=axes, keepdims=True)
    spread = (centered * centered).mean(axis=axes, keepdims=True)
    for correction in (0, 1):
        if count <= correction:
            continue
        variance = spread * count / (count - correction)
        yield Variant("variance", (("correction", correction), at), variance)
        yield Variant("standard deviation", (("correction", correction), at), np.sqrt(variance))
        for epsilon in _EPSILONS:
            told = (("epsilon", epsilon), ("correction", correction), at)
            yield Variant("layer_norm", (*told, ("placed", "inside")), centered / np.sqrt(variance + epsilon))
            yield Variant(
                "layer_norm", (*told, ("placed", "outside")), centered / (np.sqrt(variance) + epsilon)
            )
    for epsilon in _EPSILONS:
        yield Variant(
            "rms_norm", (("epsilon", epsilon), at, ("placed", "inside")), x / np.sqrt(squares + epsilon)
        )
        yield Variant(
            "rms_norm", (("epsilon", epsilon), at, ("placed", "outside")), x / (np.sqrt(squares) + epsilon)
        )
    if len(axes) == 1:
        shifted = np.where(np.isneginf(x), -np.inf, x - x.max(axis=axes, keepdims=True))
        total = np.exp(shifted).sum(axis=axes, keepdims=True)
        yield Variant("softmax", (at,), np.exp(shifted) / total)
        yield Variant("log_softmax", (at,), shifted - np.log(total))


def _sigmoid(x: Any) -> Any:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def _erf(x: Any) -> Any:
    import math

    return np.vectorize(math.erf, otypes=[float])(x)


def _tanh_gelu(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


_ELEMENTWISE: tuple[tuple[str, tuple[tuple[str, Any], ...], Callable[[Any], Any]], ...] = (
    ("gelu", (("by", "erf"),), lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2.0)))),
    ("gelu", (("by", "tanh"),), _tanh_gelu),
    ("gelu", (("by", "sigmoid(1.702 x)"),), lambda x: x * _sigmoid(1.702 * x)),
    ("silu", (), lambda x: x * _sigmoid(x)),
    ("silu", (("hard", True),), lambda x: x * np.clip(x + 3, 0, 6) / 6),
    ("relu", (), lambda x: np.maximum(x, 0)),
    ("relu", (("at most", 6),), lambda x: np.clip(x, 0, 6)),
    ("squared relu", (), lambda x: np.maximum(x, 0) ** 2),
    ("leaky_relu", (("slope", 0.01),), lambda x: np.where(x > 0, x, 0.01 * x)),
    ("leaky_relu", (("slope", 0.1),), lambda x: np.where(x > 0, x, 0.1 * x)),
    ("leaky_relu", (("slope", 0.2),), lambda x: np.where(x > 0, x, 0.2 * x)),
    ("elu", (), lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
    ("softplus", (), lambda x: np.logaddexp(x, 0)),
    ("tanh", (), np.tanh),
    ("sigmoid", (), _sigmoid),
    ("sigmoid", (("hard", "x / 6 + 1 / 2"),), lambda x: np.clip(x / 6 + 0.5, 0, 1)),
    ("sigmoid", (("hard", "x / 5 + 1 / 2"),), lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    ("mish", (), lambda x: x * np.tanh(np.logaddexp(x, 0))),
    ("square", (), lambda x: x * x),
    ("absolute value", (), np.abs),
)
