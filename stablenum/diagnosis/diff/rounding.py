"""How far a program is off its own float64 twin, and which operation adds most of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.sides import Side, host
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Rounding", "rounding_of"]

# Beyond so many bytes, further values are not kept.
_MOST_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding errors of one program.

    Attributes:
        error: the largest relative error of a loss or output.
        step: the operation of the forward pass whose result is farthest off compared with what it read.
        added: by how much.
        errors: the relative error of each value.
    """

    error: float
    step: Step | None
    added: float
    errors: Mapping[int, float] = field(default_factory=dict)


def rounding_of(side: Side) -> Rounding:
    """Return the rounding errors: the program as it is, compared with the program in float64."""
    kept: dict[int, Any] = {}
    size = 0

    def keep(index: int, data: Any) -> None:
        nonlocal size
        array = host(data)
        if array.dtype.kind == "f" and size < _MOST_BYTES:
            size += array.nbytes
            kept[index] = array.astype(np.float64)

    narrow = side.program.play(keep, wide=False, weights=side.weights, steps=side.steps)
    by_key = {key: kept[index] for index, key in narrow.keys.items() if index in kept}
    wide_arrays: dict[int, Any] = {}

    def collect(index: int, data: Any) -> None:
        array = host(data)
        if array.dtype.kind == "f":
            wide_arrays[index] = array.copy() if len(wide_arrays) < len(kept) * 8 else array

    wide = side.program.play(collect, weights=side.weights, steps=side.steps)
    errors: dict[int, float] = {}
    for index, key in wide.keys.items():
        if key in by_key and index in wide_arrays and by_key[key].shape == wide_arrays[index].shape:
            errors[index] = _error(by_key[key], wide_arrays[index])
    ends = [r.value for r in wide.results if r.kind in ("loss", "output")]
    step, added = _worst(wide.trace.steps, errors)
    return Rounding(max((errors.get(v, 0.0) for v in ends), default=0.0), step, added, errors)


def _worst(steps: list[Step], errors: Mapping[int, float]) -> tuple[Step | None, float]:
    worst, most = None, 0.0
    for step in steps:
        if step.phase != "forward":
            continue
        out = max((errors[o] for o in step.outputs if o in errors), default=0.0)
        read = max((errors[i] for i in step.inputs if i in errors), default=0.0)
        if out - read > most:
            worst, most = step, out - read
    return worst, most


def _error(narrow: Any, wide: Any) -> float:
    if not wide.size:
        return 0.0
    finite = np.isfinite(wide) & np.isfinite(narrow)
    if not finite.any():
        return 0.0
    scale = float(np.abs(wide[finite]).max()) or 1.0
    return float(np.abs(narrow[finite] - wide[finite]).max()) / scale
