"""Name the cause of a difference between two cross-entropies by the targets that their gradients show.

See ``targets``: they are known whatever the losses were computed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.causes.targets import Targets, targets_of
from stablenum.diagnosis.diff.sides.equality import SAME_FORMULA
from stablenum.diagnosis.diff.sides.sides import MOST_ENTRIES, Side, arrays_of

__all__ = ["by_targets"]

# Rows of fewer numbers may well sum to 0 for another reason. Chosen, not measured.
_LEAST_CLASSES = 4
# The first gradients of the backward pass, and the last values of the forward pass, that are looked at: those
# of a loss lie there. Chosen, not measured.
_MOST_VALUES, _MOST_LOGITS = 40, 8
_DIGITS = 7  # as many as SAME_FORMULA compares
# So much of the labels must agree after a shift: what is shifted out of a sequence has no counterpart. And
# half as many more than before. Chosen, not measured.
_SHIFTED, _BETTER = 0.6, 1.5


def by_targets(scene: Scene) -> Iterator[Proposal]:
    """Propose the left side's targets for the right side's cross-entropy, whose logits agree."""
    if scene.group.kind != "loss":
        return
    left = _found(scene, "left")
    right = None if left is None else _found(scene, "right")
    if left is not None and right is not None:
        yield from _compared(scene, left, right)


def _found(scene: Scene, name: str) -> Targets | None:
    """Return the targets of a side's cross-entropy, from a gradient whose rows sum to zero."""
    side, since = scene.comparison.side(name), scene.group.since[name == "right"]
    following = (r.value for r in side.play.results if (r.kind, r.step) == ("gradient", scene.group.step))
    last = max(following, default=len(side.shapes))
    steps = (s for s in side.trace.steps if s.index > since and s.outputs and s.outputs[0] <= last)
    phases = {o: s.phase for s in steps for o in s.outputs}
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
    fits = len(shape) > 1 and shape[-1] >= _LEAST_CLASSES and np.prod(shape, dtype=int) <= MOST_ENTRIES
    return fits and side.prints[value].floating


def _of_size(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return shape[-1] == other[-1] and np.prod(shape, dtype=int) == np.prod(other, dtype=int)


def _sums_to_zero(side: Side, value: int) -> bool:
    mark = side.prints[value]
    # Up to 4e-16 in the tests, and 6e-4 and more where the rows do not.
    return bool(mark.entries) and abs(mark.total) <= 1e-9 * mark.absolute


def _softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


# --- two sides ---


class _Reason(NamedTuple):
    """What differs; without a remedy of its own, the remedy of the code holds."""

    code: str
    sentence: str
    remedy: str = ""


def _compared(scene: Scene, left: Targets, right: Targets) -> Iterator[Proposal]:
    pairs = _pairs(left.rows, right.rows)
    if 2 * len(pairs) < min(len(left.rows), len(right.rows)):
        return
    i, j = (np.array(x, int) for x in zip(*pairs, strict=True))
    both = (left.weight[i] > 0) & (right.weight[j] > 0)
    found = _labels(left, right, i, j, both) or _rows(left, right, i, j)
    if found is None and both.any():
        found = _smoothing(left, right, i[both], j[both]) or _weights(left, right, i[both], j[both])
    if found is None:
        return
    # Terms that both losses have beside the cross-entropies, such as a penalty, stay as they are.
    loss = scene.group.pairs[0].right.value
    changed = scene.right.arrays[loss] + (left.loss - right.loss)
    yield Proposal(
        found.code,
        found.sentence,
        [(Edit("right", {loss: changed}),)],
        "With the cross-entropy of the left one's targets",
        f"The gradients with respect to the logits show it, in {len(pairs)} rows.",
        likely=True,
        remedy=found.remedy or None,
    )


def _pairs(mine: Any, theirs: Any) -> list[tuple[int, int]]:
    """Return which rows have the same softmax."""
    known: dict[bytes, list[int]] = {}
    for i, row in enumerate(np.round(mine, _DIGITS) + 0.0):
        known.setdefault(row.tobytes(), []).append(i)
    found = []
    for j, row in enumerate(np.round(theirs, _DIGITS) + 0.0):
        same = known.get(row.tobytes())
        if same:
            found.append((same.pop(0) if len(same) > 1 else same[0], j))
    return found


def _labels(left: Targets, right: Targets, i: Any, j: Any, both: Any) -> _Reason | None:
    differ = left.label[i[both]] != right.label[j[both]]
    if not differ.any():
        return None
    for shift in _shifts(right.shape):
        at = j + shift
        inside = (at >= 0) & (at < len(right.label)) & (left.weight[i] > 0)
        inside[inside] &= right.weight[at[inside]] > 0
        same = left.label[i[inside]] == right.label[at[inside]]
        if inside.any() and same.mean() >= max(_SHIFTED, _BETTER * (1 - differ.mean())):
            where = "before" if shift > 0 else "after"
            told = f"the right program has the labels that the left one has one position {where}."
            return _Reason("label_shift", told)
    return None


def _shifts(shape: Iterable[int]) -> list[int]:
    steps = {1, *(int(n) for n in shape)}
    return [sign * step for step in sorted(steps) for sign in (1, -1)]


def _rows(left: Targets, right: Targets, i: Any, j: Any) -> _Reason | None:
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
            told = f"the {name} program counts {more} rows that the {other} one leaves out."
            return _Reason("ignored_labels", told)
    return None


def _smoothing(left: Targets, right: Targets, i: Any, j: Any) -> _Reason | None:
    if left.spread is not None or right.spread is not None:
        return _weighted_smoothing(left, right, i, j)
    near = (
        np.abs(left.on[i] - right.on[j]).max() < SAME_FORMULA
        and np.abs(left.off[i] - right.off[j]).max() < SAME_FORMULA
    )
    if near:
        return None
    told = [f"{_told(t.on[at])} ({_told(t.off[at])})" for t, at in ((left, i), (right, j))]
    return _Reason(
        "label_smoothing",
        f"the target of the label (of each other class) is {told[0]} on the left and {told[1]} on the right.",
    )


def _weighted_smoothing(left: Targets, right: Targets, i: Any, j: Any) -> _Reason | None:
    """Compare the label smoothing of two losses, at least one of which treats the classes differently."""
    shares = left.share[i], right.share[j]
    if all(map(_one_number, shares)):
        mine, theirs = (float(np.median(s)) for s in shares)
        if abs(mine - theirs) < _ROUGH:
            return None
        return _Reason(
            "label_smoothing",
            f"the label smoothing, with class weights, is {_told(shares[0])} on the left and "
            f"{_told(shares[1])} on the right.",
        )
    name, other = ("right", "left") if left.spread is None else ("left", "right")
    weighted = left.spread is not None and right.spread is not None
    differs = (
        "the two programs weight the classes differently."
        if weighted
        else f"the {name} program weights the classes, and the {other} one does not."
    )
    return _Reason("label_smoothing", f"in the term of the label smoothing, {differs}", _SMOOTH_ALIKE)


def _one_number(values: Any) -> bool:
    return bool(values.max() - values.min() < _ROUGH)


def _told(targets: Any) -> str:
    # Rounded to what is compared; + 0.0 turns -0 into 0.
    return f"{round(float(np.median(targets)), _DIGITS) + 0.0:.6g}"


def _weights(left: Targets, right: Targets, i: Any, j: Any) -> _Reason | None:
    ratio = right.own[j] / left.own[i]
    low, high = float(ratio.min()), float(ratio.max())
    if max(abs(low - 1), abs(high - 1)) < SAME_FORMULA:
        return None
    if high - low < SAME_FORMULA * high:
        told = f"each row weighs {high:.6g} times as much on the right as on the left"
        return _Reason("reduction", *_divided(left, right, told))
    classes = _by_class(left, right, i, j)
    told = f"a row weighs {low:.6g} to {high:.6g} times as much on the right as on the left."
    return classes or _Reason("reduction", told)


def _divided(left: Targets, right: Targets, told: str) -> tuple[str, str]:
    """Return the sentence and the remedy where rows have different weights in the two losses; those for class
    weights if one side divides by their sum."""
    sums = [_sums_to_one(t) for t in (left, right)]
    if sums[0] == sums[1] or not _vary_by_class(left):
        return f"{told}.", ""
    name, other = ("left", "right") if sums[0] else ("right", "left")
    by = f"the {name} program divides by the sum of the class weights of the rows, the {other} one does not"
    return f"{by}: {told}.", _WEIGHTED_MEAN


def _vary_by_class(targets: Targets) -> bool:
    """Return whether rows of the same label weigh the same, and rows of different labels do not."""
    counted = targets.weight > 0
    own, labels = targets.own[counted], targets.label[counted]
    return not _alike(own) and all(_alike(own[labels == label]) for label in np.unique(labels))


def _sums_to_one(targets: Targets) -> bool:
    counted = targets.weight > 0
    return abs(float((targets.own[counted] / (1 - targets.share[counted])).sum()) - 1) < _ROUGH


def _alike(values: Any) -> bool:
    return bool(values.max() - values.min() < SAME_FORMULA * values.max())


def _by_class(left: Targets, right: Targets, i: Any, j: Any) -> _Reason | None:
    """Return the cause where a side weights rows by class: all rows of a label weigh the same."""
    labels, sides = left.label[i], (left.own[i], right.own[j])
    rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    known = any(len(r) > 1 for r in rows) or left.spread is not None or right.spread is not None
    if not known or not all(_alike(own[r]) for own in sides for r in rows):
        return None
    mine, theirs = (_class_weights(own, labels, rows) for own in sides)
    if mine and theirs:
        sentence = f"the class weights differ: on the left {mine}, on the right {theirs}, up to a factor."
        return _Reason("reduction", sentence, "Give both losses the same class weights, in the same order.")
    name, other = ("left", "right") if mine else ("right", "left")
    sentence = (
        f"the {name} program weights each row by its class, and the {other} one does not. Its class weights "
        f"are, up to a factor, {mine or theirs}."
    )
    return _Reason("missing_operation" if mine else "extra_operation", sentence, _CLASS_WEIGHTS)


def _class_weights(own: Any, labels: Any, rows: list[Any]) -> str:
    """Return the classes' weights as multiples of the first; nothing if all are the same."""
    if _alike(own):
        return ""
    first = own[rows[0][0]]
    shown = [f"{own[r[0]] / first:.4g} for class {labels[r[0]]}" for r in rows[:_MOST_SHOWN]]
    return ", ".join(shown if len(rows) <= _MOST_SHOWN else [*shown, "..."])


# Shares of label smoothing, which are quotients of what is fitted, are one number: up to 1e-16 in the tests,
# and a tenth and more where they are several.
_ROUGH = 1e-6
_MOST_SHOWN = 8  # classes whose weights a sentence gives; chosen, not measured
_WEIGHTED_MEAN = (
    "With class weights, F.cross_entropy divides by the sum of the weights of the rows: in jax, "
    "(w[y] * losses).sum() / w[y].sum(), not .mean()."
)
_CLASS_WEIGHTS = (
    "Use the class weights on both sides: weight= of F.cross_entropy is, in jax, "
    "(w[y] * losses).sum() / w[y].sum()."
)
_SMOOTH_ALIKE = (
    "Weight both in one way: F.cross_entropy multiplies the log-probability of each class by its weight in "
    "the smoothing term, too: -(w * logp).sum(-1). It divides both terms by w[y].sum()."
)
