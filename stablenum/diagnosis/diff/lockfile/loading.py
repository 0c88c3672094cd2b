"""``load_program``: read a recording, and check all that it says."""

from __future__ import annotations

import hashlib
import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from stablenum._support.outside_text import printable
from stablenum.diagnosis.diff.lockfile.layout import FORMAT, TEXT, Archive, weights_beside
from stablenum.diagnosis.diff.sides.call_sites import CallSite
from stablenum.diagnosis.diff.sides.dump import Dump
from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint
from stablenum.diagnosis.diff.sides.play import Result
from stablenum.diagnosis.diff.sides.recorded import Parameter, RecordedProgram
from stablenum.diagnosis.diff.sides.sides import KnownArrays
from stablenum.diagnosis.replay.trace import Step, Trace, Value
from stablenum.diagnosis.replay.values import Place
from stablenum.errors import bad_type

__all__ = ["load_program"]

# What reading a file that somebody else wrote, or that was cut off, may raise.
_BROKEN = (
    ArithmeticError, AttributeError, EOFError, IndexError, KeyError, MemoryError, NotImplementedError,
    RecursionError, RuntimeError, SyntaxError, TypeError, ValueError, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
# Of what was wrong, so many letters are shown: a file may hold any text. Chosen, not measured.
_MOST_SAID = 300
# So many bytes of weights are read: 2^31 parameters in float32. Chosen, not measured.
_MOST_WEIGHTS = 2**33
_COLUMNS = ("tolerance", "errors", "typical", "limits")
_PHASES = ("forward", "backward", "update")
_KINDS = ("loss", "output", "gradient", "updated")


def load_program(path: str | PathLike[str]) -> RecordedProgram | Dump:
    """Return the program that a file describes, in place of a live one on either side of ``stablenum.diff``.

    Nothing in the file is run. The program can be compared, but not run again: a cause that only a run of it
    could confirm is said to be likely.

    Experimental: the format may change in a minor version.

    Args:
        path: written by :func:`save_program`, or an ``.npz`` file of named arrays that another program has
            written with ``numpy.savez``; see "Pin your model's numerics in CI" in the documentation.

    Returns:
        The program.

    Raises:
        TypeError: ``path`` is no path.
        OSError: the file cannot be read.
        ValueError: the file is not a recording, is damaged, or was written by a later version.
    """
    if not isinstance(path, str | PathLike):
        raise bad_type("path", "a path", path)
    file = Path(path)
    with file.open("rb"):  # says what is wrong if it cannot be read
        pass
    if not zipfile.is_zipfile(file):
        raise ValueError(
            f"{file} is not a recording: it is not a zip archive, or its end is missing. Write one with "
            "stablenum.save_program, or named arrays with numpy.savez."
        )
    try:
        archive = Archive(file)
        try:
            if TEXT not in archive.members():
                return _dump(archive, file)
            return _read(archive, file)
        finally:
            archive.close()
    except _BROKEN as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        said = printable(said)[:_MOST_SAID].rstrip(".")
        raise ValueError(f"{file} cannot be read as a recording: {said}.") from error


def _dump(archive: Archive, path: Path) -> Dump:
    names = archive.names()
    _check(bool(names), "it holds neither a program nor an array")
    return Dump({name: archive.array(name) for name in names}, str(path))


def _read(archive: Archive, path: Path) -> RecordedProgram:
    text = archive.text()
    form = text["format"]
    _check(isinstance(form, int) and not isinstance(form, bool) and form >= 1, "its format is not a number")
    if form > FORMAT:
        made = text.get("made", {})
        by = made.get("stablenum", "a later version") if isinstance(made, dict) else "a later version"
        raise ValueError(
            f"it has format {form}, written by stablenum {by}; this version reads up to {FORMAT}"
        )
    places = [_place(row) for row in text["places"]]
    trace = _trace(text, places)
    count = len(trace.values)
    shapes = [_shape(shape) for shape in text["shapes"]]
    _check(len(shapes) == count, "it does not give the shape of each value")
    prints = _prints(archive, count)
    numbers = {name: _column(archive, name, count) for name in _COLUMNS}
    _check(
        not np.isnan(numbers["tolerance"]).any() and (numbers["tolerance"] >= 0).all(), "a tolerance is NaN"
    )
    _check(not np.isnan(numbers["limits"]).any(), "a limit is NaN")
    formats = [_text(x) for x in text["formats"]]
    form_of = text["format_of"]
    _check(len(form_of) == count, "it does not give the format of each value")
    results = tuple(_result(row, count) for row in text["results"])
    kept, state = _weights(archive, text, path)
    return RecordedProgram(
        framework=_one_of(text["framework"], ("jax", "torch")),
        steps=_whole(text["steps"], 1),
        trace=trace,
        results=results,
        stops=frozenset(_whole(x, 0, len(trace.steps)) for x in text["stops"]),
        prints=prints,
        shapes=shapes,
        tolerance=numbers["tolerance"].tolist(),
        forms={i: formats[k] for i, k in enumerate(form_of) if _whole(k, -1, len(formats)) >= 0},
        errors=_known(numbers["errors"]),
        typical=_known(numbers["typical"]),
        limits=numbers["limits"].tolist(),
        arrays=_values(archive, text["arrays"], shapes, trace, kept),
        sketches=_sketches(text["sketches"], results),
        kept=kept,
        state=state,
        literals=frozenset(map(_number, text["numbers"])),
        aside=tuple(map(_text, text["aside"])),
        optimizer_at=_site(text["optimizer_at"], places),
        made={_text(k): _text(v) for k, v in text["made"].items()},
        path=str(path),
    )


def _sketches(row: Any, results: tuple[Result, ...]) -> dict[int, float]:
    _check(len(row) == len(results), "it does not describe each result")
    return {r.value: math.nan if s is None else _number(s) for r, s in zip(results, row, strict=True)}


# --- arrays ------------------------------------------------------------------------------------------------


def _column(archive: Archive, name: str, count: int) -> Any:
    array = archive.array(name)
    _check(
        array.shape == (count,) and array.dtype.kind == "f", f"{name} does not have one number for each value"
    )
    return array.astype(np.float64)


def _known(column: Any) -> dict[int, float]:
    return {i: x for i, x in enumerate(column.tolist()) if not math.isnan(x)}


def _prints(archive: Archive, count: int) -> list[Fingerprint]:
    rows, flags = archive.array("prints"), archive.array("flags")
    _check(rows.shape == (count, 7) and flags.shape == (count,), "it does not describe each value")
    entries = rows[:, 6]
    _check(
        bool(np.isfinite(entries).all()) and bool((entries >= 0).all()), "a value has no number of entries"
    )
    sums = np.abs(rows[:, 1])
    _check(not ((entries > 0) & (sums == 0)).any(), "a value with entries has no size")
    return [
        _fingerprint(int(row[6]), row[:6], floating=bool(flag & 1), bad=bool(flag & 2))
        for row, flag in zip(rows.tolist(), flags.tolist(), strict=True)
    ]


def _values(
    archive: Archive,
    rows: Any,
    shapes: list[tuple[int, ...]],
    trace: Trace,
    kept: Mapping[str, Parameter],
) -> KnownArrays:
    """Return the arrays of values: those that were written, values that hold the same numbers, parameters."""
    found, written = KnownArrays(), dict[int, Any]()
    for index, source in rows:
        value, first = _whole(index, 0, len(shapes)), _whole(source, 0, len(shapes))
        if first not in written:
            written[first] = archive.array(f"value_{first}")
        _check(
            written[first].size == math.prod(shapes[value]), f"value {value} has another size than it says"
        )
        found[value] = written[first].reshape(shapes[value])
    wide = {name: p.array.astype(np.float64) for name, p in kept.items() if p.array is not None}
    for known in trace.values:
        array = wide.get(known.name) if known.role == "parameter" else None
        if known.producer is None and array is not None and array.shape == shapes[known.id]:
            found[known.id] = array
    return found


def _weights(
    archive: Archive, text: Mapping[str, Any], path: Path
) -> tuple[dict[str, Parameter], dict[tuple[str, str], Any]]:
    """Return the parameters and the optimizer's state, from this file or from the one beside it."""
    names = [(_text(n), _shape(shape), _print(mark)) for n, shape, mark in text["parameters"]]
    keys = [(_text(name), _text(role)) for name, role in text["state"]]
    sources: Archive | None = archive
    if "weights" in text:
        digest = _text(text["weights"])
        sources = _beside(weights_beside(path, digest), digest)
    if sources is None:
        return {name: Parameter(shape, mark) for name, shape, mark in names}, {}
    try:
        kept = dict[str, Parameter]()
        for i, (name, shape, mark) in enumerate(names):
            array = sources.array(f"weight_{i}")
            _check(array.shape == shape, f"parameter {name} has another shape than it says")
            kept[name] = Parameter(shape, mark, array)
        return kept, {key: sources.array(f"state_{i}").astype(np.float64) for i, key in enumerate(keys)}
    finally:
        if sources is not archive:
            sources.close()


def _beside(path: Path, digest: str) -> Archive | None:
    if not path.exists():
        return None
    _check(path.is_file(), f"{path.name} beside it is not a file")
    with path.open("rb") as file:
        own = hashlib.file_digest(file, "sha256").hexdigest()
    _check(own == digest, f"{path} beside it is not the file that was written with it; record it again")
    return Archive(path, _MOST_WEIGHTS)


# --- text --------------------------------------------------------------------------------------------------


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _whole(x: Any, least: int, below: int | None = None) -> int:
    _check(
        isinstance(x, int) and not isinstance(x, bool) and x >= least and (below is None or x < below),
        f"{x!r} is not a number from {least} on" + ("" if below is None else f" below {below}"),
    )
    return int(x)


def _text(x: Any) -> str:
    _check(isinstance(x, str), f"{x!r} is not text")
    return str(x)


def _one_of(x: Any, known: tuple[str, ...]) -> str:
    _check(x in known, f"{str(x)[:40]!r} is not one of {', '.join(known)}")
    return str(x)


def _number(x: Any) -> float:
    _check(isinstance(x, int | float) and not isinstance(x, bool), f"{x!r} is not a number")
    return float(x)


def _scalar(x: Any) -> Any:
    return float(x) if isinstance(x, str) else x


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(_whole(n, 0, 2**40) for n in x)


def _print(x: Any) -> Fingerprint:
    entries, *sums, floating, bad = x
    _check(len(sums) == 6, "a parameter is not described")
    return _fingerprint(_whole(entries, 0), list(map(float, sums)), floating=bool(floating), bad=bool(bad))


def _fingerprint(entries: int, sums: Sequence[float], *, floating: bool, bad: bool) -> Fingerprint:
    total, absolute, squares, signed, least, greatest = sums
    return Fingerprint(entries, total, absolute, squares, signed, least, greatest, floating, bad)


def _place(row: Any) -> Place:
    file, line, function, code, span = row
    whole = None if span is None else tuple(_whole(n, -1) for n in span)
    _check(whole is None or len(whole) == 4, "a line has no place")
    return Place(_text(file), _whole(line, 0), _text(function), _text(code), whole)  # type: ignore[arg-type]  # four numbers were counted


def _trace(text: Mapping[str, Any], places: list[Place]) -> Trace:
    rows = text["values"]
    trace = Trace([Value(id=i, role=_text(r[1]), name=_text(r[2])) for i, r in enumerate(rows)])
    for index, row in enumerate(text["operations"]):
        step = _step(index, row, places, len(rows), len(text["operations"]))
        trace.steps.append(step)
        for output in step.outputs:
            _check(all(i < output for i in step.inputs), f"operation {index} reads what comes later")
            trace.values[output].producer = index
    said = [None if r[0] is None else _whole(r[0], 0, len(trace.steps)) for r in rows]
    _check(said == [v.producer for v in trace.values], "operations and values do not belong together")
    return trace


def _step(index: int, row: Any, places: list[Place], count: int, steps: int) -> Step:
    (
        operation, primitive, phase, inputs, outputs, scalars, module, place, frames, forward, where, library,
        dtype, options, roles,
    ) = row  # fmt: skip
    _check(phase in _PHASES, f"operation {index} belongs to no phase")
    return Step(
        index=index,
        operation=_text(operation),
        primitive=_text(primitive),
        phase=phase,
        inputs=tuple(_whole(i, 0, count) for i in inputs),
        outputs=tuple(_whole(i, 0, count) for i in outputs),
        scalars=tuple(_scalar(x) for x in scalars),
        module=_text(module),
        place=_at(places, place),
        frames=tuple(p for frame in frames if (p := _at(places, frame)) is not None),
        forward=None if forward is None else _whole(forward, 0, steps),
        where=_text(where),
        library=_text(library),
        compute_dtype=_text(dtype),
        options={_text(k): _tuples(x) for k, x in options.items()},
        roles=tuple(tuple(map(_text, axes)) for axes in roles),
    )


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _at(places: list[Place], number: Any) -> Place | None:
    at = _whole(number, -1, len(places))
    return None if at < 0 else places[at]


def _result(row: Any, count: int) -> Result:
    kind, name, value, step = row
    _check(kind in _KINDS, f"{kind!r} is not a kind of result")
    return Result(kind, _text(name), _whole(value, 0, count), _whole(step, 1))


def _site(row: Any, places: list[Place]) -> CallSite | None:
    if row is None:
        return None
    place, parts = row
    whole = _at(places, place)
    _check(whole is not None, "the optimizer has no line")
    assert whole is not None
    found = {_text(name): _at(places, part) for name, part in parts.items()}
    return CallSite(whole, {name: part for name, part in found.items() if part is not None})
