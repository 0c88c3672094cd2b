"""Convolutions, pooling and resizing with the settings that ports confuse, as formulas of NumPy.

Only fingerprints of the results are compared, so that one layout, with the spatial axes last, is enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.variants import Variant

__all__ = ["convolutions_of", "pools_of", "resizes_of"]

_STRIDES = (1, 2, 3, 4)
_MOST_PADDING = 3


def convolutions_of(x: Any, kernel: Any, size: tuple[int, ...]) -> Iterator[Variant]:
    """Return the convolutions of an array (N, C, *spatial) with a kernel (O, C, *window) whose results have
    the spatial size that is given."""
    window = kernel.shape[2:]
    if x.ndim != kernel.ndim or x.shape[1] != kernel.shape[1]:
        return
    for stride in _STRIDES:
        for low, high in itertools.product(range(_MOST_PADDING + 1), repeat=2):
            padded = _padded(x, (low, high), 0.0)
            if _size(padded, window, stride) == size:
                setting = (("padding", (low, high)), ("stride", stride))
                patches = _windows(padded, window, stride)
                spatial = len(window)
                axes = ([1, *range(2 + spatial, 2 + 2 * spatial)], [1, *range(2, 2 + spatial)])
                yield Variant("convolution", setting, np.tensordot(patches, kernel, axes=axes))


def pools_of(x: Any, size: tuple[int, ...]) -> Iterator[Variant]:
    """Return average and maximum pooling of an array (N, C, *spatial) to a spatial size."""
    spatial = x.ndim - 2
    for width, stride in itertools.product((2, 3, 4, 5), (1, 2, 3)):
        for low, high in itertools.product(range(min(width, 3)), repeat=2):
            window = (width,) * spatial
            padded = _padded(x, (low, high), 0.0)
            if _size(padded, window, stride) != size:
                continue
            at = (("window", width), ("stride", stride), ("padding", (low, high)))
            over = tuple(range(-spatial, 0))
            total = _windows(padded, window, stride).sum(axis=over)
            inside = _windows(_padded(np.ones_like(x), (low, high), 0.0), window, stride).sum(axis=over)
            yield Variant("average pooling", (*at, ("padding counted", True)), total / width**spatial)
            yield Variant("average pooling", (*at, ("padding counted", False)), total / inside)
            least = _windows(_padded(x, (low, high), -np.inf), window, stride).max(axis=over)
            yield Variant("maximum pooling", at, least)


def resizes_of(x: Any, size: tuple[int, ...]) -> Iterator[Variant]:
    """Return an array (N, C, *spatial), resized by each method to a spatial size."""
    for method, corners, antialias in (
        ("nearest", False, False), ("nearest, centres", False, False), ("linear", False, False),
        ("linear", True, False), ("linear", False, True), ("cubic, a = -0.75", False, False),
        ("cubic, a = -0.5", False, False), ("cubic, a = -0.5", False, True),
        ("cubic, a = -0.75", True, False),
    ):  # fmt: skip
        y = x
        for axis, n in enumerate(size, 2):
            weights = _weights(x.shape[axis], n, method, corners=corners, antialias=antialias)
            y = np.moveaxis(np.tensordot(weights, y, (1, axis)), 0, axis)
        setting = (("method", method), ("corners aligned", corners), ("antialias", antialias))
        yield Variant("resize", setting, y)


def _padded(x: Any, sides: tuple[int, int], filled: float) -> Any:
    return np.pad(x, [(0, 0), (0, 0), *[sides] * (x.ndim - 2)], constant_values=filled)


def _size(x: Any, window: tuple[int, ...], stride: int) -> tuple[int, ...]:
    return tuple((n - k) // stride + 1 for n, k in zip(x.shape[2:], window, strict=True))


def _windows(x: Any, window: tuple[int, ...], stride: int) -> Any:
    """Return (N, C, *spatial, *window)."""
    axes = tuple(range(2, x.ndim))
    found = np.lib.stride_tricks.sliding_window_view(x, window, axis=axes)
    return found[(slice(None), slice(None), *[slice(None, None, stride)] * len(axes))]


def _weights(given: int, wanted: int, method: str, *, corners: bool, antialias: bool) -> Any:
    """Return the matrix (wanted, given) that resizes one axis."""
    if corners:
        at = np.arange(wanted) * ((given - 1) / max(wanted - 1, 1))
    else:
        at = (np.arange(wanted) + 0.5) * (given / wanted) - 0.5
    if method == "nearest":
        return np.eye(given)[(np.arange(wanted) * given // wanted)]
    if method == "nearest, centres":
        return np.eye(given)[np.clip(np.floor(at + 0.5).astype(int), 0, given - 1)]
    wide = max(given / wanted, 1.0) if antialias else 1.0
    kernel = _linear if method == "linear" else _cubic(float(method.rpartition(" ")[2]))
    # Beyond the border, torch repeats the last entry; JAX, and torch with antialiasing, leave entries out.
    leaves_out = antialias or method.endswith("-0.5")
    reach = int(np.ceil(2 * wide)) + 1
    found = np.zeros((wanted, given))
    for row, x in enumerate(at):
        for j in range(int(np.floor(x)) - reach, int(np.floor(x)) + reach + 2):
            if leaves_out and not 0 <= j < given:
                continue
            found[row, min(max(j, 0), given - 1)] += kernel((x - j) / wide)
    return found / found.sum(axis=1, keepdims=True)


def _linear(t: float) -> float:
    return max(0.0, 1.0 - abs(t))


def _cubic(a: float) -> Any:
    """Return Keys' kernel (1981)."""

    def kernel(t: float) -> float:
        t = abs(t)
        if t <= 1:
            return (a + 2) * t**3 - (a + 3) * t**2 + 1
        return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0

    return kernel
