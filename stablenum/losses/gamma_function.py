"""The logarithms of the Gamma function and of its quotients, which array namespaces do not have.

They are computed by Stirling's series for x >= 10; below 10, ``Gamma(x + 1) = x Gamma(x)`` is applied first.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

__all__ = ["log_gamma", "log_rising"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

_SHIFT = 10
# B(2k) / (2k (2k - 1)); for z >= 10 the omitted terms are below 1e-17.
_SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)


def log_gamma(x: Array, *, xp: Namespace) -> Array:
    """Return ``log(Gamma(x))`` for x > 0, in the format of x.

    Example:
        >>> import array_api_compat.numpy as np
        >>> log_gamma(np.asarray([1.0, 11.0]), xp=np).round(6).tolist()
        [0.0, 15.104413]
    """
    small = x < _SHIFT
    product = xp.where(small, x, 1.0)
    # Gamma(x + 10) = Gamma(x) x (x + 1) ... (x + 9).
    for k in range(1, _SHIFT):
        product = product * xp.where(small, x + k, 1.0)
    z = xp.where(small, x + _SHIFT, x)
    large = (z - 0.5) * xp.log(z) - z + 0.5 * math.log(2 * math.pi) + _rest(z)
    return large - xp.log(product)


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
    square, total = inverse * inverse, 0.0
    for coefficient in reversed(_SERIES):
        total = total * square + coefficient
    return total * inverse


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
