"""Name the cause of a difference between two updates from the numbers: what is the difference made of?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Update", "cause_of_updates"]

_EXACT = 1e-6


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter: what both sides make of the same gradient.

    Attributes:
        parameter, gradient: before the update.
        left, right: the changes of the parameter.
    """

    parameter: Any
    gradient: Any
    left: Any
    right: Any


def cause_of_updates(updates: Sequence[Update], names: Sequence[str]) -> tuple[str, str, str] | None:
    """Return code, sentence and evidence; None if no simple rule explains the difference.

    Args:
        updates: the parameters, those included whose updates agree.
        names: what the two sides call near the difference, such as "optax.clip_by_global_norm".
    """
    unlike = [u for u in updates if not _equal(u.left, u.right)]
    return _decay(updates, unlike) or _factor(unlike, names) or _epsilon(unlike)


def _equal(a: Any, b: Any) -> bool:
    scale = max(float(np.abs(a).max()), float(np.abs(b).max()), 1e-300) if a.size else 1.0
    return bool((np.abs(a - b) <= 1e-9 * scale).all())


def _decay(updates: Sequence[Update], unlike: Sequence[Update]) -> tuple[str, str, str] | None:
    """The difference is a multiple of the parameters: weight decay."""
    fits = [_ratio(u.left - u.right, u.parameter) for u in unlike]
    if not fits or any(f is None for f in fits):
        return None
    rate = float(np.median([f for f in fits if f is not None]))
    evidence = f"The updates differ by {rate:.6g} times the parameter, element by element."
    if len(unlike) < len(updates):
        return (
            "decay_excluded",
            f"only one side decays {len(unlike)} of the {len(updates)} parameters.",
            evidence,
        )
    return ("decay_coupling", "the two sides decay the weights by another amount.", evidence)


def _factor(unlike: Sequence[Update], names: Sequence[str]) -> tuple[str, str, str] | None:
    """The update of one side is a multiple of that of the other."""
    if not unlike:
        return None
    clips = any("clip" in n or n in ("norm", "clamp") for n in names)
    added = [_ratio(u.left - u.right, u.gradient) for u in unlike]
    if clips and all(f is not None for f in added):
        evidence = "The updates differ by a multiple of the gradient."
        own = [f for f in added if f is not None]
        if max(own) - min(own) <= 1e-3 * max(abs(f) for f in own):
            return ("clip_missing", "only one side clips the gradients, or to another norm.", evidence)
        return ("clip_per_tensor", "one side clips each tensor by itself.", evidence)
    fits = [_ratio(u.left, u.right) for u in unlike]
    if any(f is None for f in fits):
        return None
    factors = [f for f in fits if f is not None]
    spread = max(factors) / min(factors) - 1 if min(factors) > 0 else math.inf
    if spread > _EXACT:
        return (
            "clip_per_tensor",
            f"each update differs by a factor of its own, from {min(factors):.4g} to {max(factors):.4g}.",
            "Within each tensor the factor is the same.",
        )
    factor = factors[0]
    evidence = f"Every update on the left is {factor:.9g} times that on the right."
    power = math.log2(factor)
    if clips and abs(factor - 1) < 1e-3:
        return ("clip_epsilon", "the two sides clip with another epsilon.", evidence)
    if clips:
        return ("clip_missing", "only one side clips the gradients, or to another norm.", evidence)
    if abs(power) >= 3 and abs(power - round(power)) < 1e-9:
        return ("loss_scale_left_in", f"a factor of 2^{round(power)} is left in the gradients.", evidence)
    return ("scale", "the two updates differ by one factor (rate, schedule, momentum).", evidence)


def _epsilon(unlike: Sequence[Update]) -> tuple[str, str, str] | None:
    """The updates differ most where the gradient is small: an epsilon."""
    ratios, sizes = [], []
    for u in unlike:
        kept = (np.abs(u.right) > 0) & (np.abs(u.gradient) > 0)
        ratios.append(np.abs(u.left[kept] / u.right[kept] - 1).reshape(-1))
        sizes.append(np.abs(u.gradient[kept]).reshape(-1))
    ratio, size = np.concatenate(ratios or [np.zeros(0)]), np.concatenate(sizes or [np.zeros(0)])
    if ratio.size < 8:
        return None
    order = np.argsort(size)
    quarter = max(ratio.size // 4, 1)
    small, large = float(ratio[order[:quarter]].mean()), float(ratio[order[-quarter:]].mean())
    rises = np.diff(ratio[order]) > 1e-9 * float(ratio.max())
    if small < 4 * large or rises.mean() > 0.1:
        return None
    return (
        "adam_epsilon_placement",
        "the updates differ most where the gradients are small, as an epsilon does.",
        f"For the smallest quarter of the gradients by {small:.2g}, for the largest by {large:.2g}.",
    )


def _ratio(a: Any, b: Any) -> float | None:
    """Return c if a is c times b, element by element."""
    norm = float((b * b).sum())
    if not norm:
        return None
    c = float((a * b).sum()) / norm
    scale = float(np.abs(a).max())
    return c if scale and float(np.abs(a - c * b).max()) <= _EXACT * scale else None
