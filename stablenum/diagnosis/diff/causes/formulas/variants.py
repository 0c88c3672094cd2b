"""Functions that ports confuse, each as a formula of NumPy, to be tried on what an operation reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

__all__ = ["Variant", "code_of", "elementwise_of", "numbers_of", "variants_of"]

_Setting: TypeAlias = tuple[tuple[str, Any], ...]
# Keras has 1e-3, torch 1e-5, and 2^-23 in rms_norm, flax 1e-6, BERT 1e-12; and powers of ten between.
_EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 2.0**-23, 1e-6, 1e-5, 1e-4, 1e-3)
_EPSILONS_OF_GROUPS = (1e-6, 1e-5, 1e-3)  # of group norms in flax, torch and Keras


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


def numbers_of(left: Variant, right: Variant) -> tuple[float, float] | None:
    """Return the numbers in which two functions of a family differ, if it is one setting; else None.

    Example:
        >>> a, b = (Variant("norm", (("epsilon", e), ("axis", 1)), None) for e in (1e-5, 1e-6))
        >>> numbers_of(a, b)
        (1e-05, 1e-06)
    """
    mine, theirs = dict(left.setting), dict(right.setting)
    unlike = [k for k in mine if k in theirs and mine[k] != theirs[k]]
    pair = [(mine[k], theirs[k]) for k in unlike]
    if left.family != right.family or len(pair) != 1 or isinstance(pair[0][0], bool):
        return None
    a, b = pair[0]
    return (float(a), float(b)) if all(isinstance(x, int | float) for x in (a, b)) else None


def variants_of(x: Any) -> Iterator[Variant]:
    """Return all functions of one real array, evaluated; none for a complex one."""
    if np.iscomplexobj(x):
        return
    x = np.asarray(x, np.float64)
    yield from elementwise_of(x)
    with np.errstate(all="ignore"):
        if x.size and x.min() >= 0:
            yield from _roots(x)
        for axes in _axes(x.ndim):
            yield from _over_rows(x, axes)
        if x.ndim > 2:
            yield from _in_groups(x)


def elementwise_of(x: Any) -> Iterator[Variant]:
    """Return the array itself and all functions of its elements; none for a complex array."""
    if np.iscomplexobj(x):
        return
    x = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        yield Variant("identity", (), x)
        for family, setting, function in _ELEMENTWISE:
            yield Variant(family, setting, function(x))


def code_of(a: Variant, b: Variant) -> str:
    """Return the cause if one side computes one function and the other side another one."""
    if "identity" in (a.family, b.family):
        return "missing_operation" if b.family == "identity" else "extra_operation"
    if a.family != b.family:
        return "other_function"
    unlike = {k for k, v in a.setting if dict(b.setting).get(k) != v} | {k for k, _ in b.setting} - {
        k for k, _ in a.setting
    }
    if a.family in ("gelu", "silu"):
        return f"{a.family}_variant"
    if "placed" in unlike:
        return "epsilon_placement"
    if "epsilon" in unlike:
        return "epsilon_value"
    if "correction" in unlike:
        return "variance_correction"
    if unlike & {"groups", "channels", "at"}:
        return "norm_axis"
    if "axis" in unlike:
        return "softmax_axis" if "softmax" in a.family else "norm_axis"
    return "reduction" if a.family == "reduction" else "other_function"


def _axes(ndim: int) -> list[tuple[int, ...]]:
    """Return the sets of axes over which functions of rows may go: one, all, all but one, and the spatial
    ones."""
    every = tuple(range(ndim))
    sets = [(a,) for a in every] + [every] + [tuple(a for a in every if a != b) for b in every]
    sets += [every[2:], every[1:-1], every[1:]]
    return [s for s in dict.fromkeys(sets) if s]


def _in_groups(x: Any) -> Iterator[Variant]:
    """Return normalisation over groups of channels, which are the second or the last axis: of neighbours, of
    every n-th channel, and of neighbours at each position alone."""
    for axis in (1, x.ndim - 1):
        channels, y = x.shape[axis], np.moveaxis(x, axis, 1)
        for groups in (g for g in range(1, channels + 1) if channels % g == 0):
            size = channels // groups
            neighbours = y.reshape(x.shape[0], groups, size, -1)
            found: list[tuple[Any, tuple[int, ...], _Setting]] = [(neighbours, (2, 3), ())]
            if 1 < groups < channels:
                every = y.reshape(x.shape[0], size, groups, -1)
                found.append((every, (1, 3), (("channels", f"{groups} apart"),)))
            if 1 < groups < channels and neighbours.shape[3] > 1:
                found.append((neighbours, (2,), (("at", "each position"),)))
            for grouped, axes, told in found:
                for epsilon in _EPSILONS_OF_GROUPS:
                    values = np.moveaxis(_normalised(grouped, axes, epsilon).reshape(y.shape), 1, axis)
                    yield Variant("group_norm", (("groups", groups), *told, ("epsilon", epsilon)), values)


def _normalised(x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    centered = x - x.mean(axis=axes, keepdims=True)
    return centered / np.sqrt((centered * centered).mean(axis=axes, keepdims=True) + epsilon)


def _roots(x: Any) -> Iterator[Variant]:
    """Return the roots of a variance, and their inverses."""
    for epsilon, power in itertools.product(_EPSILONS, (1, -1)):
        for placed, root in (("inside", np.sqrt(x + epsilon)), ("outside", np.sqrt(x) + epsilon)):
            yield Variant("root", (("epsilon", epsilon), ("placed", placed)), root**power)


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


# As torch and jax.nn have them; the sigmoids are those of hard_sigmoid in torch (and JAX) and in Keras.
_ELEMENTWISE: tuple[tuple[str, tuple[tuple[str, Any], ...], Callable[[Any], Any]], ...] = (
    ("gelu", (("by", "erf"),), lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2.0)))),
    ("gelu", (("by", "tanh"),), _tanh_gelu),
    ("gelu", (("by", "sigmoid(1.702 x)"),), lambda x: x * _sigmoid(1.702 * x)),
    ("silu", (), lambda x: x * _sigmoid(x)),
    ("silu", (("hard", True),), lambda x: x * np.clip(x + 3, 0, 6) / 6),
    ("relu", (), lambda x: np.maximum(x, 0)),
    ("relu", (("at most", 6),), lambda x: np.clip(x, 0, 6)),
    ("square", (), lambda x: x * x),
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
    ("absolute value", (), np.abs),
)
