"""Warnings that point at the user's own line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

__all__ = ["warn"]

# What lies between a user's line and a warning: this library, and the frameworks that call it.
_PASSED_BY = {"stablenum", "stablenum_jax", "stablenum_torch", "contextlib", "functools"}
_PASSED_BY |= {"equinox", "flax", "jax", "jaxlib", "optax", "torch"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning for the nearest line of a caller that is neither this library nor its framework."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_BY:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
