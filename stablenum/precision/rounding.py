"""Keep updates that a narrow format would round away: compensated summation and stochastic rounding.

Half an ulp of a bfloat16 weight of 1.0 is 0.002: an update of 1e-4 is lost entirely when it is rounded to
nearest. Rounding works on the bits of float32 numbers, because a compiler may remove a conversion to a
narrower format and back, and with it the error that is to be compensated.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from stablenum.arrays import at_least, at_most
from stablenum.errors import bad_field, either
from stablenum.formats import FORMATS, Format, get_format

__all__ = [
    "compensated_value",
    "kahan_add",
    "round_stochastically",
    "round_to_nearest",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_WEIGHTS = ("bfloat16", "float16", "float32")
_ROUNDED = (*_WEIGHTS, "float8_e4m3fn", "float8_e5m2")
_SIGN_LESS = 0x7FFFFFFF
# Half a spacing is 2^15 units, one more than int16 holds: at that tie one unit is lost.
_MOST_UNITS = 2**15 - 1


def kahan_add(w: Array, c: Array, u: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """Return ``w + u``, with the rounding error kept in ``c`` for the next update.

    In float32, the function computes ``y = c + u; w' = round(w + y); c' = y - (w' - w)`` (Kahan 1965; for
    bfloat16 weights Zamirai et al. 2020, arXiv 2010.06192). For a 16-bit weight, ``c`` is stored as an
    integer multiple of 2^-16 of the weight's spacing; the spacing of a weight in [2^e, 2^(e+1)) is 2^e times
    2^-7 in bfloat16 and 2^-10 in float16. Weight and compensation together are therefore as exact as a
    float32 weight. bfloat16 weights below 2^-102 have no compensation, because float32 cannot represent so
    small a unit; float16 weights always have one.

    A NaN or inf in ``w`` or ``u`` enters ``w'`` but never ``c'``, whose element is then 0. Finite values
    saturate at the format's largest number instead of overflowing. If ``w`` is changed between two calls,
    ``c`` still stands for at most half a spacing of the changed ``w``.

    Args:
        w: the weights, in bfloat16, float16 or float32, of any shape.
        c: the compensation so far, 0 at first, of ``w``'s shape: int16, or float32 for float32 weights.
        u: the update, of ``w``'s shape and of ``w``'s dtype or float32.
        xp: the array namespace.

    Returns:
        ``w'`` of ``w``'s dtype, and ``c'``; :func:`compensated_value` adds them.

    Raises:
        ValueError: ``w`` or ``c`` has another dtype.

    Example:
        >>> import array_api_compat.numpy as np
        >>> w, c = np.ones((1,), dtype=np.float16), np.zeros((1,), dtype=np.int16)
        >>> for _ in range(1000):
        ...     w, c = kahan_add(w, c, np.full((1,), -1e-4, dtype=np.float32), xp=np)
        >>> float(w[0]), round(float(compensated_value(w, c, xp=np)[0]), 4)
        (0.89990234375, 0.9)
    """
    name = _known_format("w", w.dtype, _WEIGHTS)
    top = FORMATS[name].max
    wide, added = xp.astype(w, xp.float32), xp.astype(u, xp.float32)
    finite = xp.isfinite(wide) & xp.isfinite(added)
    y = _kept_finite(_as_number(wide, c, name, xp=xp) + added, finite, FORMATS["float32"].max, xp=xp)
    total = wide + y
    moved = _kept_finite(round_to_nearest(total, name, xp=xp), finite, top, xp=xp)
    # A sum beyond the format's range is dropped, because carrying it would make the compensation overflow.
    inside = finite & (xp.abs(total) <= top)
    rest = xp.where(inside, y - (moved - wide), xp.zeros_like(y))
    return xp.astype(moved, w.dtype), _as_compensation(moved, rest, name, xp=xp)


def compensated_value(w: Array, c: Array, *, xp: Namespace) -> Array:
    """Return the sum of a weight and its compensation: ``w + c``.

    ``c`` counts units as described in :func:`kahan_add`, so the plain sum of the two arrays is wrong.

    Args:
        w: the weights, bfloat16, float16 or float32, any shape; NaN and inf stay as they are.
        c: their compensation, of ``w``'s shape: int16, or float32 for float32 weights.
        xp: the array namespace.

    Returns:
        float32: exact for bfloat16 weights, otherwise rounded to nearest.

    Raises:
        ValueError: ``w`` or ``c`` has another dtype.

    Example:
        >>> import array_api_compat.numpy as np
        >>> w, c = np.ones((1,), dtype=np.float16), np.full((1,), 2**14, dtype=np.int16)
        >>> float(compensated_value(w, c, xp=np)[0])  # 1 and a quarter of the spacing 2^-10
        1.000244140625
    """
    name = _known_format("w", w.dtype, _WEIGHTS)
    wide = xp.astype(w, xp.float32)
    return wide + _as_number(wide, c, name, xp=xp)


def _as_number(wide: Array, c: Array, name: str, *, xp: Namespace) -> Array:
    """Return a compensation as a float32 number. The factor is a power of two, so the product is exact
    whether or not a compiler fuses it with a sum."""
    allowed = xp.float32 if name == "float32" else xp.int16
    if c.dtype != allowed:
        of = "float32" if name == "float32" else "int16"
        raise bad_field("c", f"{of} for {name} weights", c.dtype)
    if name == "float32":
        return c
    field, has_unit = _unit_field(wide, name, xp=xp)
    unit = (field << 23).view(xp.float32)
    return xp.where(has_unit, xp.astype(c, xp.float32) * unit, xp.zeros_like(wide))


def _as_compensation(wide: Array, rest: Array, name: str, *, xp: Namespace) -> Array:
    """Return a finite float32 number as the compensation of a weight, rounded to the nearest unit, ties to
    even."""
    if name == "float32":
        return rest
    field, has_unit = _unit_field(wide, name, xp=xp)
    units = xp.round(rest * ((254 - field) << 23).view(xp.float32))
    units = at_least(at_most(units, _MOST_UNITS, xp=xp), -_MOST_UNITS, xp=xp)
    return xp.astype(xp.where(has_unit, units, xp.zeros_like(units)), xp.int16)


def _unit_field(wide: Array, name: str, *, xp: Namespace) -> tuple[Array, Array]:
    """Return the unit, 2^-16 of a 16-bit weight's spacing, as a float32 exponent field, and a mask of the
    weights that have a unit.

    Half a unit must be a normal number too, because XLA and accelerators treat float32's subnormals as 0.
    """
    field = (wide.view(xp.int32) & _SIGN_LESS) >> 23
    # 113 is the exponent field of 2^-14, below which float16's spacing is constant.
    field = at_least(field, 113, xp=xp) - (10 + 16) if name == "float16" else field - (7 + 16)
    return at_least(field, 2, xp=xp), field >= 2


def round_stochastically(x32: Array, random_bits: Array, *, xp: Namespace) -> Array:
    """Round float32 to bfloat16 numbers, up or down, with probabilities that make the mean exact.

    16 random bits are added to the 16 lowest bits, which are then cut off (Gupta et al. 2015, arXiv
    1502.02551). NaN and inf pass through. Finite values stay finite: they saturate at bfloat16's largest
    number. A bfloat16 number stays as it is.

    Args:
        x32: float32, any shape.
        random_bits: integers of ``x32``'s shape, at least 16 bits wide. The lowest 16 bits are used; they
            must be uniform and independent.
        xp: the array namespace.

    Returns:
        float32; each value is a bfloat16 number, so the cast to bfloat16 that follows is exact.

    Raises:
        ValueError: ``x32`` is not float32, or ``random_bits`` has another shape.

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
    """Round float32 to numbers of ``format``: to nearest, ties to even (IEEE 754), without overflow.

    NaN and inf pass through. Finite values stay finite: they saturate at the format's largest number.

    Args:
        x32: float32, any shape.
        format: ``"bfloat16"``, ``"float16"``, ``"float8_e4m3fn"``, ``"float8_e5m2"``, or ``"float32"``, which
            changes nothing.
        xp: the array namespace.

    Returns:
        float32; each value is a number of the format, so the cast that follows is exact.

    Raises:
        ValueError: ``format`` is another format, or ``x32`` is not float32.

    Example:
        >>> import array_api_compat.numpy as np
        >>> round_to_nearest(np.asarray([1.003, 1e38], dtype=np.float32), "bfloat16", xp=np).tolist()
        [1.0, 9.969209968386869e+37]
    """
    name = _known_format("format", format, _ROUNDED)
    _check_float32("x32", x32)
    if name == "float32":
        return x32
    finite = xp.isfinite(x32)
    bits = xp.where(finite, x32, xp.zeros_like(x32)).view(xp.int32)
    magnitude, sign = bits & _SIGN_LESS, bits & ~_SIGN_LESS
    if name == "bfloat16":  # it has float32's exponents, so 16 bits are dropped whatever the magnitude
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) & ~0xFFFF
    else:
        rounded = _with_fewer_exponents(magnitude, FORMATS[name], xp=xp)
    value = (rounded | sign).view(xp.float32)
    return xp.where(finite, _kept_finite(value, finite, FORMATS[name].max, xp=xp), x32)


def _with_fewer_exponents(magnitude: Array, to: Format, *, xp: Namespace) -> Array:
    """Return the bits of a positive float32 number rounded to a format with fewer exponents: of the mantissa
    so many bits are dropped as the format lacks, and one more for each halving below its smallest normal
    number."""
    smallest, normal = _exponent_field(to.smallest_subnormal), _exponent_field(to.smallest_normal)
    mantissa = normal - smallest
    below = at_least(normal - (magnitude >> 23), 0, xp=xp)
    drop = 23 - mantissa + at_most(below, mantissa, xp=xp)
    one = xp.ones_like(drop)
    half = (one << (drop - 1)) - 1
    rounded = ((magnitude + half + ((magnitude >> drop) & 1)) >> drop) << drop
    # Below the smallest number, the leading bit itself is dropped; the tie, half of it, rounds to 0.
    tiny, tie = xp.full_like(drop, smallest << 23), (smallest - 1) << 23
    return xp.where(below > mantissa, xp.where(magnitude > tie, tiny, xp.zeros_like(tiny)), rounded)


def _exponent_field(power_of_two: float) -> int:
    """Return the exponent field of a power of two in float32."""
    return math.frexp(power_of_two)[1] + 126


def _kept_finite(x: Array, finite: Array, top: float, *, xp: Namespace) -> Array:
    """Return ``x`` clamped to ``[-top, top]`` where ``finite`` is True."""
    return xp.where(finite, at_least(at_most(x, top, xp=xp), -top, xp=xp), x)


def _known_format(field: str, dtype: object, known: tuple[str, ...]) -> str:
    name = get_format(dtype).name
    if name not in known:
        raise bad_field(field, either(known), dtype)
    return name


def _check_float32(field: str, x: Array) -> None:
    if get_format(x.dtype).name != "float32":
        raise bad_field(field, "float32", x.dtype)
