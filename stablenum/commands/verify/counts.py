"""Count in one pass what in an array is not finite, negative, or too large for a narrower format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from stablenum.diagnosis.ranges.limits import limits

__all__ = ["NARROW", "Counts", "count", "count_blocks", "is_measured", "widened", "width_of"]

Array: TypeAlias = Any

# The formats in which training computes, and for which range is reported.
NARROW = ("float16", "bfloat16")
_OVERFLOW = {name: limits(name).overflow for name in NARROW}
# Elements per block: a block and what is computed from it fit in the cache.
_AT_A_TIME = 2**16


@dataclass(slots=True)
class Counts:
    """What is in an array; counts are numbers of elements.

    Attributes:
        size: the number of elements; a complex number counts as two.
        nan, plus_inf, minus_inf, negative: NaN, inf, -inf, and elements below 0, -inf among them.
        largest: the largest finite magnitude.
        first: the position of the first element that is not finite or, if all are, of the first negative one.
        overflow: for each narrower format, the finite elements that would become inf in it.
    """

    size: int = 0
    nan: int = 0
    plus_inf: int = 0
    minus_inf: int = 0
    negative: int = 0
    largest: float = 0.0
    first: tuple[int, ...] | None = None
    overflow: dict[str, int] = field(default_factory=dict)

    @property
    def nonfinite(self) -> int:
        return self.nan + self.plus_inf + self.minus_inf

    @property
    def masks(self) -> bool:
        """Whether this can be a mask that is added to logits: nothing but 0 and -inf, and not only 0."""
        return bool(self.minus_inf) and self.nonfinite == self.minus_inf and self.largest == 0.0


def is_measured(dtype: str) -> bool:
    """Return whether arrays of this dtype hold numbers that may be NaN or inf.

    Example:
        >>> [is_measured(name) for name in ("float64", "float8_e5m2", "bfloat16", "complex64", "int32")]
        [True, True, True, True, False]
    """
    return dtype.startswith(("float", "bfloat", "complex")) and not dtype.startswith(("float4_", "float6_"))


def width_of(dtype: str) -> int:
    """Return the bytes of an element of a dtype, by its name; 16, the most, for one that is not known.

    Example:
        >>> width_of("bfloat16"), width_of("complex64"), width_of("float8_e4m3fn")
        (2, 8, 1)
    """
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 16


def widened(values: Array) -> Array:
    """Return floating-point values as float32 or float64, complex ones as pairs; all values stay the same.

    Formats that NumPy does not know are converted by their bits, which is many times faster than a cast.
    """
    dtype = values.dtype
    if dtype.kind == "c":
        return np.ascontiguousarray(values).view(values.real.dtype)
    if dtype.name == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype.itemsize == 1:
        table = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        return table[np.ascontiguousarray(values).view(np.uint8)]
    return values.astype(np.float32) if dtype.name == "float16" else values


def count(values: Array, *, signed: bool = True) -> Counts:
    """Return what is in an array of floating-point or complex numbers.

    Args:
        values: an array of NumPy, with a dtype of NumPy or of ml_dtypes.
        signed: whether negative elements are right; if not, they are counted.
    """
    return count_blocks([np.asarray(values).reshape(-1)], values.shape, signed=signed)


def count_blocks(
    parts: Iterable[Array], shape: tuple[int, ...], *, signed: bool = True, columns: bool = False
) -> Counts:
    """Return what is in an array of this shape whose elements come in one-dimensional parts, in order.

    With ``columns``, the first index changes fastest in that order, and not the last.
    """
    found = Counts()
    bad: int | None = None
    negative: int | None = None
    with np.errstate(all="ignore"):
        for start, block in _blocks(parts):
            found.size += block.size
            size = np.abs(block)
            top = float(size.max())
            if not math.isfinite(top):
                bad = bad if bad is not None else start + int(np.argmin(np.isfinite(block)))
                size = _only_finite(found, block, size)
                top = float(size.max())
            found.largest = max(found.largest, top)
            for name, limit in _OVERFLOW.items():
                if top >= limit:
                    found.overflow[name] = found.overflow.get(name, 0) + int(np.count_nonzero(size >= limit))
            if not signed and (below := int(np.count_nonzero(block < 0))):
                found.negative += below
                negative = negative if negative is not None else start + int(np.argmax(block < 0))
    first = bad if bad is not None else negative
    if first is not None:
        each = found.size // math.prod(shape)  # 2 if they are complex
        place = np.unravel_index(first // each, shape, order="F" if columns else "C")
        found.first = tuple(map(int, place))
    return found


def _blocks(parts: Iterable[Array]) -> Iterator[tuple[int, Array]]:
    """Yield the position of a block's first number among all, and the block's numbers."""
    before = 0
    for flat in parts:
        for start in range(0, flat.size, _AT_A_TIME):
            block = widened(flat[start : start + _AT_A_TIME])
            yield before, block
            before += block.size


def _only_finite(found: Counts, block: Array, size: Array) -> Array:
    """Count what is not finite in a block, and return its magnitudes with 0 in place of these."""
    found.nan += int(np.count_nonzero(np.isnan(block)))
    found.plus_inf += int(np.count_nonzero(block == np.inf))
    found.minus_inf += int(np.count_nonzero(block == -np.inf))
    return np.where(np.isfinite(size), size, 0.0)
