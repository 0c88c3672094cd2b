"""Name the cause of a difference between two updates from the numbers: what is the difference made of?"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.update_laws import Law, law_of

__all__ = ["Update", "cause_of_updates"]

_EXACT = 1e-6
# So many entries tell a law from others.
_FEWEST = 4
_USUAL = (0.9, 0.999)
# Above, a number is one minus an epsilon rather than the decay rate of a moment.
_LARGEST_RATE = 0.9999


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter: what both sides make of the same gradient.

    Attributes:
        parameter, gradient: before the update.
        left, right: the changes of the parameter.
        name: that of the parameter.
    """

    parameter: Any
    gradient: Any
    left: Any
    right: Any
    name: str = ""


def cause_of_updates(
    updates: Sequence[Update],
    names: Sequence[str],
    numbers: Collection[float] = (),
    clips: tuple[int, int] = (0, 0),
) -> tuple[str, str, str] | None:
    """Return code, sentence and evidence; None if no simple rule explains the difference.

    Args:
        updates: the parameters, those included whose updates agree.
        names: what the two sides call near the difference, such as "optax.clip_by_global_norm".
        numbers: the constants of both updates, among them the decay rates of the moments.
        clips: how many factors of each side are limited, as those of clipped gradients are.
    """
    unlike = [u for u in updates if not _equal(u.left, u.right)]
    found = _decay(updates, unlike) or _standstill(unlike)
    found = found or _each_clipped(unlike, numbers, clips) or _law(updates, numbers)
    return found or _factor(unlike, names, numbers) or _epsilon(unlike)


def _standstill(unlike: Sequence[Update]) -> tuple[str, str, str] | None:
    """One side does not move at all: a schedule that begins with a rate of 0."""
    for side in ("left", "right"):
        if unlike and not any(np.any(getattr(u, side)) for u in unlike):
            evidence = "All its updates are exactly 0."
            return ("schedule_offset", f"the {side} side does not move in the first step.", evidence)
    return None


def _law(updates: Sequence[Update], numbers: Collection[float]) -> tuple[str, str, str] | None:
    """Both sides follow a known law, with other constants or in another form."""
    parameters, gradients = [u.parameter for u in updates], [u.gradient for u in updates]
    left = law_of(parameters, gradients, [u.left for u in updates])
    right = None if left is None else law_of(parameters, gradients, [u.right for u in updates])
    if left is None or right is None:
        return None
    found = _of_laws(left, right, {*numbers, *(1 - x for x in numbers), *_USUAL})
    return None if found is None else (*found, f"The left side follows {left}; the right side {right}.")


def _each_clipped(
    unlike: Sequence[Update], numbers: Collection[float], clips: tuple[int, int]
) -> tuple[str, str, str] | None:
    """One side limits each gradient by itself: before an update that a factor of the gradient hardly changes,
    each tensor has an epsilon of its own, or all have one that is off by a limit over the norm."""
    if min(clips) > 1 or max(clips) < 2:
        return None
    ratios = []
    for u in (u for u in unlike if u.gradient.size >= _FEWEST):
        left, right = (law_of([u.parameter], [u.gradient], [made]) for made in (u.left, u.right))
        if left is None or right is None or not left.epsilon or not right.epsilon:
            return None
        ratios.append(left.epsilon / right.epsilon)
    if not ratios:
        return None
    apart = max(ratios) > (1 + 1e-3) * min(ratios)
    if not apart and not _clipped(unlike, ratios[0], numbers):
        return None
    return (
        "clip_per_tensor",
        "one side clips each tensor by itself.",
        f"The gradients on the right are {min(ratios):.4g} to {max(ratios):.4g} times those on the left.",
    )


def _of_laws(a: Law, b: Law, numbers: Collection[float]) -> tuple[str, str] | None:
    if {a.name, b.name} == {"inside", "outside"}:
        return (
            "adam_epsilon_placement",
            "only one side has the epsilon inside the root.",
        )
    if a.name != b.name:
        return None
    if (a.coupled, bool(a.decay)) != (b.coupled, bool(b.decay)):
        return (
            "decay_coupling",
            "only one side adds the decay to the gradient.",
        )
    ratio = a.epsilon / b.epsilon if a.epsilon and b.epsilon else 1.0
    rates = _of_rates(a.name, a.rate / b.rate, numbers)
    if abs(ratio - 1) > 1e-4 and (rates is None or rates[0] != "bias_correction"):
        return _of_epsilons(ratio, numbers)
    return rates


def _of_epsilons(ratio: float, numbers: Collection[float]) -> tuple[str, str]:
    if any(0 < x < 1 and _near(min(ratio, 1 / ratio), math.sqrt(1 - x), 1e-3) for x in numbers):
        return ("adam_epsilon_placement", "only one side adds the epsilon before the bias correction.")
    return ("epsilon_value", f"the epsilon on the left is {ratio:.4g} times that on the right.")


def _of_rates(law: str, ratio: float, numbers: Collection[float]) -> tuple[str, str] | None:
    """Name a factor between two updates, by the decay rates of the moments."""
    size = max(ratio, 1 / ratio) if ratio > 0 else 0.0
    rates = [x for x in numbers if 0.5 <= x <= _LARGEST_RATE]
    if size < 1 + 1e-3:
        return None
    power = math.log2(size)
    if power >= 3 and abs(power - round(power)) < 1e-6:
        return ("loss_scale_left_in", f"a factor of 2^{round(power)} is left in the gradients.")
    if any(_near(size, 1 + x if law == "gradient" else 1 + x / (1 + x)) for x in rates):
        return ("nesterov", f"the two updates differ by the factor {size:.6g}, as Nesterov's form does.")
    if law == "gradient" and any(_near(size, 1 / (1 - x)) for x in rates):
        return ("momentum_dampening", f"only one side multiplies the gradient by {1 / size:.6g}.")
    both = [(1 - x) / math.sqrt(1 - y) for x in rates for y in rates if x < y]
    either = [f(1 - x) for x in rates for f in (float, math.sqrt)]
    if law != "gradient" and any(_near(size, max(c, 1 / c)) for c in (*both, *either)):
        return ("bias_correction", "only one side corrects the moments for their start at zero.")
    return None


def _near(a: float, b: float, gap: float = 1e-5) -> bool:
    return abs(a - b) <= gap * abs(b)


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
    if len(unlike) < sum(bool(np.any(u.parameter)) for u in updates):  # one that is zero shows no decay
        side = "left" if rate < 0 else "right"  # the one whose update takes a part of the parameter away
        names = ", ".join(u.name for u in unlike[:3] if u.name)
        such = f", such as {names}" if names else ""
        sentence = f"only the {side} side decays {len(unlike)} of the {len(updates)} parameters{such}."
        return ("decay_excluded", sentence, evidence)
    return ("decay_coupling", "the two sides decay the weights by another amount.", evidence)


def _factor(
    unlike: Sequence[Update], names: Sequence[str], numbers: Collection[float]
) -> tuple[str, str, str] | None:
    """The update of one side is a multiple of that of the other."""
    if not unlike:
        return None
    clips = any("clip" in n or n in ("norm", "clamp") for n in names)
    added = [_ratio(u.left - u.right, u.gradient) for u in unlike]
    if clips and all(f is not None for f in added):
        evidence = "The updates differ by a multiple of the gradient."
        own = [f for f in added if f is not None]
        if max(map(abs, own)) < 1e-3 * _of_gradient(unlike):
            return ("clip_epsilon", "the two sides clip with another epsilon.", evidence)
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
    if clips or (factor > 0 and _clipped(unlike, factor, numbers)):
        return ("clip_missing", "only one side clips the gradients, or to another norm.", evidence)
    if abs(power) >= 3 and abs(power - round(power)) < 1e-9:
        return ("loss_scale_left_in", f"a factor of 2^{round(power)} is left in the gradients.", evidence)
    return ("scale", "the two updates differ by one factor (rate, schedule, momentum).", evidence)


def _of_gradient(unlike: Sequence[Update]) -> float:
    """Return how much of the gradients the updates on the left hold, besides a multiple of the parameters."""
    columns = [
        np.concatenate([np.ravel(x) for x in xs]) for xs in zip(*((u.gradient, u.parameter) for u in unlike))
    ]
    made = np.concatenate([np.ravel(u.left) for u in unlike])
    held, *_ = np.linalg.lstsq(np.stack(columns, axis=1), made, rcond=None)
    return abs(float(held[0]))


def _clipped(unlike: Sequence[Update], factor: float, numbers: Collection[float]) -> bool:
    """Return whether a factor is that of a clipped norm: the largest norm over that of all gradients."""
    norm = math.sqrt(sum(float((u.gradient**2).sum()) for u in unlike))
    return any(_near(norm * min(factor, 1 / factor), x, 1e-4) for x in numbers)


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
