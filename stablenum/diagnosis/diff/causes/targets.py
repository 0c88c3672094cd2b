"""What the gradients of a cross-entropy with respect to its logits show of its targets.

The gradient is a p - t in each row, with the softmax p, the targets t and their sum a, the weight of the
row. All classes but the label have the same target, 0 without label smoothing. So two numbers and the label
explain a whole row, whatever the loss was computed with. Where classes have weights, label smoothing gives
each class its own target, which is the same in all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.sides.equality import SAME_FORMULA

__all__ = ["Targets", "targets_of"]

# With targets of its own for each class, a system of so many equations is solved: 8 MiB. Chosen, not
# measured.
_MOST_CLASSES = 1024
# Labels are guessed, and where they do not fit guessed again, so many times in all. Chosen, not measured.
_TURNS = 3
# Beyond, the equations do not tell the targets: in the tests 4, and 6e16 where all rows are alike.
_MOST_CONDITION = 1e7
# A row whose gradient is smaller than this part of the largest one is not counted in the loss.
_UNCOUNTED = 1e-12


class Targets(NamedTuple):
    """What the gradients show of the targets, row by row.

    Attributes:
        rows: the softmax of each row, [rows, classes].
        label: the class that differs from the others.
        on, off: the targets of that class and of each other class, as parts of the weight; the mean of the
            others if they differ.
        weight: the weight of the row in the loss; 0 if it is left out.
        shape: that of the rows, before they were put one after the other.
        spread: the part of the targets that is spread over all classes, [classes]; None if all classes have
            the same.
    """

    rows: Any
    label: Any
    on: Any
    off: Any
    weight: Any
    shape: tuple[int, ...]
    spread: Any = None

    @property
    def own(self) -> Any:
        """What the label of each row has more than label smoothing gives to it."""
        return self.weight * self.on - self._smoothed

    @property
    def loss(self) -> float:
        """The cross-entropy with these targets, of all rows together."""
        others = (self.weight * self.off)[:, None] if self.spread is None else self.spread
        targets = np.where(self.weight[:, None] > 0, others, np.zeros(self.rows.shape))
        targets[np.arange(len(targets)), self.label] = self.weight * self.on
        counted = targets != 0
        return -float((targets[counted] * np.log(self.rows[counted])).sum())

    @property
    def share(self) -> Any:
        """The label smoothing of each row: the share that goes to all classes."""
        with np.errstate(all="ignore"):
            ratio = self.rows.shape[1] * self._smoothed / self.own
        return ratio / (1 + ratio)

    @property
    def _smoothed(self) -> Any:
        return self.weight * self.off if self.spread is None else self.spread[self.label]


def targets_of(p: Any, gradient: Any) -> Targets | None:
    """Return the targets with which the gradient of a cross-entropy is explained; None if it is not one.

    Args:
        p: the softmax, [rows, classes].
        gradient: that of the loss with respect to the logits, [rows, classes].
    """
    size = np.abs(gradient).max(axis=1)
    counted = size > _UNCOUNTED * size.max(initial=0.0)
    if not counted.any() or np.abs(gradient.sum(axis=1)).max() > SAME_FORMULA * size.max():
        return None
    label, on, off = (np.zeros(len(p), kind) for kind in (int, float, float))
    weight, open_rows = np.zeros(len(p)), counted.copy()
    for guess in _guesses(p, gradient):
        a, b, gap = _fitted(p, gradient, guess)
        with np.errstate(all="ignore"):
            fits = open_rows & (gap <= SAME_FORMULA * size) & (a > 0)
        at = np.arange(len(p))[fits]
        label[fits], weight[fits], off[fits] = guess[fits], a[fits], b[fits] / a[fits]
        on[fits] = p[at, guess[fits]] - gradient[at, guess[fits]] / a[fits]
        open_rows &= ~fits
    if open_rows.any():
        return _weighted(p, gradient, counted)
    return Targets(p, label, on, off, weight, (len(p),))


def _guesses(p: Any, gradient: Any) -> Iterator[Any]:
    """Yield guesses of the label of each row."""
    yield gradient.argmin(axis=1)
    whole = np.zeros(len(p), int) - 1
    a, b, _ = _fitted(p, gradient, whole)
    yield np.abs(gradient - a[:, None] * p + b[:, None]).argmax(axis=1)
    yield p.argmax(axis=1)


def _fitted(p: Any, gradient: Any, without: Any) -> tuple[Any, Any, Any]:
    """Fit ``gradient = a p - b`` in each row, without one class (-1 for none). Return a, b and the largest
    deviation."""
    kept = np.ones(p.shape)
    at = np.arange(len(p))[without >= 0]
    kept[at, without[without >= 0]] = 0.0
    n, sp, sg = kept.sum(1), (kept * p).sum(1), (kept * gradient).sum(1)
    mean_p, mean_g = sp / n, sg / n
    dp, dg = kept * (p - mean_p[:, None]), kept * (gradient - mean_g[:, None])
    with np.errstate(all="ignore"):
        a = (dp * dg).sum(1) / (dp * dp).sum(1)
    b = a * mean_p - mean_g
    return a, b, np.abs(kept * (gradient - a[:, None] * p + b[:, None])).max(axis=1)


# --- class weights ---


def _weighted(p: Any, gradient: Any, counted: Any) -> Targets | None:
    """Return the targets if each class but the label has one of its own, the same in all rows. Scores that
    are masked are no logits of classes."""
    x, g = p[counted], gradient[counted]
    rows, classes = x.shape
    if classes > _MOST_CLASSES or rows * (classes - 2) < classes or not x.all():
        return None
    label, at = g.argmin(axis=1), np.arange(rows)
    for _ in range(_TURNS):
        kept = np.ones(x.shape)
        kept[at, label] = 0.0
        found = _spread(kept * x, kept * g, kept)
        if found is None:
            return None
        spread, a = found
        gap = np.abs(a[:, None] * x - spread - g)
        if (kept * gap).max() <= SAME_FORMULA * np.abs(g).max():
            break
        label = gap.argmax(axis=1)
    else:
        return None
    if (a <= 0).any():
        return None
    on = x[at, label] - g[at, label] / a
    off = (spread.sum() - spread[label]) / (classes - 1) / a
    labels, on, off, a = (_filled(v, counted) for v in (label, on, off, a))
    return Targets(p, labels, on, off, a, (len(p),), spread)


def _filled(values: Any, where: Any) -> Any:
    """Return values where they belong, and zeros elsewhere."""
    whole = np.zeros(len(where), values.dtype)
    whole[where] = values
    return whole


def _spread(p: Any, g: Any, kept: Any) -> tuple[Any, Any] | None:
    """Fit ``g = a p - spread`` with one ``a`` for each row and one ``spread`` for each class, over the
    entries that are kept; the others are zero. Return both, or None if they are not known."""
    squares = (p * p).sum(axis=1)
    if not squares.all():
        return None
    matrix = np.diag(kept.sum(axis=0)) - p.T @ (p / squares[:, None])
    along = (p * g).sum(axis=1) / squares
    if np.linalg.cond(matrix) > _MOST_CONDITION:  # as where all rows are alike
        return None
    spread = np.linalg.solve(matrix, (p * along[:, None] - g).sum(axis=0))
    return spread, along + (p @ spread) / squares
