"""Measures of how far apart two numbers, tensors, updates or guards' statistics are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from stablenum.formats import FLOAT32_MAX, FLOAT32_TINY, get_format
from stablenum.recovery.ledger import RecoveryEvent

__all__ = ["different_statistics", "relative_difference", "tensor_difference", "update_difference"]

Array: TypeAlias = "np.ndarray[Any, Any]"

# Over many steps, a rule's statistics accumulate more rounding errors than a norm.
_GATHERED = 20.0


def relative_difference(a: float, b: float) -> float:
    """Return ``|a - b| / max(|a|, |b|)``; 0 if both are NaN, the same infinity, or below float32's normal
    range.

    Example:
        >>> relative_difference(1.0, 1.5), relative_difference(float("nan"), float("nan"))
        (0.333..., 0.0)
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    # XLA flushes subnormal numbers to zero on the CPU.
    if max(abs(a), abs(b)) < FLOAT32_TINY:
        return 0.0
    return abs(a - b) / max(abs(a), abs(b))


def tensor_difference(a: Array, b: Array) -> float:
    """Return the largest difference between two tensors, divided by the largest number in the first.

    Non-finite elements do not count if they are of the same kind in the same places; otherwise the result is
    inf.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    one, two = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(finite, np.isfinite(two)):
        return math.inf
    if not np.array_equal(one[~finite], two[~finite], equal_nan=True):
        return math.inf
    one, two = one[finite], two[finite]
    if one.size == 0:
        return 0.0
    largest = float(np.abs(one).max())
    difference = float(np.abs(one - two).max())
    return 0.0 if difference < FLOAT32_TINY else difference / max(largest, FLOAT32_TINY)


def update_difference(
    before: Array, after: Array, their_before: Array, their_after: Array, *, tolerance: float
) -> tuple[float, float] | None:
    """Return what two steps added to a tensor at the element where they differ most; None if the steps agree.

    The updates show the effect of the multipliers, including those of units. They may differ by ``tolerance``
    of the largest element, plus the rounding of float32. In narrower formats an optimizer's rounding errors
    are larger than a step, so such tensors are compared only at the end.
    """
    eps = get_format(after.dtype.name).eps
    if eps > get_format("float32").eps:
        return None
    ours, theirs = _update(before, after), _update(their_before, their_after)
    known = np.isfinite(ours) & np.isfinite(theirs)
    if not known.any():
        return None
    ours, theirs = ours[known], theirs[known]
    rounding = 2 * eps * float(np.abs(after.astype(np.float64)[known]).max())
    longest = float(np.abs(ours).max())
    if (np.abs(ours - theirs) <= tolerance * longest + rounding + FLOAT32_TINY).all():
        return None
    worst = int(np.abs(ours - theirs).argmax())
    return float(ours[worst]), float(theirs[worst])


def _update(before: Array, after: Array) -> Array:
    """Return what a step added to a tensor; NaN where this is not finite."""
    with np.errstate(invalid="ignore"):
        update = after.astype(np.float64) - before.astype(np.float64)
    return np.where(np.isfinite(update), update, math.nan)


def different_rewinds(
    ours: Sequence[RecoveryEvent], theirs: Sequence[RecoveryEvent], tolerance: float
) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs between the rewinds of two runs: a name and both values.

    The norms at which steps are clipped for a while are sums of each backend; all else must be equal.
    """
    if len(ours) != len(theirs):
        yield "rewinds", len(ours), len(theirs)
    for number, (one, two) in enumerate(zip(ours, theirs, strict=False)):
        for name, left, right in zip(_REWIND, _decision(one), _decision(two), strict=True):
            if left != right:
                yield f"rewinds[{number}].{name}", left, right
        left, right = one.clip_at or 0.0, two.clip_at or 0.0
        if not relative_difference(left, right) <= tolerance:
            yield f"rewinds[{number}].clip_at", left, right


_REWIND = ("code", "step", "origin", "attempt", "to_step", "response", "left_out")


def _decision(event: RecoveryEvent) -> tuple[Any, ...]:
    symptom = event.symptom
    found = str(symptom.code), symptom.step, symptom.origin
    return *found, event.attempt, event.to_step, event.response, event.left_out


def different_statistics(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each number that differs between the rule states of two guards."""
    one, two = dict(_rule_states(ours)), dict(_rule_states(theirs))
    for rule in dict.fromkeys((*one, *two)):
        yield from _different_numbers(one.get(rule, {}), two.get(rule, {}), tolerance)


def _different_numbers(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each number that differs between two states of one rule."""
    sizes = [abs(x) for x in ours.values() if isinstance(x, float) and 0 < abs(x) < FLOAT32_MAX]
    # After a subtraction of nearly equal numbers, the error is relative to the size of these numbers.
    slack = tolerance * float(np.median(sizes)) if sizes else 0.0
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name), theirs.get(name)
        if isinstance(a, float) and isinstance(b, float):
            same = relative_difference(a, b) <= _GATHERED * tolerance or abs(a - b) <= slack
        else:
            same = a == b
        if not same:
            yield name, a, b


def _rule_states(guard: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each rule and the numbers of its state."""
    state = guard.get("state", {})
    parts = [(f"clip.{i}", part) for i, part in enumerate(state.get("clip", []))]
    for name, part in [*parts, *((name, state.get(name, [])) for name in ("loss_scale", "spike"))]:
        yield name, dict(_leaves(name, part))


def _leaves(name: str, plain: Any) -> Iterator[tuple[str, Any]]:
    """Yield every number in nested lists and dicts, with its path."""
    if isinstance(plain, (Mapping, list)):
        items = plain.items() if isinstance(plain, Mapping) else enumerate(plain)
        for key, value in items:
            yield from _leaves(f"{name}.{key}", value)
    else:
        yield name, plain
