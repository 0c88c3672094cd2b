"""The logarithm of the factorial, and of quotients of the Gamma function, which array namespaces do not have.

For large arguments they are computed by Stirling's series; ``Gamma(x + 1) = x Gamma(x)`` leads there, or to
the interval on which the factorial is approximated.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

__all__ = ["log_factorial", "log_rising"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_SHIFT = 10
# B(2k) / (2k (2k - 1)); for z >= 10 the omitted terms are below 1e-17.
_SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
# log(u!) / (u (u - 1)) on [0, 2] is the quotient of the polynomials with these coefficients, constant terms
# first, which interpolates it at 16 Chebyshev nodes; the quotient is off by 5e-17 of itself at most.
_NUMERATOR = (
    0.57721566490153283526,
    1.6824471101147888022,
    1.8859705714771289212,
    1.0243630204202775722,
    0.27950293730971490586,
    0.036034479158175049751,
    0.001834493421204914094,
    0.000022965823187794326901,
)
_DENOMINATOR = (
    1.0,
    3.3396503176437673213,
    4.4170494174606592747,
    2.9515846254238808561,
    1.0552943875257395368,
    0.19741249654552428517,
    0.017576958799320786603,
    0.00060081727650701767178,
    4.4894973198540458805e-6,
)


def log_factorial(y: Array, *, xp: Namespace) -> Array:
    """Return ``log(y!)``, that is ``log(Gamma(y + 1))``, for y >= 0: accurate next to its zeros too.

    Example:
        >>> import array_api_compat.numpy as np
        >>> log_factorial(np.asarray([0.0, 1.0, 3.0, 10.0]), xp=np).round(6).tolist()
        [0.0, 0.0, 1.791759, 15.104413]
    """
    small = y < _SHIFT
    # Below 10: y! = y (y - 1) ... (u + 1) u! with u < 2. No term is negative where u is at least 1.
    # Each factor is computed from y, not from the one before: a compiler that writes all of it into one loop
    # would repeat the chain at every use.
    start, product = xp.where(small, y, 0.0), xp.ones_like(y)
    for k in range(_SHIFT - 2):
        product = product * xp.where(start - k >= 2, start - k, 1.0)
    u = start - xp.where(start >= 2, xp.floor(start) - 1, 0.0)
    near = xp.log(product) + u * (u - 1) * (_polynomial(_NUMERATOR, u) / _polynomial(_DENOMINATOR, u))
    z = xp.where(small, _SHIFT, y)
    far = (z + 0.5) * (xp.log(z) - 1) + 0.5 * (1 + math.log(2 * math.pi)) + _rest(z)
    return xp.where(small, near, far)


def log_rising(r: Array, y: Array, *, xp: Namespace) -> Array:
    """Return ``log(Gamma(r + y) / Gamma(r))`` for r > 0 and y >= 0: exactly 0 for y = 0, and without
    cancellation for large r.

    Example:
        >>> import array_api_compat.numpy as np
        >>> log_rising(np.asarray([1.0, 1e12]), np.asarray([3.0, 1.0]), xp=np).round(4).tolist()
        [1.7918, 27.631]
    """
    small = r < _SHIFT
    a = xp.where(small, r + _SHIFT, r)
    b = a + y
    large = (a - 0.5) * xp.log1p(y / a) + y * xp.log(b) - y - _rest_lost(a, b, y)
    near = xp.where(small, r, 1.0)
    first = y > near  # the quotient may overflow
    steps = xp.where(
        first,
        xp.log(near + y) - xp.log(near),
        xp.log1p(xp.where(first, 1.0, y) / near),
    )
    # The recurrence for the quotient: each factor is (r + y + k) / (r + k) = 1 + y / (r + k).
    for k in range(1, _SHIFT):
        steps = steps + xp.log1p(y / (near + k))
    return large - xp.where(small, steps, 0.0)


def _rest(z: Array) -> Array:
    """Return the remainder of Stirling's formula, as a series in 1 / z."""
    inverse = 1.0 / z
    return _polynomial(_SERIES, inverse * inverse) * inverse


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """Return the polynomial of x whose constant term comes first."""
    total = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _rest_lost(a: Array, b: Array, y: Array) -> Array:
    """Return ``_rest(a) - _rest(b)`` for b = a + y, written as a multiple of y instead of a difference.

    (Where a compiler fuses a product and a subtraction, the difference of equal terms may not be exactly 0.)
    """
    u, v = 1.0 / b, 1.0 / a
    # v^n - u^n = (v - u) (u^(n-1) + u^(n-2) v + ... + v^(n-1)), and v - u = y u v.
    total, power, mixed = _SERIES[0], v, u + v
    for coefficient in _SERIES[1:]:
        power = power * v
        mixed = u * mixed + power
        total = total + coefficient * mixed
        power = power * v
        mixed = u * mixed + power
    return y * u * v * total
