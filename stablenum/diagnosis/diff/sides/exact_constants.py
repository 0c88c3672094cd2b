"""The number that a program's author wrote, given the float32 that is left of it.

A jaxpr keeps Python's numbers as float32: 1e-05 becomes 9.99999974738e-06. In a float64 twin that difference
of 2.5e-8 would look like an error of the program, so the number is restored: the shortest decimal number, or
a usual expression, that rounds to the same float32.

In bfloat16 and float16 too many numbers round to the same one. There the number is first looked for among
those that the program on the other side computes with.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

__all__ = ["LARGEST_WRITTEN", "exact_constant", "exact_constants", "narrow_constant"]

_DIGITS = 6  # float32 holds any decimal number of so many digits
LARGEST_WRITTEN = 16  # larger arrays are data, not written by hand; chosen, not measured
_COUNTS = range(257)  # bfloat16 holds these, and not all larger whole numbers
_LARGEST = 2048  # with larger numbers, a ratio is found for every float32


@lru_cache(maxsize=4096)  # numbers; chosen, not measured
def exact_constant(x: float) -> float:
    """Return the number that rounds to a float32, or the float32 itself if no usual number does.

    Args:
        x: a float64 that holds a float32. NaN and infinities are returned as they are.

    Example:
        >>> exact_constant(9.999999747378752e-06), exact_constant(0.7978845834732056) == (2 / math.pi) ** 0.5
        (1e-05, True)
    """
    if not math.isfinite(x) or x == round(x, 0):
        return x
    short = float(f"{x:.{_DIGITS}g}")
    if _rounds_to(short, x):
        return short
    size = abs(x)
    candidates = itertools.chain(_usual(), _ratios(size), _roots(size), _multiples(size))
    found = next((c for c in candidates if _rounds_to(c, size)), None)
    return x if found is None else math.copysign(found, x)


def narrow_constant(x: float, numbers: Collection[float], rounded: Callable[[float], float]) -> float:
    """Return the number of which a constant of a narrow format is the rounding: the nearest of those that
    the other program computes with, or else a usual one. Without either, the constant itself.

    Args:
        x: the constant. NaN and infinities are returned as they are.
        numbers: those that the other program computes with.
        rounded: rounds a number to the format of the constant.

    Example:
        >>> narrow_constant(-0.2001953125, {0.2002, 0.3}, lambda x: float(np.float16(x)))
        -0.2002
        >>> narrow_constant(0.125, (), lambda x: float(np.float16(x)))
        0.125
        >>> narrow_constant(0.70703125, (), lambda x: float(np.float16(x))) == 0.5**0.5
        True
    """
    if not math.isfinite(x):
        return x
    size = abs(x)
    theirs = sorted(map(abs, numbers), key=lambda n: abs(n - size))
    # A power of two, or three times one.
    plain = (size,) if size in _COUNTS or math.frexp(size)[0] in (0.5, 0.75) else ()
    short = (float(f"{size:.{digits}g}") for digits in (1, 2))
    roots = (math.sqrt(round(size**2)), math.sqrt(1 / (round(size**-2) or 1))) if size else ()
    candidates = itertools.chain(theirs, plain, short, _usual(), roots)
    return math.copysign(next((c for c in candidates if rounded(c) == size), size), x)


def exact_constants(array: Any, *, whole: bool = False) -> Any:
    """Return the numbers of which a small array of float32 holds the roundings, in float64; of a larger
    array, its own numbers.

    Args:
        array: any array of real numbers.
        whole: whether an array is left alone if only some of its numbers are usual ones. A buffer may hold
            constants or what was measured, of which one in thirty looks like a usual number.

    Example:
        >>> exact_constants(np.asarray([0.1, 1.2], np.float32)).tolist()
        [0.1, 1.2]
    """
    wide = np.asarray(array, np.float64)
    if wide.size > LARGEST_WRITTEN:
        return wide
    exact = [exact_constant(x) for x in wide.ravel().tolist()]
    if whole and not all(map(_is_usual, exact)):
        return wide
    return np.asarray(exact).reshape(wide.shape)


def _is_usual(x: float) -> bool:
    """Return whether a number is no float32, as most that are written are not, or a short one such as 0.5."""
    return not _rounds_to(x, x) or x == float(f"{x:.{_DIGITS}g}")


def _rounds_to(candidate: float, x: float) -> bool:
    # float32 ends at 3.4e38, and struct raises an error beyond that.
    return abs(candidate) < 3e38 and struct.unpack("f", struct.pack("f", candidate))[0] == x


@lru_cache(maxsize=1)
def _usual() -> tuple[float, ...]:
    own = [
        math.pi, math.e, math.log(2), math.log(10), 1 / math.log(2), math.log(2 * math.pi),
        0.5 * math.log(2 * math.pi), math.sqrt(math.pi), math.sqrt(2 * math.pi), 1 / math.sqrt(math.pi),
        1 / math.sqrt(2 * math.pi), 2 / math.sqrt(math.pi), 1 / math.pi, 2 / math.pi, math.pi / 2,
        1.0507009873554805, 1.7580993408473766, 1.6732632423543772,  # of SELU: scale, scale * alpha, alpha
        0.044715, 1.702,  # of GELU by tanh, and by sigmoid
    ]  # fmt: skip
    return (*own, *(math.sqrt(c) for c in own), 2 * math.pi, 4 * math.pi)


def _multiples(x: float) -> Iterator[float]:
    """Yield the multiples of usual numbers that may be meant, such as pi / 5, d / 2 log 2 pi, or the
    log(10000) / d of positions."""
    for number in (math.log(2 * math.pi), math.log(2), math.log(10), math.pi):
        yield from (number * ratio for ratio in _ratios(x / number))


def _roots(x: float) -> Iterator[float]:
    """Yield the square roots of ratios of small whole numbers that may be meant."""
    yield from map(math.sqrt, _ratios(x**2))


def _ratios(x: float) -> Iterator[float]:
    """Yield the ratios of small whole numbers near a number: one of the two is at most 16."""
    for small in range(1, 17):
        denominator = round(small / x) if x > 1e-9 else 0  # else too large, and 1 / x may overflow
        if 0 < denominator < _LARGEST:
            yield small / denominator
        numerator = round(x * small)
        if 0 < numerator < _LARGEST:
            yield numerator / small
