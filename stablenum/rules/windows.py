"""Windows of the last n values, and their statistics: median, quantiles, mean and spread.

A window is one (n,) float32 array, newest value last, with ``EMPTY`` where there is no value yet. The mark is
a finite number, because tools that look for inf (``jax_debug_infs``) look at states too. inf marks an empty
place as well, in the functions here: sorting moves it to the end.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from stablenum.arrays import at_least, at_most, combine_norms
from stablenum.formats import FLOAT32_MAX, FLOAT32_TINY, NO_LOSS

__all__ = [
    "EMPTY",
    "OUTLIER_RATIO",
    "count",
    "empty_window",
    "is_informative",
    "mean_and_std",
    "median",
    "median_and_mad",
    "push",
    "quantile",
    "without_outliers",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# A value above this multiple of the typical value is an outlier.
OUTLIER_RATIO = 100.0
# The number that stands for a missing loss never enters a window.
EMPTY = NO_LOSS


def empty_window(size: int, *, xp: Namespace, device: Any = None) -> Array:
    """Return an empty window: (size,) float32."""
    return xp.full((size,), EMPTY, dtype=xp.float32, device=device)


def is_informative(value: Array, *, xp: Namespace) -> Array:
    """Return whether a value is finite and not 0. (An empty batch gives 0.) ``NO_LOSS`` does not count.

    A magnitude below the smallest normal number counts as 0, because some hardware flushes it to 0.
    """
    return xp.isfinite(value) & (xp.abs(value) >= FLOAT32_TINY) & (value != NO_LOSS)


def push(window: Array, value: Array, condition: Array, *, xp: Namespace) -> Array:
    """Return the window with the () ``value`` added and the oldest value dropped.

    The window is unchanged where the () bool ``condition`` does not hold or the value is not finite.
    """
    longer = xp.concat([window[1:], xp.reshape(value, (1,))])
    return xp.where(condition & xp.isfinite(value), longer, window)


def count(window: Array, *, xp: Namespace) -> Array:
    """Return () int32, the number of values in the window."""
    filled = xp.isfinite(window) & (window != EMPTY)
    return xp.sum(xp.astype(filled, xp.int32), dtype=xp.int32)


def quantile(window: Array, q: float, *, xp: Namespace) -> Array:
    """Return the q-quantile, linear between ranks as in NumPy's default; inf for an empty window.

    Example:
        >>> import array_api_compat.numpy as np
        >>> float(quantile(np.asarray([np.inf, 4.0, 1.0, 2.0], dtype=np.float32), 0.75, xp=np))
        3.0
    """
    window = _with_inf(window, xp=xp)
    ordered, n = xp.sort(window), count(window, xp=xp)
    last = at_least(n - 1, 0, xp=xp)
    place = q * xp.astype(last, window.dtype)
    below = xp.floor(place)
    low = xp.astype(below, xp.int32)
    a, b = _item(ordered, low, xp=xp), _item(ordered, xp.minimum(low + 1, last), xp=xp)
    return xp.where(n > 0, a + (place - below) * (b - a), _item(ordered, low, xp=xp))


def median(window: Array, *, xp: Namespace) -> Array:
    """Return the median; inf for an empty window."""
    return _middle(_with_inf(window, xp=xp), count(window, xp=xp), xp=xp)


def median_and_mad(window: Array, *, xp: Namespace) -> tuple[Array, Array]:
    """Return the median, and the median of the distances from it; inf and NaN for an empty window.

    Example:
        >>> import array_api_compat.numpy as np
        >>> [float(x) for x in median_and_mad(np.asarray([1.0, 2.0, 3.0, 1e30], dtype=np.float32), xp=np)]
        [2.5, 1.0]
    """
    window, n = _with_inf(window, xp=xp), count(window, xp=xp)
    middle = _middle(window, n, xp=xp)
    away = at_most(xp.abs(window - middle), FLOAT32_MAX, xp=xp)
    away = xp.where(xp.isfinite(window), away, window)
    return middle, _middle(away, n, xp=xp)


def mean_and_std(window: Array, *, ddof: int = 0, xp: Namespace) -> tuple[Array, Array]:
    """Return the mean and the standard deviation (dividing by n - ddof); 0 and 0 for an empty window.

    No intermediate result overflows, whatever the values.

    Example:
        >>> import array_api_compat.numpy as np
        >>> mean, std = mean_and_std(np.asarray([np.inf, 1e30, 3e30], dtype=np.float32), xp=np)
        >>> round(float(mean) / 1e30, 5), round(float(std) / 1e30, 5)
        (2.0, 1.0)
    """
    n = xp.astype(count(window, xp=xp), window.dtype)
    window = _with_inf(window, xp=xp)
    filled, zeros = xp.isfinite(window), xp.zeros_like(window)
    mean = xp.sum(xp.where(filled, window, zeros) / at_least(n, 1.0, xp=xp))
    # Rounding may carry a mean of the largest numbers beyond them.
    mean = at_least(at_most(mean, FLOAT32_MAX, xp=xp), -FLOAT32_MAX, xp=xp)
    off = xp.where(filled, at_most(xp.abs(window - mean), FLOAT32_MAX, xp=xp), zeros)
    return mean, combine_norms(off, xp=xp) / xp.sqrt(at_least(n - ddof, 1.0, xp=xp))


def without_outliers(window: Array, *, xp: Namespace) -> Array:
    """Return the window with inf in place of the values above 100 times its median."""
    bound = at_most(OUTLIER_RATIO * median(window, xp=xp), FLOAT32_MAX, xp=xp)
    return xp.where(window > bound, xp.full_like(window, float("inf")), window)


def _with_inf(window: Array, *, xp: Namespace) -> Array:
    """Return the window with inf in all empty places."""
    return xp.where(window == EMPTY, xp.full_like(window, float("inf")), window)


def _middle(values: Array, n: Array, *, xp: Namespace) -> Array:
    """Return the median of the ``n`` smallest values."""
    ordered, last = xp.sort(values), at_least(n - 1, 0, xp=xp)
    # The two middle values are halved before they are added, because the sum of two large numbers could
    # overflow.
    return 0.5 * _item(ordered, last // 2, xp=xp) + 0.5 * _item(ordered, n // 2, xp=xp)


def _item(values: Array, index: Array, *, xp: Namespace) -> Array:
    """Return ``values[index]`` for a () integer array, without making the host wait for the device."""
    return xp.reshape(xp.take(values, xp.reshape(index, (1,)), axis=0), ())
