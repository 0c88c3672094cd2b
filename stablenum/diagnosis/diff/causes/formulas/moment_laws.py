"""Find the decay rates of an optimizer's moments from the numbers of several steps.

The first step from fresh moments does not hold them, since bias correction cancels them; a later one does:

    SGD    u = -a m - b p          with m = b1 m + g, or g + b1 m in place of m (Nesterov)
    Adam   u = -a m / (sqrt(v) + e) - b p    with both moments corrected for their start at zero

Of the numbers that a side computes with, those are taken that give its update, whatever its rate is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.formulas.update_laws import DIGITS_OF_RATE, Law, law_of
from stablenum.diagnosis.diff.sides.equality import SAME_UPDATE

__all__ = ["History", "Moments", "moments_of"]

# So many entries, spread over all parameters, tell which numbers fit; all of them then have to. With so many
# rates for each of two moments, that is a table of 48 x 48 x 256 numbers: 4.5 MiB. Chosen, not measured.
_ENTRIES, _MOST_RATES = 256, 48
# Larger numbers are decay rates. Chosen, not measured.
_LARGEST_EPSILON = 1e-2
# A law fits if it is so much nearer than the one that it is to be told from. Chosen, not measured.
_NEARER = 1e-2
# The decay rates that optimizers have by default, and that papers use, are tried first.
_USUAL = (0.9, 0.999, 0.99, 0.95, 0.98, 0.5)
# A larger number is no weight decay.
_LARGEST_DECAY = 0.5


class Moments(NamedTuple):
    """What the moments of an optimizer decay by.

    Attributes:
        name: "betas" or "momentum".
        rates: both decay rates of Adam's moments, or that of SGD's.
        made: the last update by this formula, parameter by parameter.
    """

    name: str
    rates: tuple[float, ...]
    made: Sequence[Any]


@dataclass(frozen=True, slots=True)
class History:
    """What one side did in the steps up to one, each as a list of arrays by parameter.

    Attributes:
        parameters, gradients, updates: step by step.
    """

    parameters: Sequence[Sequence[Any]]
    gradients: Sequence[Sequence[Any]]
    updates: Sequence[Sequence[Any]]

    def of(self, chosen: Sequence[int]) -> History:
        """Return the history of some of the parameters."""
        kept = ([[row[i] for i in chosen] for row in rows] for rows in self._all())
        return History(*kept)

    def scaled(self, factors: Sequence[float]) -> History:
        """Return the history with the gradients of each step multiplied by a factor."""
        rows = [[c * g for g in row] for c, row in zip(factors, self.gradients, strict=True)]
        return History(self.parameters, rows, self.updates)

    def norms(self) -> list[float]:
        """Return the norm of all gradients of each step."""
        return [math.sqrt(sum(float((g * g).sum()) for g in row)) for row in self.gradients]

    def _all(self) -> Iterable[Sequence[Sequence[Any]]]:
        return self.parameters, self.gradients, self.updates


def moments_of(
    history: History,
    numbers: Collection[float],
    *,
    clipped: bool = False,
    norms: Sequence[float] = (),
    gap: float = 1.0,
) -> Moments | None:
    """Return the decay rates of the moments; None if no numbers give the update of the last step.

    Args:
        history: of at least two steps, the first from fresh moments.
        numbers: the constants of the update.
        clipped: whether the gradients may have been clipped by their global norm before.
        norms: these norms, step by step; those of the history by default.
        gap: how far the update is off the one that it must be distinguished from, relative to its size.
    """
    rates, epsilons = _rates(numbers), sorted(n for n in numbers if 0 < n <= _LARGEST_EPSILON)
    limits = [n for n in numbers if n > 0] if clipped else []
    norms = norms or history.norms()
    for limit in (math.inf, *limits):
        factors = [min(1.0, limit / n) if n else 1.0 for n in norms]
        if limit == math.inf or min(factors) < 1:
            found = _fitting(history.scaled(factors), rates, epsilons, min(SAME_UPDATE, _NEARER * gap))
            if found is not None:
                return found
    return None


def _rates(numbers: Collection[float]) -> list[float]:
    """Return which numbers may be decay rates; of some, programs compute with what is missing to 1."""
    found = {0.0, *(round(x, DIGITS_OF_RATE) for n in numbers for x in (n, 1 - n) if 0 < x < 1)}
    return sorted(found, key=lambda x: (x not in _USUAL, -x))[:_MOST_RATES]


def _fitting(
    history: History, rates: Sequence[float], epsilons: Sequence[float], exact: float
) -> Moments | None:
    law = law_of(history.parameters[0], history.gradients[0], history.updates[0])
    if law is None:
        return None
    rows = _flat(history, law.decayed if law.decay else ())
    few = rows[:, :, :: max(1, rows.shape[2] // _ENTRIES)]
    for form, count in _forms(law, rates, epsilons):
        grid = np.stack([np.ravel(g) for g in np.meshgrid(*[rates] * count, indexing="ij")], axis=1)
        best = grid[[int(np.argmin(_errors(few, *form(few, grid))))]]
        direction, decayed = form(rows, best)
        if _errors(rows, direction, decayed)[0] <= exact:
            name = "betas" if count == 2 else "momentum"
            return Moments(
                name, tuple(float(x) for x in best[0]), _made(history, rows, direction[0], decayed)
            )
    return None


def _made(history: History, rows: Any, direction: Any, decayed: Any) -> list[Any]:
    """Return the combination of a direction and the parameters that gives the last update, by parameter."""
    columns = np.stack([direction, direction if decayed is None else decayed], axis=1)
    factors, *_ = np.linalg.lstsq(columns, rows[2][-1], rcond=None)
    ends = np.cumsum([u.size for u in history.updates[-1]])
    parts = np.split(columns @ factors, ends[:-1])
    return [x.reshape(u.shape) for x, u in zip(parts, history.updates[-1], strict=True)]


def _forms(
    law: Law, rates: Sequence[float], epsilons: Sequence[float]
) -> Iterator[tuple[Callable[[Any, Any], Any], int]]:
    """Yield what gives the direction of the update for each row of a grid of rates, beside the parameters if
    these are decayed apart from it, and how many rates it takes.

    Of Adam, the first step hardly holds how much decay is added to the gradient: the constants are tried. So
    are those that may be the epsilon, since the first step may have been set right.
    """
    if law.name == "gradient":
        for nesterov in (False, True):
            for decay in (0.0, law.decay / law.rate):
                yield partial(_sgd, nesterov=nesterov, decay=decay), 1
        return
    inside = law.name == "inside"
    added = [law.decay] if law.coupled else []
    for decay in dict.fromkeys((*added, 0.0, *(r for r in rates if r < _LARGEST_DECAY))):
        for epsilon in (law.epsilon, *epsilons):
            yield partial(_adam, epsilon=epsilon, inside=inside, decay=decay), 2


def _flat(history: History, decayed: Sequence[bool]) -> Any:
    """Return parameters (zeros where only others are decayed), gradients and updates, by step and entry."""
    on = decayed or (True,) * len(history.parameters[0])
    ps = [[p * d for p, d in zip(row, on, strict=True)] for row in history.parameters]
    return np.stack(
        [
            np.stack([np.concatenate([np.ravel(x) for x in row]) for row in rows])
            for rows in (ps, history.gradients, history.updates)
        ]
    )


def _adam(rows: Any, grid: Any, *, epsilon: float, inside: bool, decay: float) -> tuple[Any, Any]:
    ps, gs, _ = rows
    hs = gs + decay * ps
    rates, at = np.unique(grid, return_inverse=True)
    at = at.reshape(grid.shape)
    first, second = _means(hs, rates), _means(hs * hs, rates)
    e = epsilon + 1e-300  # keeps 0 / 0 from being NaN
    roots = np.sqrt(second + e) if inside else np.sqrt(second) + e
    return first[at[:, 0]] / roots[at[:, 1]], None if decay else ps[-1]


def _sgd(rows: Any, grid: Any, *, nesterov: bool, decay: float) -> tuple[Any, Any]:
    ps, gs, _ = rows
    hs = gs + decay * ps
    m = _powers(grid[:, 0], len(hs)) @ hs
    return hs[-1] + grid * m if nesterov else m, None if decay else ps[-1]


def _powers(rates: Any, count: int) -> Any:
    return rates[:, None] ** np.arange(count - 1, -1, -1.0)


def _means(xs: Any, rates: Any) -> Any:
    """Return the running mean of the rows for each decay rate, corrected for its start at zero."""
    weights = _powers(rates, len(xs))
    return (weights / weights.sum(axis=1, keepdims=True)) @ xs


def _errors(rows: Any, made: Any, p: Any) -> Any:
    """Return for each row the largest error of its best combination with the parameters, relative to the
    largest entry that is wanted; infinity for rows of zeros."""
    wanted = rows[2][-1]
    scale = float(np.abs(wanted).max(initial=0.0)) or 1.0
    if p is not None and p.any():
        unit = p / np.sqrt((p * p).sum())
        wanted = wanted - (wanted @ unit) * unit
        made = made - (made @ unit)[:, None] * unit
    with np.errstate(all="ignore"):
        factors = (made @ wanted) / (made * made).sum(axis=1)
        found = np.abs(wanted - factors[:, None] * made).max(axis=1, initial=0.0) / scale
    return np.where(np.isfinite(found), found, math.inf)
