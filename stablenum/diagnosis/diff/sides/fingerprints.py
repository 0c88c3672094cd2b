"""Describe a value by numbers that do not depend on its layout, and compare two such descriptions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.sides.noise import BLOCK
from stablenum.diagnosis.diff.sides.play import MASKED, SEED

__all__ = ["Fingerprint", "distance", "fingerprint", "sketch"]

# Entries this much smaller than the largest are the rounding errors of zeros: what float64 adds up to 0 from
# a thousand terms of that size is off by up to so much.
_NOTHING = 1e-13


class Fingerprint(NamedTuple):
    """Sums over the entries of an array that are neither zero nor masked.

    They are the same for a transposed, reshaped, padded or broadcast-free copy of the array.

    Attributes:
        entries: how many there are.
        total, absolute, squares, signed: the sums of x, |x|, x^2 and x |x|.
        least, greatest: the extremes, with 0 among the entries.
        floating: whether the array holds floating-point numbers.
        bad: whether any entry is NaN.
    """

    entries: int
    total: float = 0.0
    absolute: float = 0.0
    squares: float = 0.0
    signed: float = 0.0
    least: float = 0.0
    greatest: float = 0.0
    floating: bool = True
    bad: bool = False

    @property
    def simple(self) -> bool:
        """Whether the array has no entries, or only copies of one round number, by which nothing is known."""
        if not self.entries:
            return True
        mean = self.total / self.entries
        # Equal entries have no variance but for a few roundings of float64, and 5040 is a multiple of all
        # whole numbers up to 10: thirds and tenths are round numbers, too.
        equal = abs(self.squares - mean * mean * self.entries) <= 1e-15 * self.squares
        return equal and abs(mean * 5040 - round(mean * 5040)) < 1e-9


def fingerprint(array: Any) -> Fingerprint:
    """Return the fingerprint of an array of any shape and dtype.

    Example:
        >>> a = np.asarray([[1.0, -2.0], [0.0, 3.0]])
        >>> fingerprint(a) == fingerprint(a.T.reshape(-1))
        True
    """
    x = np.asarray(array)
    floating = x.dtype.kind not in "iub"
    x = _real(x).ravel("K")  # their order does not matter, so that a transposed array is not copied
    least, greatest = _extremes(x)
    bad = floating and least != least
    if not max(-least, greatest) < MASKED:
        x = x[np.abs(x) < MASKED]
        least, greatest = _extremes(x)
    nothing = _NOTHING * max(-least, greatest)
    entries, sums = 0, []
    for begin in range(0, x.size, BLOCK):
        part = x[begin : begin + BLOCK]
        size = np.abs(part)
        if not size.min() > nothing:
            kept = size > nothing
            part, size = part[kept], size[kept]
        entries += part.size
        # These sums are taken in pairs, unlike a dot product's: copies of one number must be known as such.
        sums.append((part.sum(), size.sum(), (part * part).sum(), (part * size).sum()))
    if not entries:
        return Fingerprint(0, floating=floating, bad=bad)
    total, absolute, squares, signed = (math.fsum(map(float, column)) for column in zip(*sums, strict=True))
    return Fingerprint(
        entries, total, absolute, squares, signed, min(least, 0.0), max(greatest, 0.0), floating, bad
    )


def _extremes(x: Any) -> tuple[float, float]:
    """Return the least and the greatest entry, both NaN if one is; 0 if there are none."""
    return (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)


def _real(x: Any) -> Any:
    """Return the entries of an array in float64, of complex numbers both parts."""
    if np.iscomplexobj(x):
        x = np.ascontiguousarray(x).reshape(-1).view(x.real.dtype)
    return x.astype(np.float64, copy=False)


def distance(a: Fingerprint, b: Fingerprint) -> float:
    """Return the largest relative difference of two fingerprints, infinite if only one has entries or a NaN.

    All that is compared is continuous: a zero that became a rounding error changes nothing, so the number of
    entries is left out.
    """
    if a.bad != b.bad or bool(a.entries) != bool(b.entries):
        return float("inf")
    if not a.entries:
        return 0.0
    first, second = max(a.absolute, b.absolute), max(a.squares, b.squares)
    extreme = max(abs(a.least), abs(a.greatest), abs(b.least), abs(b.greatest))
    if not second:  # squares that vanish
        second = extreme * extreme or 1.0
    return max(
        abs(a.total - b.total) / first,
        abs(a.absolute - b.absolute) / first,
        abs(a.squares - b.squares) / second,
        abs(a.signed - b.signed) / second,
        abs(a.least - b.least) / extreme,
        abs(a.greatest - b.greatest) / extreme,
    )


def sketch(array: Any) -> float:
    """Return the product of an array's entries, in their order, with a fixed random vector.

    Unlike a fingerprint it depends on where each entry lies. NaN if an entry is not finite.

    Example:
        >>> sketch([1.0, 2.0]) == sketch([2.0, 1.0])
        False
    """
    x = _real(np.asarray(array)).reshape(-1)
    directions = _directions(x.size)
    blocks = (slice(begin, begin + BLOCK) for begin in range(0, x.size, BLOCK))
    with np.errstate(all="ignore"):
        found = sum((float(x[b] @ directions[b]) for b in blocks), 0.0)
    return found if math.isfinite(found) else math.nan


def _directions(count: int) -> Any:
    """Return the first numbers of the random vector."""
    if len(_VECTOR[0]) < count:
        _VECTOR[0] = np.random.default_rng(SEED).standard_normal(max(count, 2 * len(_VECTOR[0])))
    return _VECTOR[0][:count]


_VECTOR = [np.empty(0)]
