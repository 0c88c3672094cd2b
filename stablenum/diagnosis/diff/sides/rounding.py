"""How far a program is off its own float64 twin, and which operation adds most of it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.sides.play import MASKED, Play
from stablenum.diagnosis.diff.sides.sides import Side, host
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Rounding", "format_of", "overflows", "relative_error", "rounding_of", "sampled", "typical_error"]

# The entries that are kept of all values together, which take 256 MiB in float32, and the least that are kept
# of each value. Chosen, not measured.
_MOST, _LEAST = 2**26, 2**10


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding errors of one program.

    Attributes:
        error: the largest relative error of a loss or output.
        step: the operation of the forward pass whose result is farthest off compared with what it read.
        added: by how much.
        errors: the relative error of each value; at most 1 for what is 0 but for rounding.
        typical: the typical relative error of the entries of each value, which other rounding moves less
            than the largest one.
        forms: the format of each value in the program as it is, as far as it is known.
        overflowed: the values that are finite in float64 only.
    """

    error: float
    step: Step | None
    added: float
    errors: Mapping[int, float] = field(default_factory=dict)
    typical: Mapping[int, float] = field(default_factory=dict)
    forms: Mapping[int, str] = field(default_factory=dict)
    overflowed: Collection[int] = ()


def rounding_of(side: Side) -> Rounding:
    """Return the rounding errors: the program as it is, compared with the program in float64.

    Of a value with very many entries some are compared, so that the memory this takes is bounded. Of a
    recorded program they were measured when it was recorded.
    """
    recorded = getattr(side.program, "errors", None)
    if recorded is not None:
        return _as_recorded(side, recorded)
    samples = _samples(side, max(_LEAST, _MOST // max(len(side.trace.values), 1)))
    keys, errors, typical = side.play.keys, dict[int, float](), dict[int, float]()
    forms, overflowed = dict[int, str](), set[int]()

    def compare(index: int, data: Any) -> None:
        narrow = samples.get(keys.get(index))
        if narrow is None:
            return
        wide = host(data)
        if wide.dtype.kind == "f" and wide.shape == narrow.shape:
            error = relative_error(narrow.entries, wide)
            errors[index] = min(error, 1.0) if side.noise(index) else error
            there = sampled(wide, narrow.entries.size)
            typical[index], forms[index] = typical_error(narrow.entries, there), narrow.form
            if overflows(narrow.entries, there):
                overflowed.add(index)

    wide = side.program.play(compare, weights=side.weights, steps=side.steps)
    return replace(_of(side, wide, errors), typical=typical, forms=forms, overflowed=overflowed)


def _as_recorded(side: Side, recorded: Mapping[int, float]) -> Rounding:
    known: Any = side.program
    errors = {v: min(e, 1.0) if side.noise(v) else e for v, e in recorded.items()}
    return replace(_of(side, side.play, errors), typical=known.typical, forms=known.forms)


def _of(side: Side, wide: Play, errors: Mapping[int, float]) -> Rounding:
    ends = [r.value for r in wide.results if r.kind in ("loss", "output")]
    telling = {v for v in errors if not side.noise(v)}
    step, added = _worst(wide.trace.steps, errors, telling)
    worst = max((errors.get(v, 0.0) for v in ends), default=0.0)
    return Rounding(worst, step, added, errors)


class Sample(NamedTuple):
    """Some entries of a value of the program as it is.

    Attributes:
        shape, form: of the value.
        entries: all, or so many that are spread over it.
    """

    shape: tuple[int, ...]
    form: str
    entries: Any


def format_of(data: Any) -> str:
    """Return the format of an array, by its name in both frameworks."""
    return str(getattr(data, "dtype", "")).removeprefix("torch.")


def overflows(narrow: Any, wide: Any) -> bool:
    """Return whether an entry of a sample is finite in float64 only."""
    return bool((np.isfinite(wide) & ~np.isfinite(narrow)).any())


def _samples(side: Side, most: int) -> dict[Hashable, Sample]:
    """Return some entries of each value of the program as it is, by the value's key."""
    kept: dict[int, Sample] = {}

    def keep(index: int, data: Any) -> None:
        array = host(data)
        if array.dtype.kind == "f":
            kept[index] = Sample(array.shape, format_of(data), sampled(array, most))

    narrow = side.program.play(keep, wide=False, weights=side.weights, steps=side.steps)
    return {key: kept[index] for index, key in narrow.keys.items() if index in kept}


def sampled(array: Any, most: int) -> Any:
    """Return a copy of all entries, or of so many that are spread over the array."""
    if array.size <= most:
        return array.reshape(-1).copy()
    spread = np.arange(most) * (array.size - 1) // max(most - 1, 1)
    # An array that does not lie in one piece would be copied as a whole by reshape.
    return array.reshape(-1)[spread] if array.flags.c_contiguous else array.flat[spread]


def _worst(
    steps: list[Step], errors: Mapping[int, float], telling: Collection[int]
) -> tuple[Step | None, float]:
    worst, most = None, 0.0
    for step in steps:
        if step.phase != "forward":
            continue
        out = max((errors[o] for o in step.outputs if o in telling), default=0.0)
        read = max((errors[i] for i in step.inputs if i in errors), default=0.0)
        if out - read > most:
            worst, most = step, out - read
    return worst, most


def relative_error(narrow: Any, wide: Any) -> float:
    """Return the largest difference of the entries of a sample, relative to the largest of all entries."""
    if not wide.size:
        return 0.0
    there = sampled(wide, narrow.size)
    finite = np.isfinite(there) & np.isfinite(narrow)
    if not finite.any():
        return 0.0
    scale = float(np.max(np.abs(wide), where=np.isfinite(wide), initial=0.0)) or 1.0
    gap = narrow[finite].astype(there.dtype if np.iscomplexobj(there) else np.float64) - there[finite]
    return float(np.abs(gap).max()) / scale


def typical_error(narrow: Any, wide: Any) -> float:
    """Return the upper quartile of the differences of entries, relative to that of their sizes.

    The largest difference would not do: an optimizer that divides each gradient by its own size makes of one
    that is nearly zero whatever rounding has left of it. Entries that are zero or masked do not count.
    """
    size = np.abs(np.asarray(wide, np.complex128 if np.iscomplexobj(wide) else np.float64))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(narrow - wide)
    kept = (size > 0) & (size < MASKED) & np.isfinite(gap)
    if not kept.any():
        return 0.0
    at = (3 * (int(kept.sum()) - 1)) // 4
    return float(np.partition(gap[kept], at)[at] / np.partition(size[kept], at)[at])
