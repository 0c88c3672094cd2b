"""Updates that a narrow format would swallow: compensated summation and stochastic rounding.

Half an ulp of a bfloat16 weight of 1.0 is 0.002: an update of 1e-4 is lost for ever when it is rounded to
nearest. Roundings are done on the bits of float32 numbers, because a compiler may leave out a conversion to
a narrower format and back, and with it the very error that is to be compensated.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.bounds import at_least, at_most
from stablenum.errors import bad_field
from stablenum.formats import FORMATS, get_format

__all__ = ["kahan_add", "round_stochastically", "round_to_nearest"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_ROUNDED = ("bfloat16", "float16", "float32")
_SIGN_LESS = 0x7FFFFFFF


def kahan_add(w: Array, c: Array, u: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """``w + u`` with what rounding lost kept in ``c`` for the next time.

    ``y = c + u; w' = round(w + y); c' = round(y - (w' - w))`` (Kahan 1965; for bfloat16 weights Zamirai et
    al. 2020, arXiv 2010.06192). The sums are in float32, only ``w'`` and ``c'`` are rounded to nearest.

    bfloat16 keeps 8 bits of ``c`` too, so updates below about 2^-18 of a weight are lost even so, those below
    2^-24 of a float16 weight; stochastic rounding loses none in the mean.

    A NaN or inf in ``w`` or ``u`` reaches ``w'`` and never ``c'``, which is 0 there. Finite values saturate
    at the format's largest number instead of overflowing.

    Args:
        w: the weights, bfloat16, float16 or float32, any shape.
        c: the compensation so far, 0 at first: of ``w``'s shape and dtype.
        u: the update, of ``w``'s shape, ``w``'s dtype or float32.
        xp: the array namespace.

    Returns:
        ``w'`` and ``c'``, of ``w``'s dtype.

    Raises:
        ValueError: ``w`` is of another dtype.

    Example:
        >>> import array_api_compat.numpy as np
        >>> w, c = np.ones((1,), dtype=np.float16), np.zeros((1,), dtype=np.float16)
        >>> for _ in range(1000):
        ...     w, c = kahan_add(w, c, np.full((1,), -1e-4, dtype=np.float32), xp=np)
        >>> abs(float(w[0]) - 0.9) < 2e-4, float(np.float16(1.0) - np.float16(1e-4))
        (True, 1.0)
    """
    name = _rounded_format("w", w.dtype)
    top = FORMATS[name].max
    wide, added = xp.astype(w, xp.float32), xp.astype(u, xp.float32)
    finite = xp.isfinite(wide) & xp.isfinite(added)
    y = _kept_finite(xp.astype(c, xp.float32) + added, finite, FORMATS["float32"].max, xp=xp)
    total = wide + y
    moved = _kept_finite(round_to_nearest(total, name, xp=xp), finite, top, xp=xp)
    # What lies beyond the format's range is given up, not collected until it overflows itself.
    inside = finite & (xp.abs(total) <= top)
    rest = round_to_nearest(y - (moved - wide), name, xp=xp)
    return xp.astype(moved, w.dtype), xp.astype(xp.where(inside, rest, xp.zeros_like(rest)), w.dtype)


def round_stochastically(x32: Array, random_bits: Array, *, xp: Namespace) -> Array:
    """float32 to bfloat16 numbers: up or down with probabilities that make the mean exact.

    16 random bits are added below the bits that stay, which are then cut off (Gupta et al. 2015, arXiv
    1502.02551). NaN and inf pass through. Finite values stay finite: they saturate at bfloat16's largest
    number. A bfloat16 number stays as it is.

    Args:
        x32: float32, any shape.
        random_bits: integers of ``x32``'s shape, at least 16 bits wide; the lowest 16 are used, which must
            be uniform and independent.
        xp: the array namespace.

    Returns:
        float32; each value is a bfloat16 number, so the cast to bfloat16 that follows is exact.

    Raises:
        ValueError: ``x32`` is not float32, or ``random_bits`` is of another shape.

    Example:
        >>> import array_api_compat.numpy as np
        >>> bits = np.asarray([0, 0xFFFF], dtype=np.int32)
        >>> round_stochastically(np.full((2,), 1.001, dtype=np.float32), bits, xp=np).tolist()
        [1.0, 1.0078125]
    """
    _check_float32("x32", x32)
    if tuple(random_bits.shape) != tuple(x32.shape):
        raise bad_field("random_bits", f"of x32's shape {tuple(x32.shape)}", tuple(random_bits.shape))
    finite = xp.isfinite(x32)
    noise = xp.astype(random_bits & 0xFFFF, xp.int32)
    bits = xp.where(finite, x32, xp.zeros_like(x32)).view(xp.int32)
    rounded = ((bits + noise) & ~0xFFFF).view(xp.float32)
    return xp.where(finite, _kept_finite(rounded, finite, FORMATS["bfloat16"].max, xp=xp), x32)


def round_to_nearest(x32: Array, format: str, *, xp: Namespace) -> Array:  # noqa: A002
    """float32 to the numbers of ``format``, to nearest, ties to even (IEEE 754), but saturating.

    NaN and inf pass through. Finite values stay finite: they saturate at the format's largest number.

    Args:
        x32: float32, any shape.
        format: ``"bfloat16"``, ``"float16"``, or ``"float32"``, which changes nothing.
        xp: the array namespace.

    Returns:
        float32; each value is a number of the format, so the cast that follows is exact.

    Raises:
        ValueError: another format, or ``x32`` is not float32.

    Example:
        >>> import array_api_compat.numpy as np
        >>> round_to_nearest(np.asarray([1.003, 1e38], dtype=np.float32), "bfloat16", xp=np).tolist()
        [1.0, 9.969209968386869e+37]
    """
    name = _rounded_format("format", format)
    _check_float32("x32", x32)
    if name == "float32":
        return x32
    finite = xp.isfinite(x32)
    bits = xp.where(finite, x32, xp.zeros_like(x32)).view(xp.int32)
    magnitude, sign = bits & _SIGN_LESS, bits & ~_SIGN_LESS
    if name == "bfloat16":  # of float32's exponents, so 16 bits go everywhere
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) & ~0xFFFF
    else:
        rounded = _to_float16(magnitude, xp=xp)
    value = (rounded | sign).view(xp.float32)
    return xp.where(finite, _kept_finite(value, finite, FORMATS[name].max, xp=xp), x32)


def _to_float16(magnitude: Array, *, xp: Namespace) -> Array:
    """The bits of a positive float32 rounded to float16: 13 go, and one more for each halving below 2^-14."""
    below = at_least(113 - (magnitude >> 23), 0, xp=xp)  # 113: the exponent field of 2^-14
    drop = 13 + at_most(below, 10, xp=xp)
    one = xp.ones_like(drop)
    half = (one << (drop - 1)) - 1
    rounded = ((magnitude + half + ((magnitude >> drop) & 1)) >> drop) << drop
    # Below 2^-24, float16's smallest number, the leading bit itself goes; 2^-25 is a tie, and even is 0.
    tiny, tie = xp.full_like(drop, 103 << 23), 102 << 23
    return xp.where(below > 10, xp.where(magnitude > tie, tiny, xp.zeros_like(tiny)), rounded)


def _kept_finite(x: Array, finite: Array, top: float, *, xp: Namespace) -> Array:
    """``x`` within ``[-top, top]`` where ``finite`` holds."""
    return xp.where(finite, at_least(at_most(x, top, xp=xp), -top, xp=xp), x)


def _rounded_format(field: str, dtype: object) -> str:
    name = get_format(dtype).name
    if name not in _ROUNDED:
        raise bad_field(field, f"of the format {', '.join(_ROUNDED)}", dtype)
    return name


def _check_float32(field: str, x: Array) -> None:
    if get_format(x.dtype).name != "float32":
        raise bad_field(field, "float32", x.dtype)
