"""What a gated checkpoint costs beside the plain one of the same format, in milliseconds per GB of state.

``bare`` writes the files and nothing else. ``gated`` is ``Checkpoints.save``: it looks at every value, writes
the same files, waits until they are on the disk, and reads them back for their checksums. ``flushed`` is
``bare`` and the wait alone, so that the rest of the price is known: most libraries do not wait.
``finiteness`` and ``checksums`` are those parts of a gated save alone. ``read`` and ``gated read`` are the
same for loading.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.launching import said_by_the_first
from benchmarks.repeats import Timed, pooled, ratio_to_bare, restless, timed, until_known
from benchmarks.steps.errors import BenchmarkError
from benchmarks.timing import interleaved

__all__ = ["FORMATS", "VARIANTS", "Plain", "run"]

# By name, the module whose plain(format, values) says how a format is written without a gate, and the format.
FORMATS = {
    **{form: ("benchmarks.checkpoints_torch", form) for form in ("torch", "safetensors", "dcp")},
    **{f"jax {form}": ("benchmarks.checkpoints_jax", form) for form in ("npz", "safetensors", "orbax")},
}
VARIANTS = ("bare", "flushed", "gated", "finiteness", "checksums", "read", "gated read")
SHAPES = ((1024, 1024),) * 48  # 201 MB
ROUNDS = 7
# The largest relative uncertainty of the ratio of a gated save to a bare one. Disks vary.
BOUND = 0.2
_PATIENCE_S = 900


class Plain(NamedTuple):
    """A state, and how it is saved and loaded with and without a gate.

    Attributes:
        state: what is saved.
        write: writes it into a folder.
        read: reads it from a folder.
        checkpoints: makes the ``Checkpoints`` in a folder.
        load: loads from these.
        nonfinite: looks for values that are not finite.
    """

    state: Any
    write: Callable[[Path], object]
    read: Callable[[Path], object]
    checkpoints: Callable[[Path], Any]
    load: Callable[[Any], object]
    nonfinite: Callable[[], object]


def run(
    rounds: int = ROUNDS,
    bound: float = BOUND,
    formats: Sequence[str] = tuple(FORMATS),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row for each format.

    Raises:
        BenchmarkError: a process failed, or the uncertainty of a ratio stays above ``bound``.
    """
    return [_row(name, rounds, bound, shapes, say) for name in formats]


def _row(
    name: str, rounds: int, bound: float, shapes: Sequence[Sequence[int]], say: Callable[[str], None]
) -> dict[str, Any]:
    parts = until_known(
        lambda turn: {"samples": _measure(name, rounds, turn, shapes)},
        lambda parts: restless(f"checkpoints in {name}", [_saves(p) for p in timed(parts)], bound),
        say=say,
    )
    processes, size = timed(parts), 4 * sum(map(math.prod, shapes))
    ratio, known = ratio_to_bare(processes, "gated")
    return {
        "format": name,
        "bytes": size,
        "tensors": len(shapes),
        "processes": len(parts),
        "uncertainty_bound": bound,
        "ratio_to_bare": round(ratio, 3),
        "uncertainty": round(known, 4),
        "variants": {variant: _figures(processes, variant, size) for variant in VARIANTS},
    }


def _saves(process: Timed) -> Timed:
    """The times of which the ratio must be known."""
    return {name: process[name] for name in ("bare", "gated")}


def _figures(processes: Sequence[Timed], variant: str, size: int) -> dict[str, float]:
    times = pooled(processes, variant)
    return times.as_dict() | {"ms_per_gb": round(times.median / size * 1e9, 1)}


def _measure(name: str, rounds: int, turn: int, shapes: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """Return the ``samples`` of all variants, measured in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.checkpoints"]
    command += [name, str(rounds), str(turn), json.dumps(shapes)]
    found: dict[str, list[float]] = said_by_the_first(
        command,
        1,
        all_of_them="the process that saves checkpoints",
        one_of_them=f"the process that saves checkpoints in {name}",
        patience=_PATIENCE_S,
    )
    return found


def _in_this_process(name: str, rounds: int, turn: int, shapes: Sequence[Sequence[int]]) -> Mapping[str, Any]:
    module, form = FORMATS[name]
    draw = np.random.default_rng(turn)
    values = {f"w{i}": draw.normal(size=tuple(shape)).astype(np.float32) for i, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        steps = _variants(importlib.import_module(module).plain(form, values), root)

        def prepare(_: str) -> None:
            # Each save writes new files, as a gated one does.
            shutil.rmtree(root / "bare", ignore_errors=True)
            os.sync()  # what one variant has left to be written to the disk must not slow the next one

        times = interleaved(steps, rounds=rounds, warmup=1, prepare=prepare, seed=turn)
    return {variant: t.samples for variant, t in times.items()}


def _variants(plain: Plain, folder: Path) -> dict[str, Callable[[], object]]:
    """Return what is timed; the files that are read are there."""
    from stablenum._support.files import sync_file
    from stablenum.checkpoints.manifest import files_in, record_of

    checkpoints = plain.checkpoints(folder / "gated")
    saved, bare, kept = checkpoints.save(0, plain.state), folder / "bare", folder / "kept"
    if saved is None:
        raise BenchmarkError("no checkpoint was saved")

    def write(into: Path) -> None:
        into.mkdir(exist_ok=True)
        plain.write(into)

    def flushed() -> None:
        write(bare)
        for file in files_in(bare):
            sync_file(bare / file)

    write(kept)
    return {
        "bare": lambda: write(bare),
        "flushed": flushed,
        "gated": lambda: checkpoints.save(0, plain.state),
        "finiteness": plain.nonfinite,
        "checksums": lambda: [record_of(kept / file) for file in files_in(kept)],
        "read": lambda: plain.read(kept),
        "gated read": lambda: plain.load(checkpoints),
    }


if __name__ == "__main__":
    given, (rounds, turn), sizes = sys.argv[1], [*map(int, sys.argv[2:4])], json.loads(sys.argv[4])
    print(json.dumps(_in_this_process(given, rounds, turn, sizes)))
