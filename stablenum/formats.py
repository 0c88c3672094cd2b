"""The number formats used in training, described by plain Python floats.

Sources: IEEE 754-2019 (binary16/32/64), Google's bfloat16, and Micikevicius et al. 2022
(arXiv 2209.05433) for the two 8-bit formats, in the variants that torch and JAX implement
(``e5m2`` has infinities, ``e4m3fn`` has none).
"""

from __future__ import annotations

from dataclasses import dataclass

from stablenum.errors import bad_field, either

__all__ = ["FLOAT32_MAX", "FLOAT32_TINY", "FORMATS", "NO_LOSS", "SMALLEST_FLOAT16", "Format", "get_format"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One floating-point format.

    Attributes:
        name: the name that NumPy, torch and JAX share.
        bits: storage width in bits.
        max: largest finite value.
        smallest_normal: smallest positive value with full precision.
        smallest_subnormal: smallest positive value; half of it or less rounds to zero.
        eps: distance from 1.0 to the next larger value.

    Example:
        >>> from stablenum.formats import FORMATS
        >>> FORMATS["float16"].max
        65504.0
    """

    name: str
    bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float


def _binary(
    name: str, *, bits: int, mantissa: int, min_exponent: int, max_exponent: int, top: float
) -> Format:
    """Return a format with ``mantissa`` stored bits; ``top`` is its largest significand (below 2)."""
    return Format(
        name=name,
        bits=bits,
        max=top * 2.0**max_exponent,
        smallest_normal=2.0**min_exponent,
        smallest_subnormal=2.0 ** (min_exponent - mantissa),
        eps=2.0**-mantissa,
    )


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _binary("float64", bits=64, mantissa=52, min_exponent=-1022, max_exponent=1023, top=2 - 2.0**-52),
        _binary("float32", bits=32, mantissa=23, min_exponent=-126, max_exponent=127, top=2 - 2.0**-23),
        _binary("bfloat16", bits=16, mantissa=7, min_exponent=-126, max_exponent=127, top=2 - 2.0**-7),
        _binary("float16", bits=16, mantissa=10, min_exponent=-14, max_exponent=15, top=2 - 2.0**-10),
        # The all-ones significand of the top exponent is NaN, so the largest value is 1.75 x 2^8.
        _binary("float8_e4m3fn", bits=8, mantissa=3, min_exponent=-6, max_exponent=8, top=1.75),
        _binary("float8_e5m2", bits=8, mantissa=2, min_exponent=-14, max_exponent=15, top=1.75),
    )
}

FLOAT32_MAX = FORMATS["float32"].max

# Stands for a loss that was not given: float32's lowest number. A NaN would stop every sound step under
# jax.debug_nans.
NO_LOSS = -FLOAT32_MAX
FLOAT32_TINY = FORMATS["float32"].smallest_normal
# 2**-24: a magnitude of at most this keeps only the last bit in float16, or no bit at all.
SMALLEST_FLOAT16 = FORMATS["float16"].smallest_subnormal


def get_format(dtype: object) -> Format:
    """Return the format of a dtype, given as a name or as any framework's dtype object.

    Args:
        dtype: for example ``"float16"``, ``np.float16``, ``np.dtype("float16")``, ``torch.float16``
            or ``jnp.bfloat16``.

    Raises:
        ValueError: the dtype is not in :data:`FORMATS`.

    Example:
        >>> get_format("torch.bfloat16").eps
        0.0078125
    """
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
    name = name.removeprefix("torch.")
    if name not in FORMATS:
        raise bad_field("dtype", f"one of {either(FORMATS)}", dtype)
    return FORMATS[name]
