"""Name the cause of a difference between two cross-entropies by the targets that their gradients show.

The gradient with respect to the logits is a(p - t) in each row, with the softmax p, the targets t and the
weight a of the row. All classes but the label have the same target, 0 without label smoothing. So two numbers
and the label explain a whole row, whatever the loss was computed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.scene import Scene, cause
from stablenum.diagnosis.diff.sides import Side, arrays_of

__all__ = ["Targets", "by_targets", "targets_of"]

_LEAST_CLASSES = 4
_MOST_VALUES = 40
_MOST_LOGITS = 8
_MOST_ELEMENTS = 2**22
_CLOSE = 1e-7
# So much of the labels must agree after a shift: what is shifted out of a sequence has no counterpart.
_SHIFTED = 0.6


class Targets(NamedTuple):
    """What the gradients show of the targets, row by row.

    Attributes:
        rows: the softmax of each row, [rows, classes].
        label: the class that differs from the others.
        on, off: the targets of that class and of each other class.
        weight: the weight of the row in the loss; 0 if it is left out.
        shape: that of the rows, before they were put one after the other.
    """

    rows: Any
    label: Any
    on: Any
    off: Any
    weight: Any
    shape: tuple[int, ...]


def by_targets(scene: Scene) -> Cause | None:
    """Say how the targets of two cross-entropies differ, of which the logits agree."""
    if scene.group.kind != "loss":
        return None
    left = _found(scene.left)
    right = None if left is None else _found(scene.right)
    return None if left is None or right is None else _compared(left, right)


def _found(side: Side) -> Targets | None:
    """Return the targets of the cross-entropy of a side, from a gradient of which each row sums to zero."""
    phases = {o: s.phase for s in side.trace.steps for o in s.outputs}
    given = [v for v in phases if _like_logits(side, v)]
    backward = [v for v in given if phases[v] == "backward" and _sums_to_zero(side, v)][:_MOST_VALUES]
    for gradient, g in arrays_of(side, backward).items():
        shape = side.shapes[gradient]
        logits = [
            v
            for v in given
            if phases[v] == "forward" and side.prints[v].entries and _of_size(side.shapes[v], shape)
        ][-_MOST_LOGITS:]
        for x in arrays_of(side, logits).values():
            found = targets_of(_softmax(x.reshape(-1, shape[-1])), g.reshape(-1, shape[-1]))
            if found is not None:
                return found._replace(shape=shape[:-1])
    return None


def _like_logits(side: Side, value: int) -> bool:
    shape = side.shapes[value]
    fits = len(shape) > 1 and shape[-1] >= _LEAST_CLASSES and np.prod(shape, dtype=int) <= _MOST_ELEMENTS
    return fits and side.prints[value].floating


def _of_size(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return shape[-1] == other[-1] and np.prod(shape, dtype=int) == np.prod(other, dtype=int)


def _sums_to_zero(side: Side, value: int) -> bool:
    mark = side.prints[value]
    return bool(mark.entries) and abs(mark.total) <= 1e-9 * mark.absolute


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def targets_of(p: Any, gradient: Any) -> Targets | None:
    """Return the targets with which the gradient of a cross-entropy is explained; None if it is not one.

    Args:
        p: the softmax, [rows, classes].
        gradient: that of the loss with respect to the logits, [rows, classes].
    """
    size = np.abs(gradient).max(axis=1)
    counted = size > 1e-12 * size.max(initial=0.0)
    if not counted.any() or np.abs(gradient.sum(axis=1)).max() > _CLOSE * size.max():
        return None
    label, on, off = (np.zeros(len(p), kind) for kind in (int, float, float))
    weight, open_rows = np.zeros(len(p)), counted.copy()
    for guess in _guesses(p, gradient):
        a, b, gap = _fitted(p, gradient, guess)
        with np.errstate(all="ignore"):
            fits = open_rows & (gap <= _CLOSE * size) & (a > 0)
        at = np.arange(len(p))[fits]
        label[fits], weight[fits], off[fits] = guess[fits], a[fits], b[fits] / a[fits]
        on[fits] = p[at, guess[fits]] - gradient[at, guess[fits]] / a[fits]
        open_rows &= ~fits
    return None if open_rows.any() else Targets(p, label, on, off, weight, (len(p),))


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


# --- two sides ---


def _compared(left: Targets, right: Targets) -> Cause | None:
    pairs = _pairs(left.rows, right.rows)
    if 2 * len(pairs) < min(len(left.rows), len(right.rows)):
        return None
    i, j = (np.array(x, int) for x in zip(*pairs, strict=True))
    both = (left.weight[i] > 0) & (right.weight[j] > 0)
    found = _labels(left, right, i, j, both) or _rows(left, right, i, j)
    if found is None and both.any():
        found = _smoothing(left, right, i[both], j[both]) or _weights(left, right, i[both], j[both])
    if found is None:
        return None
    return cause(
        *found, f"The gradients with respect to the logits show it, in {len(pairs)} rows.", confirmed=True
    )


def _pairs(mine: Any, theirs: Any) -> list[tuple[int, int]]:
    """Return which rows have the same softmax."""
    known: dict[bytes, list[int]] = {}
    for i, row in enumerate(np.round(mine, 7) + 0.0):
        known.setdefault(row.tobytes(), []).append(i)
    found = []
    for j, row in enumerate(np.round(theirs, 7) + 0.0):
        same = known.get(row.tobytes())
        if same:
            found.append((same.pop(0) if len(same) > 1 else same[0], j))
    return found


def _labels(left: Targets, right: Targets, i: Any, j: Any, both: Any) -> tuple[str, str] | None:
    differ = left.label[i[both]] != right.label[j[both]]
    if not differ.any():
        return None
    for shift in _shifts(right.shape):
        at = j + shift
        inside = (at >= 0) & (at < len(right.label)) & (left.weight[i] > 0)
        inside[inside] &= right.weight[at[inside]] > 0
        same = left.label[i[inside]] == right.label[at[inside]]
        if inside.any() and same.mean() >= max(_SHIFTED, 1.5 * (1 - differ.mean())):
            where = "before" if shift > 0 else "after"
            return (
                "label_shift",
                f"the right program has the labels that the left one has one position {where}.",
            )
    return None


def _shifts(shape: Iterable[int]) -> list[int]:
    steps = {1, *(int(n) for n in shape)}
    return [sign * step for step in sorted(steps) for sign in (1, -1)]


def _rows(left: Targets, right: Targets, i: Any, j: Any) -> tuple[str, str] | None:
    counted = left.weight[i] > 0, right.weight[j] > 0
    absent = [
        int((t.weight > 0).sum() - (t.weight[np.unique(k)] > 0).sum()) for t, k in ((left, i), (right, j))
    ]
    for name, other, (mine, theirs), (more, fewer) in (
        ("left", "right", counted, absent),
        ("right", "left", counted[::-1], absent[::-1]),
    ):
        more = int((mine & ~theirs).sum()) + (more if not fewer else 0)
        if more > 0:
            return "ignored_labels", f"the {name} program counts {more} rows that the {other} one leaves out."
    return None


def _smoothing(left: Targets, right: Targets, i: Any, j: Any) -> tuple[str, str] | None:
    near = (
        np.abs(left.on[i] - right.on[j]).max() < _CLOSE and np.abs(left.off[i] - right.off[j]).max() < _CLOSE
    )
    if near:
        return None
    told = [f"{_told(t.on[at])} ({_told(t.off[at])})" for t, at in ((left, i), (right, j))]
    return (
        "label_smoothing",
        f"the target of the label (of each other class) is {told[0]} on the left and {told[1]} on the right.",
    )


def _told(targets: Any) -> str:
    # Rounded to what is compared; + 0.0 turns -0 into 0.
    return f"{round(float(np.median(targets)), 7) + 0.0:.6g}"


def _weights(left: Targets, right: Targets, i: Any, j: Any) -> tuple[str, str] | None:
    ratio = right.weight[j] / left.weight[i]
    low, high = float(ratio.min()), float(ratio.max())
    if max(abs(low - 1), abs(high - 1)) < _CLOSE:
        return None
    if high - low < _CLOSE * high:
        return "reduction", f"each row weighs {high:.6g} times as much on the right as on the left."
    return "reduction", f"a row weighs {low:.6g} to {high:.6g} times as much on the right as on the left."
