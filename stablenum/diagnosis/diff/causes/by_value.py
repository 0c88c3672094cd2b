"""Name the cause of a difference from the two values alone: what makes one of them the other?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.sides.equality import SAME_MULTIPLE
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.sides.play import MASKED

__all__ = ["DROPS", "Reason", "Values", "factor_of", "masked", "of_masks", "reason_of", "same_entries"]

DROPS = "one side drops units."
# Fewer entries may be like others by accident. Chosen, not measured.
_FEWEST = 4
# The largest ratio of two counts of entries, and the largest divisor in lowest terms. Chosen, not measured.
_LARGEST_COUNT, _LARGEST_DIVISOR = 4096, 64
# Dropout has set a part of the entries to zero that lies between these. Chosen, not measured.
_LEAST_ZERO, _MOST_ZERO = 0.02, 0.98
# Its factor times the part that is left is 1 but for chance. Chosen, not measured.
_LEAST_KEPT, _MOST_KEPT = 0.6, 1.5
# A factor nearer to 1 than this fits any arrays that differ by as little: a hundred times SAME_MULTIPLE.
_LEAST_FACTOR = 1e-6
_DROPPING = frozenset({"bernoulli", "dropout", "random_bits", "uniform"})
_LOSSES = frozenset({"cross_entropy", "gather", "log_softmax", "nll_loss", "softmax_cross_entropy"})


class Values(NamedTuple):
    """A value of each side, and what both were computed from.

    Attributes:
        mine, theirs: the left and the right one, laid out alike.
        read: arrays that both sides read.
        names: the operations that computed the two.
        moved: whether the two sides part where they move entries.
        flattened: whether each image is put in one row there, or values are put together.
    """

    mine: Any
    theirs: Any
    read: Sequence[Any]
    names: Collection[str]
    moved: bool = False
    flattened: bool = False


class Reason(NamedTuple):
    """A cause, in a sentence, with what was measured.

    Attributes:
        code, sentence, evidence: as in a cause.
        made: the right value, changed as the cause says; None if that was not tried.
    """

    code: str
    sentence: str
    evidence: str
    made: Any = None


def reason_of(values: Values) -> Reason | None:
    """Return what makes one value the other; None if no simple rule does."""
    if values.mine.size < _FEWEST:
        return None
    with np.errstate(all="ignore"):
        return next((r for rule in _RULES if (r := rule(values)) is not None), None)


# --- masks --------------------------------------------------------------------------------------------------


def masked(x: Any) -> Any:
    """Return which entries are masks: far larger than any number of a model, or not finite."""
    return ~(np.abs(x) < MASKED)


def _mask(v: Values) -> Reason | None:
    """Entries that only one side fills with minus infinity."""
    mine, theirs = masked(v.mine), masked(v.theirs)
    kept = ~(mine | theirs)
    if (mine == theirs).all() or kept.sum() < _FEWEST:
        return None
    if not _same(v.mine[kept], v.theirs[kept]):
        return _added(v)
    return of_masks(mine, theirs, "masked")._replace(made=np.where(kept, v.theirs, v.mine))


def of_masks(mine: Any, theirs: Any, done: str) -> Reason:
    """Return the reason where two masks are not the same; ``done`` says what is done to their entries."""
    counts = (
        f"{int(mine.sum())} of {mine.size} entries are {done} on the left, {int(theirs.sum())} on the right"
    )
    evidence = f"{counts}; all others are equal."
    if mine.any() and theirs.any() and _shifted(mine, theirs):
        return Reason("mask_shifted", "the mask of one side is shifted by one.", evidence)
    return Reason("mask_missing", "the two sides mask different entries.", evidence)


def _shifted(a: Any, b: Any) -> bool:
    """Return whether one mask is the other moved by one along an axis."""
    for axis in range(a.ndim):
        if a.shape[axis] < 2:
            continue
        first, last = (np.take(x, range(x.shape[axis] - 1), axis) for x in (a, b))
        rest_a, rest_b = (np.take(x, range(1, x.shape[axis]), axis) for x in (a, b))
        if (rest_a == last).all() or (first == rest_b).all():
            return True
    return False


def _added(v: Values) -> Reason | None:
    """One side adds a number where the other one masks."""
    for filled, other, name in ((v.mine, v.theirs, "left"), (v.theirs, v.mine, "right")):
        mask = masked(filled)
        if not mask.any() or mask.all() or masked(other).any():
            continue
        for x in v.read:
            if np.shape(x) != other.shape:
                continue
            gap = other - x
            if _constant(gap[mask]) and _constant(gap[~mask]) and _same(filled[~mask], x[~mask]):
                sentence = (
                    f"the {name} side masks, the other one adds {gap[mask][0]:g} and {gap[~mask][0]:g}."
                )
                return Reason("mask_added", sentence, "Every entry matches this.", v.mine)
    return None


def _zeros(v: Values) -> Reason | None:
    """Entries that only one side sets to zero."""
    mine, theirs = v.mine == 0, v.theirs == 0
    kept = ~(mine | theirs)
    if (mine == theirs).all() or kept.sum() < _FEWEST:
        return None
    factor = factor_of(v.mine[kept], v.theirs[kept])
    if factor is None:
        return None
    made = np.where(kept, factor * v.theirs, v.mine)
    if _LOSSES & set(v.names) and abs(abs(factor) - 1) < SAME_MULTIPLE:
        reason = of_masks(mine, theirs, "left out")._replace(made=made)
        return reason._replace(code="ignored_labels", sentence="the two losses leave out different labels.")
    if abs(factor - 1) < SAME_MULTIPLE:
        return of_masks(mine, theirs, "zero")._replace(made=made)
    both = f"{int(mine.sum())} entries are zero on the left, {int(theirs.sum())} on the right"
    drops = bool(_DROPPING & set(v.names))  # other functions have zeros, too
    evidence = f"{both}; the others differ by {factor:.6g}."
    return Reason("dropout", DROPS, evidence, made if drops else None)


# --- factors ------------------------------------------------------------------------------------------------


def _scale(v: Values) -> Reason | None:
    """All entries differ by one factor."""
    factor = factor_of(v.mine, v.theirs)
    if factor is None or abs(factor - 1) < _LEAST_FACTOR:
        return None
    evidence = f"Every entry on the left is {factor:.9g} times that on the right."
    zeros = float((v.mine == 0).mean())
    if _LEAST_ZERO < zeros < _MOST_ZERO and _DROPPING & set(v.names):
        rescaled = factor * (1 - zeros)
        if _LEAST_KEPT < rescaled < _MOST_KEPT or _LEAST_KEPT < (1 - zeros) / factor < _MOST_KEPT:
            return Reason(
                "dropout",
                "only one side divides by the share of units that are kept.",
                evidence,
                factor * v.theirs,
            )
    return Reason("scale", f"the two sides differ by the factor {factor:.6g}.", evidence, factor * v.theirs)


def _counts(v: Values) -> Reason | None:
    """The rows differ by the ratio of two counts: a mean over other entries."""
    if v.mine.ndim < 2:
        return None
    for axes in _rows(v.mine.ndim):
        ratio = v.mine / v.theirs
        first = ratio[tuple(slice(0, 1) if a in axes else slice(None) for a in range(ratio.ndim))]
        if not _same(ratio, np.broadcast_to(first, ratio.shape)) or first.size < 2:
            continue
        counts = [_ratio_of_counts(r) for r in first.reshape(-1)]
        if all(counts) and sum(c != 1 for c in counts) >= 2:
            shown = ", ".join(f"{c}" for c in dict.fromkeys(counts))
            return Reason(
                "reduction",
                "each row differs by a factor of its own, as with means over other numbers of entries.",
                f"Row by row, the left divided by the right is: {shown}.", first * v.theirs,
            )  # fmt: skip
    return None


def _rows(ndim: int) -> list[tuple[int, ...]]:
    """Return the axes that a mean may have been followed by: all but the first, and all but the last."""
    return [tuple(range(1, ndim)), tuple(range(ndim - 1))]


def _ratio_of_counts(r: float) -> Fraction | None:
    if not 0 < r < _LARGEST_COUNT:
        return None
    found = Fraction(float(r)).limit_denominator(_LARGEST_DIVISOR)
    return found if found and abs(float(found) - r) < SAME_MULTIPLE * r else None


# --- arrangements -------------------------------------------------------------------------------------------


def _rotation(v: Values) -> Reason | None:
    """One side rotates neighbours, the other one halves: a rotation keeps the norms of the pairs."""
    if v.mine.ndim < 2 or v.mine.shape[-1] % 2:
        return None
    for x in v.read:
        if np.shape(x)[-1:] != v.mine.shape[-1:] or np.size(x) != v.mine.size:
            continue
        mine, theirs = _rotated(v.mine, x), _rotated(v.theirs, x)
        if mine and theirs and not mine & theirs:
            return Reason(
                "rotary_layout",
                f"the left side rotates {next(iter(mine))}, the right one {next(iter(theirs))}.",
                "A rotation keeps the norm of each pair; these are the pairs whose norms each side keeps.",
            )
    return None


def _rotated(y: Any, x: Any) -> set[str]:
    """Return which pairs of the last axis have kept their norms."""
    return {name for name, norms in _PAIRS.items() if _alike(norms(y), norms(x))}


_PAIRS: dict[str, Callable[[Any], Any]] = {
    "neighbours": lambda x: x[..., 0::2] ** 2 + x[..., 1::2] ** 2,
    "halves": lambda x: x[..., : x.shape[-1] // 2] ** 2 + x[..., x.shape[-1] // 2 :] ** 2,
}


def _permutation(v: Values) -> Reason | None:
    """The same numbers in another order."""
    mine, theirs = np.sort(v.mine, axis=None), np.sort(v.theirs, axis=None)
    if not v.moved or not _same(mine, theirs) or _constant(mine) or v.mine.ndim < 2:
        return None
    for axis in range(v.mine.ndim):
        if _same(np.flip(v.mine, axis), v.theirs):
            told = f"The two are equal with axis {axis} flipped."
            return Reason(
                "entry_order", "the same numbers are in reverse order.", told, np.flip(v.theirs, axis)
            )
    # No heads are split or merged in images, or where rows are moved whole (of four axes, one may be heads).
    rows = range(v.mine.ndim - 1 if v.mine.ndim < 4 else 0)
    entries = v.flattened or any(_moved_whole(v.mine, v.theirs, axis) for axis in rows)
    return Reason(
        "entry_order" if entries else "head_split_order",
        "the same numbers are put in another order.",
        "Sorted, the two are equal; unsorted, no transposition makes them equal.",
        v.mine if entries else None,  # that these are heads is a guess
    )


def _moved_whole(a: Any, b: Any, axis: int) -> bool:
    """Return whether one array has the other's slices along an axis, in another order."""
    if a.shape != b.shape:
        return False
    first, second = (np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (a, b))
    ordered = [x[np.lexsort(x.T[::-1])] for x in (first, second)]
    return _same(*ordered)


# --- comparisons --------------------------------------------------------------------------------------------


def _same(a: Any, b: Any) -> bool:
    if not np.size(a):
        return True
    # Differences below 1e-308 have no digits in float64.
    scale = max(float(np.abs(a).max()), float(np.abs(b).max()), 1e-300)
    return bool(np.abs(a - b).max() <= SAME_MULTIPLE * scale)


def same_entries(a: Any, b: Any) -> bool:
    """Return whether two arrays have the same entries, in whatever order."""
    return bool(np.size(a) == np.size(b) and _same(np.sort(a, axis=None), np.sort(b, axis=None)))


def _alike(a: Any, b: Any) -> bool:
    return distance(fingerprint(a), fingerprint(b)) < SAME_MULTIPLE


def _constant(x: Any) -> bool:
    return bool(np.size(x)) and _same(x, np.full_like(x, x.flat[0]))


def factor_of(a: Any, b: Any, *, fewest: int = _FEWEST) -> float | None:
    """Return c if an array is c times another one, entry by entry; None if it is not, or if that says
    nothing, as with fewer entries than ``fewest``."""
    kept = ~(masked(a) | masked(b))
    if (masked(a) != masked(b)).any() or kept.sum() < fewest:
        return None
    x, y = a[kept], b[kept]
    norm = float((y * y).sum())
    if not norm or (fewest > 1 and _constant(np.abs(y))):
        return None
    c = float((x * y).sum()) / norm
    return c if c and _same(x, c * y) else None


_RULES = (_mask, _zeros, _scale, _rotation, _permutation, _counts)
