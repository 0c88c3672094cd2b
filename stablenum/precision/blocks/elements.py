"""The numbers of block formats, of 4 to 8 bits: their codes, from float32 and back.

Sources: OCP Microscaling Formats (MX) Specification 1.0, section 5.3, for all five; ``e4m3`` is the variant
without infinities that torch and JAX call ``float8_e4m3fn``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from stablenum.arrays import at_least, at_most

__all__ = ["ELEMENTS", "Element", "decoded", "encoded", "over_power_of_two", "power_of_two"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_SIGN_LESS = 0x7FFFFFFF
# float32's exponent bias and mantissa bits.
_BIAS, _MANTISSA, _FRACTION = 127, 23, 0x7FFFFF
_INF = 0x7F800000


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A format of single numbers, which has zero, subnormal and normal numbers of both signs.

    Attributes:
        name: as in "e4m3".
        exponent, mantissa: the bits of each.
        bias: of the exponent.
        max: the largest finite number.
        nan: the code of NaN, without its sign; None if the format has none.
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    max: float
    nan: int | None = None

    @property
    def bits(self) -> int:
        """The bits of a code, with the sign."""
        return 1 + self.exponent + self.mantissa

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest number, by which the scales of a block are computed."""
        return int(self.max).bit_length() - 1

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """The code of the largest number."""
        whole = (self.max_exponent + self.bias) << self.mantissa
        return whole + int((self.max / 2.0**self.max_exponent - 1) * 2**self.mantissa)


ELEMENTS = {
    e.name: e
    for e in (
        Element(name="e4m3", exponent=4, mantissa=3, bias=7, max=448.0, nan=0x7F),
        Element(name="e5m2", exponent=5, mantissa=2, bias=15, max=57344.0, nan=0x7F),
        Element(name="e3m2", exponent=3, mantissa=2, bias=3, max=28.0),
        Element(name="e2m3", exponent=2, mantissa=3, bias=1, max=7.5),
        Element(name="e2m1", exponent=2, mantissa=1, bias=1, max=6.0),
    )
}


def encoded(x32: Array, element: Element, random_bits: Array | None = None, *, xp: Namespace) -> Array:
    """Return the codes of float32 numbers: the nearest, ties to even, or one of both neighbours by chance.

    Numbers beyond the largest one, inf among them, become the largest one of their sign. NaN becomes the code
    of NaN, or 0 if the format has none. Zero keeps its sign.

    Args:
        x32: float32, any shape.
        element: the format.
        random_bits: integers of ``x32``'s shape, of which the lowest 16 bits decide; None for the nearest.
        xp: the array namespace.

    Returns:
        uint8: the sign, the exponent and the mantissa in the lowest ``element.bits`` bits.

    Example:
        >>> import array_api_compat.numpy as np
        >>> encoded(np.asarray([0.5, -6.0, 100.0], dtype=np.float32), ELEMENTS["e2m1"], xp=np).tolist()
        [1, 15, 7]
    """
    bits = x32.view(xp.int32)
    magnitude, negative = bits & _SIGN_LESS, bits < 0
    # A number is counted in units of the last place it may have, which is constant for subnormal numbers.
    exponent = at_least((magnitude >> _MANTISSA) - _BIAS, element.min_exponent, xp=xp)
    exponent = at_most(exponent, element.max_exponent + 1, xp=xp)
    units = over_power_of_two(magnitude, exponent - element.mantissa, xp=xp)
    units = at_most(units, 2.0 ** (element.mantissa + 2), xp=xp)  # beyond the largest number
    if random_bits is None:
        whole = xp.round(units)  # ties to even
    else:
        whole = xp.floor(units + (xp.astype(random_bits & 0xFFFF, xp.float32) + 0.5) * 2.0**-16)
    whole = xp.where(magnitude >= _INF, xp.zeros_like(whole), whole)  # NaN and inf are no integers
    # The codes of all numbers are counted from zero on: a carry into the next exponent is right by itself.
    steps = xp.astype(whole, xp.int32) + ((exponent - element.min_exponent) << element.mantissa)
    code = at_most(steps, element.max_code, xp=xp)
    code = xp.where(magnitude >= _INF, xp.full_like(code, element.max_code), code)
    nan = magnitude > _INF
    code = xp.where(nan, xp.full_like(code, element.nan or 0), code)
    sign = xp.where(negative & ~nan, xp.ones_like(code), xp.zeros_like(code)) << (element.bits - 1)
    return xp.astype(code | sign, xp.uint8)


def over_power_of_two(magnitude: Array, unit: Array, *, xp: Namespace) -> Array:
    """Return a positive float32 number, given by its bits, over 2^unit, which is exact from 2^-126 on; less
    may become 0. The exponents are int32, from -276 to 276.

    Subnormal numbers are read as integers, since XLA and accelerators treat them as 0.
    """
    field = magnitude >> _MANTISSA
    subnormal = field == 0
    number = xp.where(subnormal, xp.astype(magnitude, xp.float32), magnitude.view(xp.float32))
    shift = xp.where(subnormal, -unit - (_BIAS - 1 + _MANTISSA), -unit)
    first = at_least(at_most(shift, _BIAS, xp=xp), 1 - _BIAS, xp=xp)
    second = at_least(at_most(shift - first, _BIAS, xp=xp), 1 - _BIAS, xp=xp)
    return number * power_of_two(first, xp=xp) * power_of_two(second, xp=xp)


def power_of_two(exponent: Array, *, xp: Namespace) -> Array:
    """Return 2^exponent as float32, for int32 exponents from -126 to 127."""
    return ((exponent + _BIAS) << _MANTISSA).view(xp.float32)


def decoded(codes: Array, element: Element, exponent: Array | int = 0, *, xp: Namespace) -> Array:
    """Return the float32 numbers of some codes, times powers of two; they are exact, and inf beyond float32.

    Args:
        codes: uint8, any shape; bits above ``element.bits`` are ignored.
        element: the format.
        exponent: int32 of ``codes``'s shape, the exponents of the powers of two, from -127 to 127.
        xp: the array namespace.

    Example:
        >>> import array_api_compat.numpy as np
        >>> decoded(np.asarray([1, 15, 7], dtype=np.uint8), ELEMENTS["e2m1"], xp=np).tolist()
        [0.5, -6.0, 6.0]
    """
    code = xp.astype(codes, xp.int32)
    magnitude = code & ((1 << (element.bits - 1)) - 1)
    field, mantissa = magnitude >> element.mantissa, magnitude & ((1 << element.mantissa) - 1)
    whole = xp.where(field > 0, mantissa + (1 << element.mantissa), mantissa)
    unit = at_least(field, 1, xp=xp) - element.bias - element.mantissa + exponent
    bits = _bits_of(whole, unit, xp=xp)
    if element.nan is not None:
        special = element.max_code + 1
        inf = element.name == "e5m2"
        bits = xp.where(magnitude >= special, xp.full_like(bits, 0x7FC00000), bits)
        bits = xp.where(magnitude == special, xp.full_like(bits, _INF), bits) if inf else bits
    sign = (code >> (element.bits - 1)) & 1
    return (bits | (sign << 31)).view(xp.float32)


def _bits_of(whole: Array, unit: Array, *, xp: Namespace) -> Array:
    """Return the bits of whole * 2^unit as float32, without float32's arithmetic, in which XLA and
    accelerators treat subnormal numbers as 0. ``whole`` is below 2^8, ``unit`` at least -149."""
    own = xp.astype(whole, xp.float32).view(xp.int32)
    field = (own >> _MANTISSA) + unit
    normal = (at_least(field, 1, xp=xp) << _MANTISSA) | (own & _FRACTION)
    places = at_least(at_most(unit + 149, _MANTISSA, xp=xp), 0, xp=xp)
    bits = xp.where(field > 0, normal, whole << places)
    bits = xp.where(field >= 255, xp.full_like(bits, _INF), bits)
    return xp.where(whole == 0, xp.zeros_like(bits), bits)
