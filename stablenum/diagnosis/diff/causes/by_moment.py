"""Name the cause of a difference of a later step's updates: the decay rates of the moments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.by_update import Told
from stablenum.diagnosis.diff.causes.formulas.moment_laws import History, Moments, moments_of
from stablenum.diagnosis.diff.places.results import Update

__all__ = ["cause_of_moments"]


@dataclass(frozen=True, slots=True)
class _Side:
    history: History
    numbers: Collection[float]
    clipped: bool


def cause_of_moments(
    steps: Sequence[Sequence[Update]],
    numbers: tuple[Collection[float], Collection[float]],
    clips: tuple[int, int] = (0, 0),
) -> Told | None:
    """Return the cause; None if the moments of both sides are unknown, or decay equally.

    Args:
        steps: the updates of each training step up to the one that differs.
        numbers: the constants of the update of each side.
        clips: how many factors of each side are limited, as those of clipped gradients are.
    """
    if len(steps) < 2 or any([u.name for u in s] != [u.name for u in steps[0]] for s in steps):
        return None
    sides = [
        _Side(_history(steps, name), own, limited > 0)
        for name, own, limited in zip(("left", "right"), numbers, clips, strict=True)
    ]
    for chosen in _choices(steps):
        left, right = (_moments(side, chosen, _gap(steps[-1], chosen)) for side in sides)
        if left is not None and right is not None:
            return _of_rates(left, right, chosen, steps)
    return None


def _choices(steps: Sequence[Sequence[Update]]) -> list[list[int]]:
    """Return all parameters, and the largest one alone, for optimizers that treat some in another way."""
    every = list(range(len(steps[0])))
    largest = max(every, key=lambda i: steps[-1][i].left.size, default=0)
    return [every, [largest]] if len(every) > 1 else [every]


def _history(steps: Sequence[Sequence[Update]], side: str) -> History:
    return History(
        [[u.parameter for u in step] for step in steps],
        [[u.gradient for u in step] for step in steps],
        [[getattr(u, side) for u in step] for step in steps],
    )


def _moments(side: _Side, chosen: Sequence[int], gap: float) -> Moments | None:
    own = side.history.of(chosen)
    return moments_of(own, side.numbers, clipped=side.clipped, gap=gap, norms=side.history.norms())


def _gap(updates: Sequence[Update], chosen: Sequence[int]) -> float:
    """Return how far the updates of both sides are apart, relative to the largest."""
    largest = max((_most(updates[i].left) for i in chosen), default=0.0)
    apart = max((_most(updates[i].left - updates[i].right) for i in chosen), default=0.0)
    return apart / largest if largest else 0.0


def _most(x: Any) -> float:
    return float(np.abs(x).max(initial=0.0))


def _of_rates(
    left: Moments, right: Moments, chosen: Sequence[int], steps: Sequence[Sequence[Update]]
) -> Told | None:
    code, mine, theirs = left.name, left.rates, right.rates
    if code != right.name or mine == theirs:
        return None
    names = ("beta1", "beta2") if code == "betas" else ("the momentum",)
    parts = [
        f"{name} is {a:.6g} on the left and {b:.6g} on the right"
        for name, a, b in zip(names, mine, theirs, strict=True)
        if a != b
    ]
    formula = "Adam's formula" if code == "betas" else "SGD's formula"
    evidence = (
        f"With these, {formula} gives each side's update of step {len(steps)} from all gradients so far."
    )
    made = dict(zip(chosen, left.made, strict=True))
    return Told(code, f"{'; '.join(parts)}.", evidence, [made.get(i) for i in range(len(steps[-1]))])
