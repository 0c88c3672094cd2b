"""``save_program``: record a program, and write its numbers into a file."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.lockfile.layout import (
    FORMAT,
    SUFFIX,
    other_weights,
    weights_beside,
    write_archive,
)
from stablenum.diagnosis.diff.places.locations import result_name
from stablenum.diagnosis.diff.sides.call_sites import CallSite
from stablenum.diagnosis.diff.sides.capturing import captured, digest_of
from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.diff.sides.recorded import Parameter, RecordedProgram, is_recorded
from stablenum.diagnosis.diff.sides.recording import recorded, undisturbed
from stablenum.diagnosis.replay.source_files import package_of
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place
from stablenum.errors import ProgramError, bad_field, bad_type

__all__ = ["recording_of", "save_program", "write_program"]

# The arrays of values take at most so much in a file for each 200 operations, and weights lie in it only if
# they take no more than that: with fingerprints, a file of 200 operations stays below 1 MB.
_VALUES, _WEIGHTS = 2**19, 2**18
_PACKAGES = {"torch": ("torch", "numpy"), "jax": ("jax", "jaxlib", "optax", "numpy")}


def save_program(program: Any, path: str | PathLike[str], *, steps: int = 1) -> None:
    """Record a program's numbers in a file, with which a program can be compared anywhere.

    The program is run once and evaluated again four times. The file, which is written whole or not at all,
    holds fingerprints of every value of the forward pass, the backward pass and the update in float64, how
    far rounding may take each in the format in which the program computes, the arrays of the smallest of
    them, and the source lines; no code that could be run, and no pickle. Weights of more than 256 KiB lie
    beside it, in PATH.HASH.weights: without that file, the program that is compared keeps its own, and the
    report says whether they are the same. Equal recordings are equal files.

    Experimental: the format may change in a minor version.

    Args:
        program: made by ``stablenum_torch.program`` or ``stablenum_jax.program``.
        path: the file, which is replaced if it exists; its name ends in ``.snum``.
        steps: how many training steps follow one another, with the same arguments.

    Raises:
        TypeError: an argument has a wrong type, or ``program`` is itself a recording.
        ValueError: ``steps`` is below 1; ``path`` has another suffix.
        ProgramError: the program fails, and its line is named; or a result is NaN. No file is written.
        OSError: the file cannot be written.

    Example:
        >>> import stablenum, stablenum_torch, torch
        >>> x = torch.linspace(-2, 2, 5, requires_grad=True)
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder) / "sine.snum"
        ...     stablenum.save_program(stablenum_torch.program(torch.sin, x), file)
        ...     golden = stablenum.load_program(file)
        ...     same = stablenum_torch.program(lambda x: torch.cos(x - torch.pi / 2), x)
        ...     other = stablenum_torch.program(torch.tanh, x)
        ...     stablenum.diff(golden, same).ok, stablenum.diff(golden, other).ok
        (True, False)
    """
    write_program(recording_of(program, steps), path)


def recording_of(program: Any, steps: int = 1) -> RecordedProgram:
    """Return the recording of a live program, without a file."""
    if is_recorded(program) or not (hasattr(program, "play") and hasattr(program, "parameters")):
        raise bad_type("program", "made by stablenum_torch.program or stablenum_jax.program", program)
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise bad_type("steps", "a whole number", steps)
    if steps < 1:
        raise bad_field("steps", "at least 1", steps)

    def body() -> RecordedProgram:
        live: Program = program.fresh()  # what the other side of a comparison computes with is not recorded
        live.numbers = ()
        recorded(live, "recorded", steps)
        made = captured(live, steps, _VALUES)
        bad = next((r for r in made.results if made.prints[r.value].bad), None)
        if bad is not None:
            raise ProgramError(
                f"{result_name(bad.kind, bad.name)} of the program is NaN, so that nothing could be compared "
                "with it. Give it a batch and weights whose results are finite; `stablenum explain` finds "
                "where a NaN comes from."
            )
        return made

    return undisturbed(body)


def write_program(program: RecordedProgram, path: str | PathLike[str]) -> None:
    """Write a recording into a file, and its weights beside it if they are large."""
    if not isinstance(path, str | PathLike):
        raise bad_type("path", "a path", path)
    target = Path(path)
    if target.suffix.lower() != SUFFIX:
        raise ValueError(f"path must end in {SUFFIX}; got {str(path)!r}.")
    weights = _weights(program)
    inside = sum(x.nbytes for x in weights.values()) <= _WEIGHTS
    first = _first_of(program)
    text, arrays = _text(program, first), _arrays(program, first)
    digest = ""
    if inside:
        arrays |= weights
    else:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            whole = Path(folder) / "weights"
            write_archive(whole, weights, None, packed=False)
            with whole.open("rb") as file:
                digest = text["weights"] = hashlib.file_digest(file, "sha256").hexdigest()
            whole.replace(weights_beside(target, digest))
    write_archive(target, arrays, text, packed=True)
    for old in other_weights(target, digest):
        old.unlink(missing_ok=True)


def _weights(program: RecordedProgram) -> dict[str, Any]:
    found = {f"weight_{i}": _narrow(p.array) for i, p in enumerate(program.kept.values())}
    return found | {f"state_{i}": _narrow(x) for i, x in enumerate(program.state.values())}


def _narrow(array: Any) -> Any:
    """Return an array in float32 if that holds its numbers."""
    array = np.asarray(array)
    with np.errstate(all="ignore"):
        short = array.astype(np.float32) if array.dtype == np.float64 else array
    return short if np.array_equal(short, array, equal_nan=True) else array


def _arrays(program: RecordedProgram, first: Mapping[int, int]) -> dict[str, Any]:
    prints = [p[1:7] for p in program.prints]
    counts = [p.entries for p in program.prints]
    known = range(len(program.prints))
    return {
        "prints": np.column_stack([np.reshape(prints, (-1, 6)), counts]).astype(np.float64),
        "flags": np.asarray([p.floating + 2 * p.bad for p in program.prints], np.uint8),
        "tolerance": np.asarray(program.tolerance, np.float64),
        "errors": np.asarray([program.errors.get(i, np.nan) for i in known], np.float64),
        "typical": np.asarray([program.typical.get(i, np.nan) for i in known], np.float64),
        "limits": np.asarray(program.limits, np.float64),
        **{f"value_{i}": program.arrays[i] for i in sorted({*first.values()})},
    }


def _first_of(program: RecordedProgram) -> dict[int, int]:
    """Return for each value whose array is kept the first one that holds the same numbers in the same order:
    of these, one array is written."""
    first = dict[bytes, int]()
    return {i: first.setdefault(digest_of(program.arrays[i]), i) for i in sorted(program.arrays)}


# --- text --------------------------------------------------------------------------------------------------


def _text(program: RecordedProgram, first: Mapping[int, int]) -> dict[str, Any]:
    places = _Places()
    trace = program.trace
    forms = sorted(set(program.forms.values()))
    return {
        "format": FORMAT,
        "made": {
            "stablenum": sys.modules["stablenum"].__version__,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            **{name: _version(name) for name in _PACKAGES[program.framework]},
        },
        "framework": program.framework,
        "steps": program.steps,
        "values": [[v.producer, v.role, v.name] for v in trace.values],
        "shapes": program.shapes,
        "formats": forms,
        "format_of": [_place_in(forms, program.forms.get(i)) for i in range(len(trace.values))],
        "operations": [_operation(step, places) for step in trace.steps],
        "arrays": sorted(first.items()),
        "results": [[r.kind, r.name, r.value, r.step] for r in program.results],
        "sketches": [None if np.isnan(s) else s for s in _sketches(program)],
        "stops": sorted(program.stops),
        "parameters": [[n, p.shape, _print(p)] for n, p in program.kept.items()],
        "state": [list(key) for key in program.state],
        "numbers": sorted(x for x in map(float, program.literals) if np.isfinite(x)),
        "aside": list(program.aside),
        "optimizer_at": _site(program.optimizer_at, places),
        "places": places.rows,
    }


def _sketches(program: RecordedProgram) -> list[float]:
    return [program.sketches[r.value] for r in program.results]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _place_in(forms: list[str], form: str | None) -> int:
    return -1 if form is None else forms.index(form)


def _print(parameter: Parameter) -> list[Any]:
    mark = parameter.print
    return [mark.entries, *map(_plain, mark[1:7]), int(mark.floating), int(mark.bad)]


def _operation(step: Step, places: _Places) -> list[Any]:
    return [
        step.operation,
        step.primitive,
        step.phase,
        step.inputs,
        step.outputs,
        _plain(step.scalars),
        step.module,
        places.of(step.place),
        [places.of(frame) for frame in step.frames],
        step.forward,
        step.where,
        step.library,
        step.compute_dtype,
        {key: _plain(x) for key, x in step.options.items()},
        step.roles,
    ]


class _Places:
    """The source lines, each written once."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def of(self, place: Place | None) -> int:
        """Return the number of a line; -1 for none."""
        if place is None:
            return -1
        row = _file(place.file), place.line, place.function, place.code, place.span
        if row not in self._known:
            self._known[row] = len(self.rows)
            self.rows.append(list(row))
        return self._known[row]


def _file(file: str) -> str:
    """Return a file as it is named elsewhere: below the working directory, or below the packages."""
    if not os.path.isabs(file):
        return file
    package = package_of(file)
    if package:
        parts = Path(file).parts
        at = max(
            (i for i, part in enumerate(parts) if part in ("site-packages", "dist-packages")), default=None
        )
        if at is not None:
            return "/".join(parts[at:])
    short = Path(os.path.relpath(file))
    return "/".join(short.parts[-2:]) if short.parts[0] == ".." else short.as_posix()


def _site(site: CallSite | None, places: _Places) -> Any:
    if site is None:
        return None
    return [places.of(site.place), {name: places.of(part) for name, part in site.parts.items()}]


def _plain(x: Any) -> Any:
    """Return plain values: a number that is not finite becomes a string."""
    if isinstance(x, bool | str) or x is None:
        return x
    if isinstance(x, Mapping):
        return {str(key): _plain(v) for key, v in x.items()}
    if isinstance(x, Iterable):
        return [_plain(v) for v in x]
    if isinstance(x, complex):
        return str(x)
    number = x if isinstance(x, int) else float(x)
    return number if isinstance(number, int) or np.isfinite(number) else str(number)
