"""The exact limits of a format: which values overflow, become subnormal or become 0 when rounded to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stablenum.formats import FORMATS, Format

__all__ = ["HIGHEST", "LOWEST", "Limits", "limits", "per_tensor_exponent", "upper_exponent"]

# The bins of the histograms: bin e counts the values with 2**(e-1) < |x| <= 2**e. The upper end belongs to
# the bin, so that the values that become 0 fill whole bins at every power-of-two scale: these values are at
# most half the smallest subnormal, which is a power of two in every format. The bins cover the range of
# float32, where values up to 2**-150 become 0; float64 values beyond it are counted in the outermost bins.
LOWEST, HIGHEST = -150, 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What \\|x\\| becomes in one format, rounded to nearest, ties to even (IEEE 754-2019, section 4.3.1).

    Attributes:
        overflow: values from here on become inf (NaN in e4m3fn). It is half a unit above the largest value.
        strict: whether the value ``overflow`` itself still rounds down, as it does where the largest value
            has an even significand (e4m3fn: 448). Casts that saturate (torch's) give 448 instead of NaN.
        normal: values below this that are not flushed become subnormal.
        flush: the exponent of the largest value that becomes 0, which is half the smallest subnormal.
    """

    overflow: float
    strict: bool
    normal: float
    flush: int


def limits(name: str) -> Limits:
    """Return the limits of a format.

    Args:
        name: a key of :data:`stablenum.formats.FORMATS`.

    Example:
        >>> limits("float16").overflow, limits("float16").flush, limits("float8_e4m3fn").overflow
        (65520.0, -25, 464.0)
    """
    fmt = FORMATS[name]
    unit = math.ldexp(fmt.eps, math.frexp(fmt.max)[1] - 1)
    return Limits(
        overflow=fmt.max + unit / 2,
        strict=(fmt.max / unit) % 2 == 0,
        normal=fmt.smallest_normal - fmt.smallest_subnormal / 2,
        flush=math.frexp(fmt.smallest_subnormal)[1] - 2,
    )


def upper_exponent(fmt: Format, amax: float, *, margin: int) -> int:
    """Return the largest k with ``amax * 2**k <= fmt.max * 2**-margin``, for a finite ``amax`` above 0.

    Example:
        >>> upper_exponent(FORMATS["float16"], 1.0, margin=1)
        14
    """
    top = math.ldexp(fmt.max, -margin)
    k = math.frexp(top)[1] - math.frexp(amax)[1]
    return k if math.frexp(amax)[0] <= math.frexp(top)[0] else k - 1


def per_tensor_exponent(fmt: Format, amax: float) -> int:
    """Return the exponent of the scale for a single tensor with this ``amax``, or 0 if ``amax`` is 0."""
    return upper_exponent(fmt, amax, margin=0) if amax > 0 else 0
