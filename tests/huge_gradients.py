"""Gradients with norms near or beyond the ends of float32's range, for the tests of both frameworks."""

from __future__ import annotations

import numpy as np

__all__ = ["HUGE_GRADIENTS", "recorded_norm"]

# The size of each element, how many there are, and the loss scale.
HUGE_GRADIENTS = [
    (3.1e38, 100, 65536.0),  # the unscaled norm is 4.7e34
    (3.2e38, 100, 2.0**100),
    (3e38, 1000, None),
    (3e38, 1, None),
    (2e38, 1, 0.5),
    (2e38, 100, 2.0**-20),
]


def recorded_norm(element: float, n: int, scale: float | None) -> float:
    """The unscaled norm of n equal float32 elements; beyond float32's range, its largest number."""
    true = float(np.float32(element)) * n**0.5 / (scale or 1.0)
    return min(true, float(np.finfo(np.float32).max))
