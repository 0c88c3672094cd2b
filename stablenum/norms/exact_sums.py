"""Sums of squares without rounding, so that a norm does not depend on how its elements are distributed.

A float32 element is an integer of 24 bits times a power of two, so its square is an integer of 48 bits at
some place of one long fixed-point number. That number is divided into limbs of 16 bits. Each limb is summed
over the elements by itself, in integers, which is exact in every order; a carry stays with its limb. Only
the ``LIMBS`` limbs from the largest element down are kept. What is below them is left out of every element
alike, also where a rank whose elements are all small has summed it, so that the result is the same for every
distribution of the elements. It amounts to less than 2**-63 of the sum per element, so up to 2**36 elements a
norm is within one unit in the last place.

An adapter reads the elements (``window``, ``pieces``), sums the pieces and gives ``digits_of`` the sums;
``add`` and ``norms`` are the same everywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from stablenum.norms.wide import STEP, Wide

__all__ = [
    "COLUMNS",
    "DIGITS",
    "LIMBS",
    "WINDOWS",
    "Sums",
    "add",
    "aligned",
    "as_columns",
    "carried",
    "counted_once",
    "digits_of",
    "from_columns",
    "norms",
    "pieces",
    "summed",
    "window",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

LIMBS, DIGITS = 5, 3
# The numbers of a sum, if it is sent as a row of float32.
COLUMNS = 1 + LIMBS * DIGITS
_WORD, _MASK = 16, 0xFFFF
_MAGNITUDE, _HIDDEN, _INFINITY = 0x7FFFFFFF, 0x800000, 0x7F800000
# The number of windows of finite sums. Those of others are above.
WINDOWS = 35
_INF_WINDOW, _NAN_WINDOW = 1000, 2000


class Sums(NamedTuple):
    """Sums of squares.

    Attributes:
        window: (...,) int32, the index of the highest limb that is kept: limb j counts units of
            ``2**(16 j - 298)``. Above 34 for a sum that is not finite.
        digits: (..., LIMBS, DIGITS) int32. Entry k is the sum of limb ``window - k`` over the elements, in
            three digits to the base 2**16, the lowest first. The last digit may be larger, up to 2**24, which
            is enough for 2**40 elements.
    """

    window: Array
    digits: Array


def window(largest: Array, *, xp: Namespace) -> Array:
    """Return the window of a sum, int32, from the largest element's bits without their sign.

    Args:
        largest: int32, the maximum of ``bits & 0x7fffffff`` over the elements; 0 for no elements.
        xp: the array namespace.
    """
    exponent = xp.where(largest < _HIDDEN, xp.ones_like(largest), largest >> 23)
    found = (2 * (exponent - 1) + 47) >> 4
    inf, nan = xp.full_like(found, _INF_WINDOW), xp.full_like(found, _NAN_WINDOW)
    found = xp.where(largest == _INFINITY, inf, found)
    return xp.where(largest > _INFINITY, nan, found)


def pieces(bits: Array, top: Array, *, xp: Namespace) -> list[Array]:
    """Return what each element's square adds to each limb of the window, the highest first: int32, each from
    0 to 2**16 - 1.

    Args:
        bits: int32 of any shape, float32 elements bit for bit.
        top: the window, () int32; for one that is not finite, all pieces are 0.
        xp: the array namespace.
    """
    exponent = (bits & _MAGNITUDE) >> 23
    zero = xp.zeros_like(bits)
    hidden = xp.where(exponent > 0, xp.full_like(bits, _HIDDEN), zero)
    mantissa = (bits & 0x7FFFFF) | hidden
    place = 2 * xp.where(exponent > 0, exponent - 1, zero)
    # The square, in two halves of 24 bits: all products are below 2**26.
    high, low = mantissa >> 12, mantissa & 0xFFF
    square = low * low
    middle = 2 * high * low + (square >> 12)
    low, high = ((middle & 0xFFF) << 12) | (square & 0xFFF), high * high + (middle >> 12)
    # The same in three words, shifted to the place within a limb, which makes it four words.
    first, shift = place >> 4, place & 15
    words = [(low & _MASK) << shift, ((low >> 16) | ((high & 0xFF) << 8)) << shift, (high >> 8) << shift]
    limbs = [
        words[0] & _MASK,
        (words[1] & _MASK) | (words[0] >> 16),
        (words[2] & _MASK) | (words[1] >> 16),
        words[2] >> 16,
    ]

    def piece(offset: Array) -> Array:
        found = zero
        for i, limb in enumerate(limbs):
            found = xp.where(offset == i, limb, found)
        return found

    return [piece(top - k - first) for k in range(LIMBS)]


def digits_of(digits: list[Array], *, xp: Namespace) -> list[Array]:
    """Return digits of the same number with a carry in none but the last, from digits that are not negative.

    Args:
        digits: up to ``DIGITS`` int32 of one shape, the lowest first; missing ones are 0.
        xp: the array namespace.
    """
    none = xp.zeros_like(digits[0])
    low, middle, high = [*digits, none, none][:DIGITS]
    middle = middle + (low >> _WORD)
    return [low & _MASK, middle & _MASK, high + (middle >> _WORD)]


def summed(bits: Array, *, xp: Namespace) -> Sums:
    """Return the sum of squares of all elements, in a namespace with int64 (NumPy, torch).

    Args:
        bits: int32 of any shape, float32 elements bit for bit.
        xp: the array namespace.

    Example:
        >>> import numpy as np
        >>> elements = np.asarray([3.0, 4.0], np.float32)
        >>> float(norms(summed(elements.view(np.int32), xp=np), xp=np).value)
        5.0
    """
    bits = xp.reshape(bits, (-1,))
    none = bits[:1] if bits.shape[0] else xp.zeros((1,), dtype=xp.int32)
    top = window(xp.max(xp.concat([none & 0, bits & _MAGNITUDE])), xp=xp)
    limbs = []
    for piece in pieces(bits, top, xp=xp):
        total = xp.sum(piece, dtype=xp.int64)
        limbs.append(xp.stack([total & _MASK, (total >> 16) & _MASK, total >> 32]))
    return Sums(top, xp.astype(xp.stack(limbs), xp.int32))


def aligned(sums: Sums, top: Array, *, xp: Namespace) -> Array:
    """Return the digits below a window that is at least as high as each sum's own, (..., LIMBS, DIGITS).

    What is then below the lowest limb is left out, before anything is carried, as it is in the other sums.
    """
    behind = xp.expand_dims(top - sums.window, axis=-1)
    limbs = []
    for k in range(LIMBS):
        limb = xp.zeros_like(sums.digits[..., 0, :])
        for i in range(k + 1):
            limb = xp.where(behind == k - i, sums.digits[..., i, :], limb)
        limbs.append(limb)
    return xp.stack(limbs, axis=-2)


def carried(window: Array, digits: Array, *, xp: Namespace) -> Sums:
    """Return the sum whose aligned digits have been added up, each to less than 2**31."""
    digits = xp.stack(digits_of([digits[..., i] for i in range(DIGITS)], xp=xp), axis=-1)
    return Sums(window, digits)


def add(sums: Sums, *, xp: Namespace) -> Sums:
    """Return the sum over the first axis, which is at most 2**7 long, or 2**15 if no digit is above 2**16."""
    top = xp.max(sums.window, axis=0)
    return carried(top, xp.sum(aligned(sums, top, xp=xp), axis=0, dtype=xp.int32), xp=xp)


def counted_once(sums: Sums, first: Array, *, xp: Namespace) -> Sums:
    """Return the sums of parts that no one before has, and 0 for others; what is not finite always counts.

    Args:
        sums: (n, ...).
        first: (n,) bool, whether this is the first rank or device that has the part.
        xp: the array namespace.
    """
    zero = xp.zeros_like(sums.window)
    kept = xp.where(first | (sums.window >= WINDOWS), sums.window, zero)
    digits = xp.where(xp.reshape(first, (-1, 1, 1)), sums.digits, xp.zeros_like(sums.digits))
    return Sums(kept, digits)


def as_columns(sums: Sums, *, xp: Namespace) -> Array:
    """Return the sums as (..., COLUMNS) float32, which holds each of the numbers exactly."""
    flat = xp.reshape(sums.digits, (*sums.window.shape, LIMBS * DIGITS))
    return xp.astype(xp.concat([xp.expand_dims(sums.window, axis=-1), flat], axis=-1), xp.float32)


def from_columns(columns: Array, *, xp: Namespace) -> Sums:
    """Return the sums of :func:`as_columns`."""
    whole = xp.astype(columns, xp.int32)
    return Sums(whole[..., 0], xp.reshape(whole[..., 1:], (*whole.shape[:-1], LIMBS, DIGITS)))


def norms(sums: Sums, *, xp: Namespace) -> Wide:
    """Return the square roots of the sums, rounded to the nearest float32, with powers of two beyond its
    range.

    Everything but one estimate is integer arithmetic, so the bits do not depend on the namespace or the
    compiler. A norm below float32's smallest normal number is 0 where the namespace flushes such numbers.
    """
    words, unit = _leading_words(sums, xp=xp)
    root = _root((words[0] << 8) | (words[1] >> 8), ((words[1] & 0xFF) << 16) | words[2], xp=xp)
    # The root is in [2**23, 2**24], or 0.
    over = root == 2 * _HIDDEN
    root = xp.where(over, xp.full_like(root, _HIDDEN), root)
    exponent = xp.where(over, unit + 1, unit) + 23
    beyond = exponent > 127
    exponent = xp.where(beyond, exponent - STEP, exponent)
    value = _times_power(xp.astype(root, xp.float32), exponent, xp=xp)
    power = xp.where(beyond, xp.full_like(unit, STEP), xp.zeros_like(unit))
    value = xp.where(sums.window == _INF_WINDOW, xp.full_like(value, float("inf")), value)
    value = xp.where(sums.window == _NAN_WINDOW, xp.full_like(value, float("nan")), value)
    return Wide(value, xp.where(xp.isfinite(value) & (root > 0), power, xp.zeros_like(power)))


def _leading_words(sums: Sums, *, xp: Namespace) -> tuple[list[Array], Array]:
    """Return the three highest words of 16 bits, shifted by an even number of bits such that the first is
    2**14 or more (unless the sum is 0), and half the exponent of the last one's unit."""
    zero = xp.zeros_like(sums.window)
    words = [zero] * 8
    for k in range(LIMBS):
        for i in range(DIGITS):
            words[LIMBS - 1 - k + i] = words[LIMBS - 1 - k + i] + sums.digits[..., k, i]
    for i in range(7):
        words[i + 1] = words[i + 1] + (words[i] >> _WORD)
        words[i] = words[i] & _MASK
    words = words[::-1]
    skipped = zero
    for step in (4, 2, 1):
        empty = sum(words[1:step], start=words[0]) == 0
        words = [xp.where(empty, b, a) for a, b in zip(words, words[step:] + [zero] * step, strict=True)]
        skipped = xp.where(empty, skipped + step, skipped)
    shifted = zero
    for step in (8, 4, 2):
        small = words[0] < 2 ** (16 - step)
        moved = [
            ((a << step) & _MASK) | (b >> (16 - step)) for a, b in zip(words, [*words[1:], zero], strict=True)
        ]
        words = [xp.where(small, b, a) for a, b in zip(words[:4], moved, strict=False)]
        shifted = xp.where(small, shifted + step, shifted)
    return words[:3], 8 * (sums.window + 1 - skipped) - (shifted >> 1) - 149


def _root(high: Array, low: Array, *, xp: Namespace) -> Array:
    """Return the root of ``high * 2**24 + low``, a number below 2**48, rounded to the nearest integer."""
    whole = xp.astype(high, xp.float32) * 2.0**24 + xp.astype(low, xp.float32)
    root = xp.astype(xp.sqrt(whole), xp.int32)  # off by a few units, because float32 rounds
    upper, lower = root >> 12, root & 0xFFF
    # The remainder, in parts such that none overflows.
    rest = ((high - upper * upper) * 2**11 - upper * lower) * 2**13 + (low - lower * lower)
    for _ in range(4):
        less, more = rest < 0, rest > 2 * root
        rest = xp.where(less, rest + 2 * root - 1, xp.where(more, rest - 2 * root - 1, rest))
        root = xp.where(less, root - 1, xp.where(more, root + 1, root))
    return xp.where(rest > root, root + 1, root)


def _times_power(value: Array, exponent: Array, *, xp: Namespace) -> Array:
    """Return ``value * 2**(exponent - 23)`` for values in [2**23, 2**24), in steps that are exact everywhere.

    The steps have conditions of their own, so that no compiler merges two of them.
    """
    small = exponent < 0
    value = xp.where(small, value * 2.0**-126, value * 2.0**-23)
    exponent = xp.where(small, exponent + 103, exponent)
    for step in (64, 32, 16, 8, 4, 2, 1):
        up, down = exponent >= step, exponent <= -step
        value = xp.where(up, value * 2.0**step, xp.where(down, value * 2.0**-step, value))
        exponent = xp.where(up, exponent - step, xp.where(down, exponent + step, exponent))
    return value
