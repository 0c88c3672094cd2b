"""Convolutions, pooling and resizing with the settings that ports confuse, as formulas of NumPy.

Only fingerprints of the results are compared, so that one layout, with the spatial axes last, is enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from stablenum.diagnosis.diff.causes.formulas.variants import Variant

__all__ = ["convolutions_of", "pools_of", "resizes_of", "transposed_convolutions_of"]

# The strides and dilations of convolutions that are tried. Chosen, not measured.
_STRIDES, _DILATIONS = (1, 2, 3, 4), (1, 2, 3, 4, 8)
# The windows and strides of pools that are tried, and below what their padding is. Chosen, not measured.
_POOLS, _STRIDES_OF_POOLS, _PADDING_OF_POOLS = (2, 3, 4, 5), (1, 2, 3), 3
# What is put beside the entries, with NumPy's name for it.
_MODES = {
    "zeros": "constant",
    "its mirror image": "reflect",
    "its last entry": "edge",
    "its other end": "wrap",
}
_FILLED = tuple(_MODES)
Setting: TypeAlias = tuple[tuple[str, Any], ...]


def convolutions_of(x: Any, kernel: Any, size: tuple[int, ...]) -> Iterator[Variant]:
    """Return the convolutions of an array (N, C, *spatial) with a kernel (O, C / groups, *window) whose
    results have the spatial size that is given."""
    if _fits(x, kernel, size):
        yield from _convolutions("convolution", (), x, kernel, size, _STRIDES)


def transposed_convolutions_of(x: Any, kernel: Any, size: tuple[int, ...]) -> Iterator[Variant]:
    """Return the transposed convolutions of an array (N, C, *spatial) with a kernel (O, C, *window) whose
    results have the spatial size that is given: convolutions with zeros between the entries."""
    if not _fits(x, kernel, size) or all(n <= m for n, m in zip(size, x.shape[2:], strict=True)):
        return
    turned = np.flip(kernel, tuple(range(2, kernel.ndim)))
    for stride in _STRIDES[1:]:
        for used, flipped in ((turned, True), (kernel, False)):
            own = (("stride", stride), ("kernel flipped", flipped))
            yield from _convolutions("transposed convolution", own, _spread(x, stride), used, size, (1,))


def _convolutions(
    name: str, own: Setting, x: Any, kernel: Any, size: tuple[int, ...], strides: Iterable[int]
) -> Iterator[Variant]:
    """Return the convolutions whose results have a spatial size, with each padding that is in use."""
    window = kernel.shape[2:]
    for stride, dilation in itertools.product(strides, _DILATIONS if max(window) > 1 else (1,)):
        wide = tuple((k - 1) * dilation + 1 for k in window)
        for low, high in _paddings(max(wide)):
            shape = tuple(n + low + high for n in x.shape[2:])
            if _size(shape, wide, stride) != size:
                continue
            for filled in _FILLED if not own and (low or high) else _FILLED[:1]:
                padded = _padded(x, (low, high), filled)
                if padded is None:
                    continue
                setting: Setting = (
                    *own,
                    ("padding", (low, high)),
                    *(() if own else (("stride", stride),)),
                    *((("dilation", dilation),) if dilation > 1 else ()),
                    *((("filled with", filled),) if filled != "zeros" else ()),
                )
                patches = _windows(padded, wide, stride)
                inner = (..., *[slice(None, None, dilation)] * len(window))
                yield Variant(name, setting, _products(patches[inner], kernel))


def _paddings(wide: int) -> list[tuple[int, int]]:
    """Return how much is added before and after the entries of an axis: alike, one more on a side, and all
    on one side, as for causal convolutions."""
    pairs = dict[tuple[int, int], None]()
    for total in range(2 * wide - 1):
        half, rest = total // 2, total - total // 2
        pairs.update(dict.fromkeys([(half, rest), (rest, half), (total, 0), (0, total)]))
    return list(pairs)


def _fits(x: Any, kernel: Any, size: tuple[int, ...]) -> bool:
    """Return whether a kernel (O, C / groups, *window) can be that of a convolution of an array to a size."""
    if not x.ndim == kernel.ndim == len(size) + 2 or x.shape[1] % kernel.shape[1]:
        return False
    return bool(kernel.shape[0] % (x.shape[1] // kernel.shape[1]) == 0)


def _products(patches: Any, kernel: Any) -> Any:
    """Return (N, O, *spatial) from patches (N, C, *spatial, *window): the groups of channels one by one."""
    groups = patches.shape[1] // kernel.shape[1]
    spatial = kernel.ndim - 2
    over = ([1, *range(2 + spatial, 2 + 2 * spatial)], [1, *range(2, 2 + spatial)])
    parts = zip(np.split(patches, groups, axis=1), np.split(kernel, groups), strict=True)
    made = [np.moveaxis(np.tensordot(p, k, axes=over), -1, 1) for p, k in parts]
    return np.concatenate(made, axis=1)


def _spread(x: Any, stride: int) -> Any:
    """Return an array with zeros between the entries of its spatial axes."""
    shape = (*x.shape[:2], *((n - 1) * stride + 1 for n in x.shape[2:]))
    wide = np.zeros(shape, x.dtype)
    wide[(slice(None), slice(None), *[slice(None, None, stride)] * (x.ndim - 2))] = x
    return wide


def pools_of(x: Any, size: tuple[int, ...]) -> Iterator[Variant]:
    """Return average and maximum pooling of an array (N, C, *spatial) to a spatial size."""
    spatial = x.ndim - 2
    for width, stride in itertools.product(_POOLS, _STRIDES_OF_POOLS):
        for low, high in itertools.product(range(min(width, _PADDING_OF_POOLS)), repeat=2):
            window = (width,) * spatial
            if _size(tuple(n + low + high for n in x.shape[2:]), window, stride) != size:
                continue
            padded = _padded(x, (low, high))
            at = (("window", width), ("stride", stride), ("padding", (low, high)))
            over = tuple(range(-spatial, 0))
            total = _windows(padded, window, stride).sum(axis=over)
            inside = _windows(_padded(np.ones_like(x), (low, high)), window, stride).sum(axis=over)
            if low == high == 0:
                yield Variant("average pooling", at, total / width**spatial)
            else:
                yield Variant("average pooling", (*at, ("padding counted", True)), total / width**spatial)
                yield Variant("average pooling", (*at, ("padding counted", False)), total / inside)
            inside_only = np.where(_padded(np.ones_like(x), (low, high)) > 0, padded, -np.inf)
            most = _windows(inside_only, window, stride).max(axis=over)
            yield Variant("maximum pooling", at, most)


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


def _padded(x: Any, sides: tuple[int, int], filled: str = "zeros") -> Any:
    """Return an array with entries beside those of its spatial axes; None if it has too few to fill them."""
    if filled != "zeros" and max(sides) >= min(x.shape[2:]):
        return None
    return np.pad(x, [(0, 0), (0, 0), *[sides] * (x.ndim - 2)], mode=_MODES[filled])  # type: ignore[call-overload]


def _size(shape: tuple[int, ...], window: tuple[int, ...], stride: int) -> tuple[int, ...]:
    return tuple((n - k) // stride + 1 for n, k in zip(shape, window, strict=True))


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
