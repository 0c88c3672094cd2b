"""Bounds by a Python scalar that every namespace traces and that keep the array's dtype.

``xp.clip`` and ``xp.minimum(x, 1.0)`` would say the same, but array-api-compat resolves their
dtypes on the host, which breaks ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["at_least", "at_most"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


def at_most(x: Array, bound: float, *, xp: Namespace) -> Array:
    """``min(x, bound)`` elementwise; NaN stays NaN."""
    return xp.minimum(x, xp.full_like(x, bound))


def at_least(x: Array, bound: float, *, xp: Namespace) -> Array:
    """``max(x, bound)`` elementwise; NaN stays NaN."""
    return xp.maximum(x, xp.full_like(x, bound))
