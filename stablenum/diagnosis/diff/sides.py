"""One program under comparison: its operations, with a fingerprint and a tolerance for each value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.fingerprints import Fingerprint, distance, fingerprint
from stablenum.diagnosis.diff.play import Play, Program
from stablenum.diagnosis.replay.trace import Trace

__all__ = ["NOISE", "Side", "arrays_of", "host", "measured"]

# The size of the noise that shows how a value depends on rounding: thousands of float64's roundings.
NOISE = 1e-12
# A value moves by less than this many times what the noise moves it, or by less than the floor.
_FACTOR = 16.0
_FLOOR = 1e-10


@dataclass(slots=True)
class Side:
    """What one evaluation in float64 has shown.

    Attributes:
        program: what was evaluated.
        play: the operations and the results.
        prints: the fingerprint of each value.
        tolerance: how far each value may move by rounding alone, relative to its size.
        depends: whether each value depends on a parameter or an input; the others are constants.
        arrays: the values that were asked for.
    """

    program: Program
    play: Play
    prints: list[Fingerprint]
    tolerance: list[float] = field(default_factory=list)
    depends: list[bool] = field(default_factory=list)
    arrays: dict[int, Any] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        """The operations."""
        return self.play.trace

    def neutral(self, value: int) -> bool:
        """Return whether a value says nothing about agreement: a constant, an index, a mask, zero, noise."""
        mark = self.prints[value]
        return not self.depends[value] or not mark.floating or mark.simple or self.tolerance[value] > 1e-3


def measured(
    program: Program,
    *,
    weights: Mapping[str, Any] | None = None,
    replace: Mapping[int, Any] | None = None,
    noise: bool = True,
    steps: int = 1,
) -> Side:
    """Evaluate a program in float64, and once more with noise."""
    prints: list[Fingerprint] = []
    play = program.play(_into(prints), weights=weights, replace=replace, steps=steps)
    side = Side(program, play, prints)
    kept = {r.value for r in play.results}
    if noise:
        moved: list[Fingerprint] = []
        program.play(_into(moved), weights=weights, replace=replace, steps=steps, noise=NOISE)
        side.tolerance = [
            _FACTOR * min(distance(a, b), 1e3) + _FLOOR for a, b in zip(prints, moved, strict=True)
        ]
    else:
        side.tolerance = [_FLOOR * 10] * len(prints)
    side.depends = _depends(play.trace)
    side.arrays = arrays_of(program, kept, weights=weights, replace=replace, steps=steps)
    return side


def arrays_of(
    program: Program,
    wanted: Iterable[int],
    *,
    weights: Mapping[str, Any] | None = None,
    replace: Mapping[int, Any] | None = None,
    wide: bool = True,
    steps: int = 1,
) -> dict[int, Any]:
    """Return some values of another evaluation."""
    asked, found = frozenset(wanted), dict[int, Any]()

    def visit(index: int, data: Any) -> None:
        if index in asked:
            found[index] = host(data).copy()

    program.play(visit, weights=weights, replace=replace, wide=wide, steps=steps)
    return found


def _into(prints: list[Fingerprint]) -> Any:
    def visit(index: int, data: Any) -> None:
        while len(prints) <= index:
            prints.append(Fingerprint(0))
        prints[index] = fingerprint(host(data))

    return visit


def host(data: Any) -> Any:
    """Return an array of NumPy."""
    if hasattr(data, "detach"):
        data = data.detach().cpu()
        if str(data.dtype) == "torch.bfloat16":
            data = data.float()
        return data.numpy()
    if str(getattr(data, "dtype", "")).startswith("key<"):
        return np.zeros(0)
    found = np.asarray(data)
    return found.astype(np.float32) if found.dtype.kind == "V" or found.dtype.name == "bfloat16" else found


def _depends(trace: Trace) -> list[bool]:
    """Return whether each value depends on a parameter, an input or a state."""
    found = [v.producer is None and v.role not in ("constant", "") for v in trace.values]
    for step in trace.steps:
        any_of = any(found[i] for i in step.inputs)
        for output in step.outputs:
            found[output] = any_of
    return found
