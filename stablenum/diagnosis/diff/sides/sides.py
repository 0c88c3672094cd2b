"""One program under comparison: its operations, with a fingerprint and a tolerance for each value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint, distance, fingerprint
from stablenum.diagnosis.diff.sides.play import NotRecordedError, Play, Program, ReplacedError, Visit
from stablenum.diagnosis.replay.trace import Trace, Value

__all__ = [
    "MOST_ENTRIES", "MOST_NOISE", "NOISE", "KnownArrays", "Side", "again", "arrays_of", "depending",
    "first_with", "host", "into", "measured", "places_in", "results_of", "tolerances",
]  # fmt: skip

# The size of the noise that shows how a value depends on rounding: thousands of float64's roundings.
NOISE = 1e-12
# A value moves by less than this many times what one draw of the noise moves it, which may happen to be
# little, or by less than the floor: a hundred times the noise. Chosen, not measured.
_FACTOR, _FLOOR = 16.0, 1e-10
# A value that float64's rounding moves by more than this, relative to its size, is 0 but for rounding: of
# others at least three digits can be compared. Chosen, not measured.
MOST_NOISE = 1e-3
# Of values that are looked at entry by entry, so many entries are, of one value or of all together: 32 MiB in
# float64. Chosen, not measured.
MOST_ENTRIES = 2**22


class KnownArrays(dict[Any, Any]):
    """Arrays by value, or by what a result is; of a recorded program only some are known."""

    def __missing__(self, key: Any) -> Any:
        raise NotRecordedError(f"the array of {key} is not in the file")


@dataclass(slots=True)
class Side:
    """What one evaluation in float64 has shown.

    Attributes:
        program: what was evaluated.
        weights: the arrays that took the place of its parameters; None for its own.
        steps: how many training steps followed one another.
        replaced: the arrays that took the place of values, by index.
        play: the operations and the results.
        prints: the fingerprint of each value.
        shapes: the shape of each value.
        arrays: the results, by index.
        tolerance: how far each value may move by rounding alone, relative to its size.
        depends: whether each value depends on a parameter or an input; the others are constants.
        trained: whether each value depends on a parameter.
    """

    program: Program
    weights: Mapping[str, Any] | None
    steps: int
    replaced: Mapping[int, Any]
    play: Play
    prints: list[Fingerprint]
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    arrays: KnownArrays = field(default_factory=KnownArrays)
    tolerance: list[float] = field(default_factory=list)
    depends: list[bool] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

    @property
    def trace(self) -> Trace:
        """The operations."""
        return self.play.trace

    def neutral(self, value: int) -> bool:
        """Return whether a value says nothing about agreement: a constant, an index, a mask, zero, noise."""
        mark = self.prints[value]
        return not self.depends[value] or not mark.floating or mark.simple or self.noise(value)

    def noise(self, value: int) -> bool:
        """Return whether a value is 0 but for rounding: in float64, too, that moves it by a part of its size.
        Without tolerances none is."""
        return value < len(self.tolerance) and self.tolerance[value] > MOST_NOISE


def measured(
    program: Program, *, weights: Mapping[str, Any] | None = None, noise: bool = True, steps: int = 1
) -> Side:
    """Evaluate a program in float64, and once more with noise; without noise no results are kept. A recorded
    program gives what was measured when it was recorded."""
    recorded = getattr(program, "side", None)
    if recorded is not None:
        side: Side = recorded(weights)
        return side
    prints: list[Fingerprint] = []
    shapes: list[tuple[int, ...]] = []
    play = program.play(into(prints, shapes), weights=weights, steps=steps)
    side = Side(program, weights, steps, {}, play, prints, shapes)
    side.depends = depending(play.trace, lambda value: value.role not in ("constant", ""))
    side.trained = depending(play.trace, lambda value: value.role == "parameter")
    if noise:
        side.arrays = arrays_of(side, {r.value for r in play.results}, keep=True)
        moved: list[Fingerprint] = []
        noisy = program.play(into(moved), weights=weights, steps=steps, noise=NOISE)
        side.tolerance = tolerances(prints, moved, places_in(noisy, play))
    else:
        side.tolerance = [_FLOOR * 10] * len(prints)  # not known: taken as this; chosen, not measured
    return side


def places_in(noisy: Play, play: Play) -> Sequence[int | None]:
    """Return which value of an evaluation with noise each value of one without it is; None if that is not
    known.

    An operation that is opened without noise, and is not with it, moves all numbers that follow: from there
    on, values are identified by their keys, and nothing is known of those that have none.
    """
    pairs = zip(play.trace.steps, noisy.trace.steps, strict=False)
    parts = next((a for a, b in pairs if (a.primitive, a.outputs) != (b.primitive, b.outputs)), None)
    count = len(play.trace.values)
    begin = count if parts is None else min(parts.outputs, default=0)
    by_key = {key: v for v, key in noisy.keys.items()}
    here = {v: by_key[key] for v, key in play.keys.items() if v >= begin and key in by_key}
    return [v if v < begin else here.get(v) for v in range(count)]


def tolerances(
    prints: Sequence[Fingerprint], moved: Sequence[Fingerprint], places: Sequence[int | None]
) -> list[float]:
    """Return how far each value may move by rounding alone, given the fingerprints with noise and where each
    value is among them.

    A distance may be infinite; tolerances are numbers, far above any that counts. With noise, a loop may go
    on for longer, and all that follows is not known then.
    """
    noisy = [moved[p] if p is not None and p < len(moved) else Fingerprint(0) for p in places]
    return [_FACTOR * min(distance(a, b), 1e3) + _FLOOR for a, b in zip(prints, noisy, strict=False)]


def again(side: Side, values: Mapping[int, Any], *, last: int | None = None) -> Side:
    """Evaluate a side once more with further values replaced; the tolerances are the side's. A side whose
    operations do not fit the values stays as it is.

    With ``last``, the values after that one stay as they were.
    """
    replaced = {**side.replaced, **values}
    first, end = min(values, default=0), len(side.prints) if last is None else last
    prints, arrays = list(side.prints), KnownArrays(side.arrays)

    def visit(index: int, data: Any) -> None:
        if index > end:
            raise _Enough
        if index < first:
            return
        array = host(data)
        if index >= len(prints) or array.shape != side.shapes[index]:
            raise ReplacedError(f"value {index} is another one with these values")
        prints[index] = fingerprint(array)
        if index in arrays:
            arrays[index] = array.copy()

    try:
        _show(side, visit, replaced, since=first, keep=last is None)
    except ReplacedError:
        return side
    return replace(side, replaced=replaced, prints=prints, arrays=arrays)


def arrays_of(side: Side, wanted: Iterable[int], *, keep: bool = False) -> KnownArrays:
    """Return some values of another evaluation, which ends when all are known; ``keep`` as in
    ``Program.show``. Of a recorded program, those that its file does not hold are lacking."""
    found = KnownArrays()
    asked = frozenset(wanted)

    def visit(index: int, data: Any) -> None:
        if index in asked:
            found[index] = host(data).copy()
            if len(found) == len(asked):
                raise _Enough

    if asked:
        _show(side, visit, side.replaced, since=min(asked), keep=keep)
    return found


def first_with(side: Side, holds: Callable[[Any], bool]) -> int | None:
    """Return the first value of another evaluation that fulfils a condition; None if none does."""
    found: list[int] = []

    def visit(index: int, data: Any) -> None:
        if holds(host(data)):
            found.append(index)
            raise _Enough

    _show(side, visit, side.replaced)
    return found[0] if found else None


class _Enough(Exception):  # noqa: N818
    """Ends an evaluation when no more of it is needed."""


def _show(
    side: Side, visit: Visit, replaced: Mapping[int, Any], *, since: int = 0, keep: bool = False
) -> None:
    with suppress(_Enough):
        side.program.show(
            visit, weights=side.weights, replace=replaced, steps=side.steps, since=since, keep=keep
        )


def into(prints: list[Fingerprint], shapes: list[tuple[int, ...]] | None = None) -> Visit:
    """Return a visitor that keeps the fingerprint and the shape of each value."""
    shapes = [] if shapes is None else shapes

    def visit(index: int, data: Any) -> None:
        while len(prints) <= index:
            prints.append(Fingerprint(0))
            shapes.append(())
        array = host(data)
        prints[index], shapes[index] = fingerprint(array), array.shape

    return visit


def results_of(side: Side) -> KnownArrays:
    """Return the arrays of a side's results, by kind, name and training step."""
    known = ((r, side.arrays[r.value]) for r in side.play.results if r.value in side.arrays)
    return KnownArrays({(r.kind, r.name, r.step): array for r, array in known})


def host(data: Any) -> Any:
    """Return an array of NumPy."""
    if hasattr(data, "detach"):
        data = data.detach().resolve_conj().resolve_neg().cpu()
        if str(data.dtype) == "torch.bfloat16":
            data = data.float()
        return data.numpy()
    if str(getattr(data, "dtype", "")).startswith("key<"):
        return np.zeros(0)
    found = np.asarray(data)
    return found.astype(np.float32) if found.dtype.kind == "V" or found.dtype.name == "bfloat16" else found


def depending(trace: Trace, counts: Callable[[Value], bool]) -> list[bool]:
    """Return whether each value depends on one from outside that counts."""
    found = [v.producer is None and counts(v) for v in trace.values]
    for step in trace.steps:
        any_of = any(found[i] for i in step.inputs)
        for output in step.outputs:
            found[output] = any_of
    return found
