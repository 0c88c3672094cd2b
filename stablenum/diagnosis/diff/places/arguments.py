"""Name the arguments that are not the same on the two sides: other contents, or batches of another size."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.sides.fingerprints import distance
from stablenum.diagnosis.diff.sides.sides import MOST_ENTRIES, Side, arrays_of
from stablenum.diagnosis.diff.weights.layouts import MOST_AXES
from stablenum.diagnosis.replay.trace import Value

__all__ = ["other_arguments"]

# Rows and windows of two arguments are the same if they differ by less than this part of the largest: float32
# rounds by 6e-8, and both may have been scaled in it before. Chosen, not measured.
_SAME = 1e-5
# A window of an array is looked for in so many places; if there are more, it is taken to lie in one. Chosen,
# not measured.
_MOST_WINDOWS = 4096
_ADVICE = "Give both programs the same batch, unless you mean this."


def other_arguments(comparison: Comparison) -> tuple[str, ...]:
    """Name the arguments that hold other numbers on the two sides: as many, or those of a batch of another
    size."""
    rest = _left_over(comparison)
    return (*_of_other_contents(comparison, *rest), *_of_other_sizes(comparison, *rest))


def _left_over(comparison: Comparison) -> tuple[list[Value], list[Value]]:
    """Return the arguments of each side that are none of the other: what has no name was not given as an
    argument, such as class weights that the loss makes."""
    mine, theirs = _inputs(comparison.left), _inputs(comparison.right)
    pairs = [(a, b) for a in mine for b in theirs if _equal(comparison, a, b)]
    return (
        [a for a in mine if a.name and all(a is not one for one, _ in pairs)],
        [b for b in theirs if b.name and all(b is not one for _, one in pairs)],
    )


def _inputs(side: Side) -> list[Value]:
    return [
        v for v in side.trace.values if v.producer is None and v.role == "input" and side.prints[v.id].entries
    ]


def _equal(comparison: Comparison, a: Value, b: Value) -> bool:
    left, right = comparison.left, comparison.right
    gap = distance(left.prints[a.id], right.prints[b.id])
    return gap <= left.tolerance[a.id] + right.tolerance[b.id]


# --- contents ----------------------------------------------------------------------------------------------


def _of_other_contents(comparison: Comparison, mine: list[Value], theirs: list[Value]) -> Iterator[str]:
    """Name the arguments of one size and kind, and take them out of the lists."""
    left, right = comparison.left, comparison.right
    for b in tuple(theirs):
        a = next((a for a in mine if _alike(comparison, a, b)), None)
        if a is None:
            continue
        mine.remove(a)
        theirs.remove(b)
        x, y = arrays_of(left, [a.id])[a.id], arrays_of(right, [b.id])[b.id]
        yield (
            f"The arguments differ: {a.name} {list(x.shape)} of the left program lies in {_range(x)}, "
            f"{b.name} {list(y.shape)} of the right one in {_range(y)}, and their contents are not equal. "
            f"{_ADVICE}"
        )


def _alike(comparison: Comparison, a: Value, b: Value) -> bool:
    mine, theirs = comparison.left.prints[a.id], comparison.right.prints[b.id]
    sizes = [np.prod(s.shapes[v.id], dtype=int) for s, v in ((comparison.left, a), (comparison.right, b))]
    of_one_kind = mine.floating == theirs.floating and _is_statistic(a) == _is_statistic(b)
    return of_one_kind and sizes[0] == sizes[1]


def _is_statistic(value: Value) -> bool:
    """Return whether an argument is a running statistic by its name, as those of flax are."""
    return re.findall(r"\w+", value.name)[-1:] in (["mean"], ["var"])


def _range(x: np.ndarray) -> str:
    return f"[{np.nanmin(x):.6g}, {np.nanmax(x):.6g}]"


# --- sizes -------------------------------------------------------------------------------------------------


def _of_other_sizes(comparison: Comparison, mine: list[Value], theirs: list[Value]) -> Iterator[str]:
    """Name the arguments of as many axes but other sizes, unless one is laid out as a part of the other."""
    if not mine or not theirs:
        return
    left, right = comparison.left, comparison.right
    ids = [[v.id for v in _inputs(s)] for s in (left, right)]
    all_left, all_right = (arrays_of(s, own) for s, own in zip((left, right), ids, strict=True))
    for b in theirs:
        y = all_right[b.id]
        options = [
            a
            for a in mine
            if _is_statistic(a) == _is_statistic(b)
            and _is_other_batch(
                all_left[a.id], y, all_left.values(), all_right.values(), named=_corresponds(a, b, ids)
            )
        ]
        if not options:
            continue
        a = next((a for a in options if a.name == b.name), options[0])
        mine.remove(a)
        yield (
            f"The arguments differ: {a.name} {list(all_left[a.id].shape)} of the left program and "
            f"{b.name} {list(y.shape)} of the right one have other shapes. {_ADVICE}"
        )


def _corresponds(a: Value, b: Value, ids: Sequence[list[int]]) -> bool:
    """Return whether two arguments are of one name, or of one place if one of them is named by it."""
    if a.name == b.name or not any("args[" in v.name for v in (a, b)):
        return a.name == b.name
    return ids[0].index(a.id) == ids[1].index(b.id)


def _is_other_batch(x: Any, y: Any, mine: Collection[Any], theirs: Collection[Any], *, named: bool) -> bool:
    """Return whether two arguments are batches of other sizes, rather than one batch that is laid out in two
    ways: cut, padded, in parts, or with its axes in another order.

    Args:
        x, y: the two arguments.
        mine, theirs: all arguments of each side.
        named: whether they have the same name or place.
    """
    if x.ndim != y.ndim or x.size == y.size or _kind(x) != _kind(y) or not 0 < x.ndim <= MOST_AXES:
        return False
    if x.dtype.kind == "c" or max(x.size, y.size) > MOST_ENTRIES:  # too much to be compared row by row
        return named
    axes = [k for k in range(x.ndim) if any(True for _ in _slices(y, _without(x.shape, k)))]
    if not named and (x.ndim == 1 or not axes or (_kind(x) == "f" and axes == [x.ndim - 1])):
        return False  # two things rather than two batches
    if (1 in x.shape[1:]) != (1 in y.shape[1:]):
        return False  # a column, such as lengths beside a mask
    if not axes:
        return not (_is_window(x, y) or _is_window(y, x))
    return not any(_covers(x, y, k, mine, theirs) for k in axes)


def _kind(x: Any) -> str:
    if x.dtype.kind == "u":
        return "u" if x.dtype == np.uint32 else "i"  # the keys of JAX
    return str(x.dtype.kind)


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _slices(x: Any, like: Sequence[int]) -> Iterator[Any]:
    """Yield the slices of one shape that an array has along an axis, with its axes in any order: a row for
    each."""
    for order in itertools.permutations(range(x.ndim)) if x.ndim == len(like) + 1 else ():
        turned = x.transpose(order)
        if turned.shape[1:] == tuple(like):
            yield turned.reshape(len(turned), -1)


def _covers(x: Any, y: Any, axis: int, mine: Iterable[Any], theirs: Iterable[Any]) -> bool:
    """Return whether the slices of the smaller of two arrays along an axis are all among the arguments of the
    other side. Those of the larger must be there, too, if they are the rows of a batch, but for one, such as
    the last token, and for padding."""
    like = _without(x.shape, axis)
    own = np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    many = [[r for z in side if _kind(z) == _kind(x) for r in _slices(z, like)] for side in (mine, theirs)]
    for other in _slices(y, like):
        (small, its), (large, rest) = ((other, many[0]), (own, many[1]))
        if len(small) > len(large):
            (small, its), (large, rest) = (large, rest), (small, its)
        if _lost(small, its).size == 0 and (axis > 0 or len(_telling(_lost(large, rest))) < 2):
            return True
    return False


def _lost(rows: Any, among: Sequence[Any]) -> Any:
    """Return the rows that are not among others, but for rounding: their sums with fixed factors are not."""
    factors = np.random.default_rng(0).normal(size=rows.shape[1])
    sums = np.nan_to_num(rows.astype(float)) @ factors
    others = np.sort(np.concatenate([np.nan_to_num(r.astype(float)) @ factors for r in among]))
    at = np.searchsorted(others, sums)
    near = (others[np.clip(at - k, 0, len(others) - 1)] for k in (0, 1))
    gaps = np.minimum(*(np.abs(n - sums) for n in near))
    return rows[gaps > _SAME * max(float(np.abs(sums).max()), float(np.abs(others).max()))]


def _telling(rows: Any) -> Any:
    """Return the different ones of some rows that are no padding."""
    if rows.shape[1] > 1:
        rows = rows[rows.max(axis=1) != rows.min(axis=1)] if len(rows) else rows
    return np.unique(rows[(rows != 0).any(axis=1)], axis=0)


def _is_window(large: Any, small: Any) -> bool:
    """Return whether an array is a window of another one, such as an image without its padding; also if there
    are too many windows to look at."""
    if any(m > n for m, n in zip(small.shape, large.shape, strict=True)):
        return False
    offsets = [range(n - m + 1) for m, n in zip(small.shape, large.shape, strict=True)]
    if np.prod([len(o) for o in offsets]) > _MOST_WINDOWS:
        return True
    allowed = _SAME * float(np.abs(large).max())
    return any(
        np.abs(
            large[tuple(slice(i, i + m) for i, m in zip(at, small.shape, strict=True))] - 1.0 * small
        ).max()
        <= allowed
        for at in itertools.product(*offsets)
    )
