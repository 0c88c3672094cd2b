"""Find the law of an update from the numbers: what was done with the gradient?

After one step from fresh moments, the update of a parameter p with the gradient g is in all usual optimizers

    SGD                     u = -a g - b p
    Adam, epsilon outside   u = -a g / (|g| + e) - b p
    Adam, epsilon inside    u = -a g / sqrt(g^2 + e) - b p

with g + c p in place of g if the decay is added to the gradient. The constants are fitted to the numbers by
Gauss-Newton; a law is accepted if it gives every element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from stablenum.diagnosis.diff.sides.equality import SAME_FORMULA

__all__ = ["DIGITS_OF_RATE", "Law", "law_of"]

# Gauss-Newton ends after some rounds if a law fits; if it does not, after so many. Chosen, not measured.
_ROUNDS = 60
_STEP = 1e-4  # of derivatives, in units of each constant: they need not be exact, since rounds follow
# A decay adds more than this part to a gradient, or to an update: in the tests 2e-4 and more, and 1e-12 where
# there is none.
_NOTHING = 1e-9
# Of a rate that is given as one minus it: 1 - 0.9 is 0.09999999999999998.
DIGITS_OF_RATE = 12
_MOST_TRIED = 4  # parameters, the largest first, until one is decayed; chosen, not measured
_Row: TypeAlias = tuple[Any, Any, Any]  # a parameter, its gradient and its update
# Where the fit of a decay that is added to the gradient begins: the signs of small gradients depend on it.
_DECAYS = (1e-2, 1e-1, 1e-3, 5e-2, 5e-3, 5e-4, 1e-4, 0.5, 1e-5)


@dataclass(frozen=True, slots=True)
class Law:
    """What one side does.

    Attributes:
        name: "gradient", "outside" or "inside": how the gradient is scaled.
        rate: a.
        epsilon: e; 0 for "gradient".
        decay: b, or c if ``coupled``.
        coupled: whether the decay is added to the gradient.
        decayed: for each parameter, whether it is decayed.
    """

    name: str
    rate: float
    epsilon: float = 0.0
    decay: float = 0.0
    coupled: bool = False
    decayed: tuple[bool, ...] = ()

    def update(self, parameter: Any, gradient: Any, *, decayed: bool) -> Any:
        """Return the update of one parameter."""
        constants = self.rate, self.epsilon, self.decay if decayed else 0.0
        return _made(self.name, parameter, gradient, constants, coupled=self.coupled)

    def __str__(self) -> str:
        h = f"(g + {self.decay:.4g} p)" if self.coupled else "g"
        scaled = {
            "gradient": h, "outside": f"{h} / (|{h}| + {self.epsilon:.4g})",
            "inside": f"{h} / sqrt({h}^2 + {self.epsilon:.4g})",
        }[self.name]  # fmt: skip
        rest = f" - {self.decay:.4g} p" if self.decay and not self.coupled else ""
        return f"-{self.rate:.6g} {scaled}{rest}"


def law_of(parameters: Sequence[Any], gradients: Sequence[Any], updates: Sequence[Any]) -> Law | None:
    """Return the simplest law that gives all updates; None if none does."""
    rows = list(zip(parameters, gradients, updates, strict=True))
    for name, coupled in (
        ("gradient", False), ("outside", False), ("inside", False), ("outside", True), ("inside", True),
    ):  # fmt: skip
        law = None if coupled else _fitted(name, rows, (False,) * len(rows))
        if law is None:
            decayed = _decayed(name, rows, coupled=coupled)
            law = _fitted(name, rows, decayed, coupled=coupled) if any(decayed) else None
        if law is not None:
            return law
    return None


def _decayed(name: str, rows: Sequence[_Row], *, coupled: bool) -> tuple[bool, ...]:
    """Return which parameters are decayed, by the law of the largest one that is; none if that has no law."""
    for row in sorted(rows, key=lambda r: -r[0].size)[:_MOST_TRIED]:
        law = _fitted(name, [row], (True,), coupled=coupled)
        if law is None:
            break
        if abs(law.decay) * _most(row[0]) > _NOTHING * _most(row[1] if coupled else row[2]):
            without = replace(law, decay=0.0)
            return tuple(_gap(law, r) < _gap(without, r) for r in rows)
    return ()


def _gap(law: Law, row: _Row) -> float:
    p, g, u = row
    return _most(u - _made(law.name, p, g, (law.rate, law.epsilon, law.decay), coupled=law.coupled))


def _most(x: Any) -> float:
    return float(np.abs(x).max(initial=0.0))


def _fitted(
    name: str, rows: Sequence[_Row], decayed: tuple[bool, ...], *, coupled: bool = False
) -> Law | None:
    p = np.concatenate([np.ravel(row[0]) * on for row, on in zip(rows, decayed, strict=True)])
    g, u = (np.concatenate([np.ravel(row[i]) for row in rows]) for i in (1, 2))
    if not u.any() or not g.any():
        return None
    free = (True, name != "gradient", any(decayed))
    starts = _DECAYS if coupled else (0.0,)
    made = partial(_made, name, p, g, coupled=coupled)
    with np.errstate(all="ignore"):
        found = (_solved(made, _start(name, g, u, d), free, u) for d in starts)
        constants = next((c for c in found if c is not None), None)
    return None if constants is None else Law(name, *constants, coupled, decayed)


def _made(name: str, p: Any, g: Any, constants: Iterable[float], *, coupled: bool) -> Any:
    """Return the update that a law makes with some constants: rate, epsilon and decay."""
    a, e, d = constants
    with np.errstate(all="ignore"):
        return -a * _SCALED[name](g + d * p if coupled else g, e) - (0.0 if coupled else d * p)


# The smallest numbers keep 0 / 0 from being NaN.
_SCALED: dict[str, Callable[[Any, float], Any]] = {
    "gradient": lambda g, e: g,
    "outside": lambda g, e: g / (np.abs(g) + abs(e) + 1e-300),
    "inside": lambda g, e: g / np.sqrt(g * g + abs(e) + 1e-300),
}


def _start(name: str, g: Any, u: Any, decay: float) -> list[float]:
    if name == "gradient":
        return [float(-(u * g).sum() / (g * g).sum()), 0.0, decay]
    # Adam's usual epsilon; that within the root is of squares.
    return [float(np.median(np.abs(u))), 1e-8 if name == "outside" else 1e-12, decay]


def _solved(
    made: Callable[[Iterable[float]], Any], start: list[float], free: tuple[bool, ...], wanted: Any
) -> tuple[float, float, float] | None:
    """Fit the constants by Gauss-Newton with numerical derivatives, each constant in steps of its size, until
    they give every element and come no nearer."""
    x, scale = np.asarray(start, float), float(np.abs(wanted).max())
    rate = abs(x[0]) or scale
    # An epsilon of 0 has no size of its own.
    steps = np.asarray([rate, max(abs(x[1]), 1e-10), rate])
    index = [i for i, on in enumerate(free) if on]
    best, found = SAME_FORMULA * scale, None
    for _ in range(_ROUNDS):
        gap = wanted - made(x)
        size = float(np.abs(gap).max())
        if found is not None and size > best / 2:
            return found
        if size <= best:
            best, found = size, (float(x[0]), abs(float(x[1])), float(x[2]))
        columns = []
        for i in index:
            h = np.zeros(3)
            h[i] = _STEP * steps[i]
            columns.append((made(x + h) - made(x - h)) / (2 * _STEP))
        slopes = np.stack(columns, axis=1)
        if not (np.isfinite(slopes).all() and np.isfinite(gap).all()):
            return found
        moved, *_ = np.linalg.lstsq(slopes, gap, rcond=None)
        x[index] += moved * steps[index]
        steps[1] = max(abs(x[1]), 1e-12)
    return found
