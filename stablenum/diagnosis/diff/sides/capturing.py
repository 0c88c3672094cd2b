"""Evaluate a program as a recording needs it: its values, their rounding, and how far that may go."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.sides.bounds import ROUNDING, limits_of
from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint, fingerprint, sketch
from stablenum.diagnosis.diff.sides.play import Play, Program, Visit
from stablenum.diagnosis.diff.sides.recorded import Parameter, RecordedProgram
from stablenum.diagnosis.diff.sides.rounding import (
    format_of,
    overflows,
    relative_error,
    sampled,
    typical_error,
)
from stablenum.diagnosis.diff.sides.sides import (
    NOISE,
    KnownArrays,
    Side,
    host,
    into,
    places_in,
    tolerances,
)

__all__ = ["captured", "digest_of", "limits_in_float32"]

# While a program is recorded, so many times the arrays are kept of which a part is chosen in the end.
# Chosen, not measured.
_ROOM = 64
# The entries of a value that are looked at, spread over it, so that the memory of a recording is bounded:
# 24 kB for each value. Chosen, not measured.
_MOST = 2**11


def captured(program: Program, steps: int, most_bytes: int) -> RecordedProgram:
    """Evaluate a program that has been recorded, and return what a file keeps of it.

    The program is evaluated once as it is and three times in float64: without noise, with noise far below
    what is compared, and with that of float32.

    Args:
        program: any live one.
        steps: how many training steps follow one another.
        most_bytes: of the values' arrays, the smallest are kept up to so many bytes together, for each 200
            operations.
    """
    narrow = _Narrow(program, steps)
    prints, shapes = list[Fingerprint](), list[tuple[int, ...]]()
    keep = _Smallest(_ROOM * most_bytes)
    wide, sketches = _Samples(), dict[int, float]()
    see, sample = into(prints, shapes), _into_samples(wide)

    def visit(index: int, data: Any) -> None:
        see(index, data)
        sample(index, data)
        array = host(data)
        keep.offer(index, array)
        sketches[index] = sketch(array)

    play = program.play(visit, steps=steps)
    most_bytes = round(most_bytes * max(1.0, len(play.trace.steps) / 200))
    forms, errors, typical = narrow.beside(play, wide)
    moved = list[Fingerprint]()
    noisy, one = _moved(program, play, steps, wide, noise=NOISE, see=into(moved))
    _, other = _moved(program, play, steps, wide)
    far = {v: max(one.get(v, 0.0), other.get(v, 0.0)) for v in one.keys() & other.keys()}
    return RecordedProgram(
        framework=program.framework,
        steps=steps,
        trace=play.trace,
        results=play.results,
        stops=play.stops,
        prints=prints,
        shapes=shapes,
        tolerance=tolerances(prints, moved, places_in(noisy, play)),
        forms=forms,
        errors=errors,
        typical=typical,
        limits=limits_of(play.trace, shapes, forms, far),
        arrays=_chosen(play, keep.arrays, most_bytes),
        sketches={r.value: sketches[r.value] for r in play.results},
        kept={n: Parameter(tuple(np.shape(x)), fingerprint(x), x) for n, x in program.parameters().items()},
        state=dict(program.optimizer_state()),
        literals=program.written(steps),
        aside=program.aside,
        optimizer_at=program.optimizer_at,
    )


class _Samples(dict[int, tuple[tuple[int, ...], Any]]):
    """Value -> its shape and some of its entries, of those that hold floating-point numbers."""


def _into_samples(found: _Samples) -> Visit:
    """Return a visitor that keeps some entries of each value."""

    def visit(index: int, data: Any) -> None:
        array = host(data)
        if array.dtype.kind in "fc":
            found[index] = array.shape, sampled(array, _MOST)

    return visit


class _Narrow:
    """The program as it is: format and some entries of each value, by the value's key."""

    def __init__(self, program: Program, steps: int) -> None:
        seen = dict[int, tuple[str, Any]]()

        def visit(index: int, data: Any) -> None:
            array = host(data)
            seen[index] = format_of(data), sampled(array, _MOST) if array.dtype.kind in "fc" else None

        played = program.play(visit, wide=False, steps=steps)
        self._by_key = {key: seen[index] for index, key in played.keys.items() if index in seen}

    def beside(self, play: Play, wide: _Samples) -> tuple[dict[int, str], dict[int, float], dict[int, float]]:
        """Return format, error and typical error of each value of the evaluation in float64 that has a
        counterpart here."""
        forms, errors, typical = dict[int, str](), dict[int, float](), dict[int, float]()
        for index in range(len(play.trace.values)):
            key: Hashable = play.keys.get(index)
            if key not in self._by_key:
                continue
            form, narrow = self._by_key[key]
            forms[index] = form
            if narrow is not None and index in wide and narrow.size == wide[index][1].size:
                errors[index] = _error(narrow, wide[index][1])
                typical[index] = typical_error(narrow, wide[index][1])
        return forms, errors, typical


def _error(narrow: Any, wide: Any) -> float:
    """Return the relative error of a sample; infinity if a number is finite in float64 only."""
    return math.inf if overflows(narrow, wide) else relative_error(narrow, wide)


def limits_in_float32(side: Side) -> list[float]:
    """Return how far rounding may take each value of a live side that computes in float32 throughout."""
    wide = _Samples()
    side.program.play(_into_samples(wide), weights=side.weights, steps=side.steps)
    _, far = _moved(side.program, side.play, side.steps, wide, side.weights)
    return limits_of(side.trace, side.shapes, {}, far)


def _moved(
    program: Program,
    play: Play,
    steps: int,
    wide: _Samples,
    weights: Mapping[str, Any] | None = None,
    *,
    noise: float = ROUNDING,
    see: Visit = lambda index, data: None,
) -> tuple[Play, dict[int, float]]:
    """Return an evaluation with noise, and how far one rounding of float32 in each result moves the typical
    entry of a value, relative to its size; with smaller noise, how far it would if all were linear.

    Args:
        program, play: the program, and its evaluation without noise.
        steps, weights: as it was evaluated.
        wide: the shape and some entries of each value without noise.
        noise: the relative size of the noise.
        see: is shown the values, too.
    """
    moved = _Samples()
    sample = _into_samples(moved)

    def visit(index: int, data: Any) -> None:
        see(index, data)
        sample(index, data)

    options: dict[str, Any] = {"weights": weights, "steps": steps, "noise": noise}
    try:
        noisy = program.play(visit, **options, everywhere=noise == ROUNDING)
    except Exception:  # noqa: BLE001 - a constant that became an index or a size, which may fail in any way
        moved.clear()
        try:
            noisy = program.play(visit, **options)
        except Exception:  # noqa: BLE001 - so may what depends on the data: nothing is known then
            return play, {}
    found = dict[int, float]()
    for value, place in enumerate(places_in(noisy, play)):
        if place is not None and value in wide and place in moved and moved[place][0] == wide[value][0]:
            found[value] = typical_error(moved[place][1], wide[value][1]) * ROUNDING / noise
    return noisy, found


def _chosen(play: Play, arrays: KnownArrays, most_bytes: int) -> KnownArrays:
    """Return the results and then the smallest of some arrays, but for parameters, which are kept for
    themselves. Values that hold the same numbers in the same order are counted once."""
    found, contents, used = KnownArrays(), set[bytes](), 0
    values, results = play.trace.values, {r.value for r in play.results}
    for value in sorted(arrays, key=lambda v: (v not in results, arrays[v].nbytes, v)):
        if values[value].role == "parameter" and values[value].producer is None:
            continue
        content = digest_of(arrays[value])
        used += 0 if content in contents else arrays[value].nbytes
        if used > most_bytes:
            used -= arrays[value].nbytes
            continue
        contents.add(content)
        found[value] = arrays[value]
    return found


def digest_of(array: Any) -> bytes:
    """Return what is the same for arrays that hold the same numbers in the same order."""
    return hashlib.sha256(f"{array.dtype.str}{array.size}".encode() + array.tobytes()).digest()


class _Smallest:
    """The smallest of some arrays, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self.arrays, self._most, self._bytes = KnownArrays(), most, 0
        self._heap: list[tuple[int, int]] = []

    def offer(self, index: int, array: Any) -> None:
        """Keep a copy of an array, and forget larger ones if there is no room."""
        largest = -self._heap[0][0] if self._heap else 0
        if self._bytes + array.nbytes > self._most and array.nbytes >= largest:
            return
        self.arrays[index] = array.copy()
        heapq.heappush(self._heap, (-array.nbytes, -index))
        self._bytes += array.nbytes
        while self._bytes > self._most:
            size, negative = heapq.heappop(self._heap)
            self._bytes += size
            del self.arrays[-negative]
