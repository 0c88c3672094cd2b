"""The scales of blocks: powers of two (e8m0), e4m3 numbers, or float32, from the largest magnitude.

Each rule names its source, with the function that it was compared with.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from stablenum.arrays import at_least, at_most
from stablenum.precision.blocks.elements import ELEMENTS, Element, encoded

__all__ = ["NAN_SCALE", "SCALE_MODES", "divided", "e4m3_scales", "e8m0_scales", "float32_scales"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# How the exponent of a power of two is found from the largest magnitude of a block.
SCALE_MODES = ("floor", "rceil", "even", "ceil")
# The one code of e8m0 that is no number (OCP MX 1.0, section 5.4.1).
NAN_SCALE = 255
_BIAS, _MANTISSA, _FRACTION = 127, 23, 0x7FFFFF
_INF = 0x7F800000
# Scales are normal numbers: XLA and accelerators treat others as 0.
_SMALLEST = 2.0**-126


def e8m0_scales(largest: Array, element: Element, mode: str, *, xp: Namespace) -> Array:
    """Return the codes of the powers of two by which blocks are divided: the exponent plus 127.

    With m the largest magnitude and E the exponent of the element's largest number M:

    - ``"floor"``: 2^(floor(log2 m) - E), the rule of OCP MX 1.0, section 6.3, and torchao's default. Numbers
      between M and 2^(E + 1) saturate.
    - ``"rceil"``: the smallest power of two that is at least m / M, so that nothing saturates: the quotient
      in float32, rounded up by NVIDIA's ``cvt.rp.satfinite.ue8m0x2``. torchao's ``RCEIL`` multiplies by
      float32(1 / M) instead, whose power of two is another one if m is next to M times a power of two.
    - ``"even"``: as "floor", after m is rounded to the mantissa of the element, a tie at the top upwards
      (torchao's ``EVEN``).
    - ``"ceil"``: 2^(ceil(log2 m) - E) (torchao's ``CEIL``).

    Args:
        largest: the bits of the largest magnitude of each block as int32, which orders positive float32.
        element: the format of the numbers.
        mode: one of these.
        xp: the array namespace.

    Returns:
        int32 codes from 0 (2^-127) to 254 (2^127); 255 where a block has NaN or inf.
    """
    carry = {
        "floor": lambda: xp.zeros_like(largest),
        "rceil": lambda: xp.astype((largest & _FRACTION) > _fraction_of(element.max), xp.int32),
        "even": lambda: xp.astype((largest & _FRACTION) >= _rounds_up(element), xp.int32),
        "ceil": lambda: xp.astype((largest & _FRACTION) > 0, xp.int32),
    }[mode]()
    exponent = (largest >> _MANTISSA) - _BIAS + carry - element.max_exponent
    code = at_least(at_most(exponent, _BIAS, xp=xp), -_BIAS, xp=xp) + _BIAS
    return xp.where(largest >= _INF, xp.full_like(code, NAN_SCALE), code)


def _fraction_of(number: float) -> int:
    """Return the stored mantissa of a float32 number."""
    return int((math.frexp(number)[0] * 2 - 1) * 2**_MANTISSA)


def _rounds_up(element: Element) -> int:
    """Return the mantissa from which on a number rounds up to the next power of two in a format."""
    return (1 << _MANTISSA) - (1 << (_MANTISSA - element.mantissa - 1))


def e4m3_scales(largest: Array, element: Element, *, xp: Namespace) -> tuple[Array, Array]:
    """Return the scales of NVFP4: an e4m3 number for each block and one float32 number for all.

    The scale for all is the largest magnitude over 448 times 6, so that the largest scale of a block is 448
    (torchao's ``per_tensor_amax_to_scale`` and ``nvfp4_quantize``). A block's scale is its largest magnitude
    over 6 and over the scale for all, as e4m3, between its smallest normal number, 2^-6, and 448.

    Args:
        largest: float32, the largest magnitude of each block.
        element: the format of the numbers.
        xp: the array namespace.

    Returns:
        The codes of the blocks' scales, int32, and the scale for all, float32 of no axes: 1 if all numbers
        are 0, NaN if one is not finite.
    """
    e4m3 = ELEMENTS["e4m3"]
    finite = xp.isfinite(largest)
    largest = xp.where(finite, largest, xp.ones_like(largest))
    top = xp.max(largest) if largest.shape and 0 not in largest.shape else xp.sum(largest)
    # With the smallest scale of a block, 2^-6, it is still a normal number, and its inverse is finite.
    whole = at_least(divided(top, e4m3.max * element.max, xp=xp), _SMALLEST * 2.0**6, xp=xp)
    whole = xp.where(top == 0, xp.ones_like(whole), whole)
    whole = xp.where(xp.all(finite), whole, xp.full_like(whole, float("nan")))
    scale = divided(divided(largest, element.max, xp=xp), whole, xp=xp)
    least = 2.0**e4m3.min_exponent
    inside = at_least(at_most(scale, e4m3.max, xp=xp), least, xp=xp)
    return xp.astype(encoded(inside, e4m3, xp=xp), xp.int32), whole


def float32_scales(largest: Array, element: Element, *, xp: Namespace) -> Array:
    """Return float32 scales: the largest magnitude over that of the format (DeepSeek-V3, arXiv 2412.19437,
    section 3.3.2); 1 for a block of zeros, NaN for one that is not finite."""
    finite = xp.isfinite(largest)
    largest = xp.where(finite, largest, xp.ones_like(largest))
    scale = at_least(divided(largest, element.max, xp=xp), _SMALLEST, xp=xp)
    scale = xp.where(largest == 0, xp.ones_like(scale), scale)
    return xp.where(finite, scale, xp.full_like(scale, float("nan")))


def divided(x: Array, by: Any, *, xp: Namespace) -> Array:
    """Return a quotient that is rounded once. XLA multiplies by a reciprocal instead where the divisor is a
    constant or one number for many; this one is an array that it does not know."""
    return x / (xp.zeros_like(x) * x + by)
