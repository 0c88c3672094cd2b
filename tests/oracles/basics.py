"""Norms, factors and roundings in exact or float64 Python."""

from __future__ import annotations

import decimal
import math
import struct
from collections.abc import Sequence

FLOAT32_MAX = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]


def round_to_float32(x: float) -> float:
    """The nearest float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def global_norm(parts: Sequence[float]) -> float:
    """The L2 norm to 50 digits, rounded once; NaN if there is one, otherwise inf if there is one."""
    if any(math.isnan(part) for part in parts):
        return math.nan
    if any(math.isinf(part) for part in parts):
        return math.inf
    with decimal.localcontext(prec=50):
        return float(sum((decimal.Decimal(part) ** 2 for part in parts), decimal.Decimal(0)).sqrt())


def clip_coefficient(norm: float, max_norm: float) -> float:
    """torch.nn.utils.clip_grad_norm_'s factor."""
    return min(1.0, max_norm / (norm + 1e-6))


def clip_factors(norms: Sequence[float], rules: Sequence[tuple[str, float]]) -> list[float]:
    """One factor per tensor after applying ``rules`` (``("norm" | "global", max_norm)``) in order.

    A factor is at least the smallest normal float32, because hardware may flush smaller ones to zero.
    """
    factors = [1.0] * len(norms)
    for kind, max_norm in rules:
        now = [norm * factor for norm, factor in zip(norms, factors, strict=True)]
        if kind == "global":
            joint = clip_coefficient(global_norm(now), max_norm)
            factors = [factor * joint for factor in factors]
        else:
            factors = [f * clip_coefficient(n, max_norm) for f, n in zip(factors, now, strict=True)]
        factors = [max(factor, 2.0**-126) for factor in factors]
    return factors
