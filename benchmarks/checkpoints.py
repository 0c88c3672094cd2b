"""What a gated checkpoint costs beside the plain one of the same format, in milliseconds per GB of state.

``bare`` writes the files and nothing else. ``gated`` is ``Checkpoints.save``: it looks at every value, writes
the same files, waits until they are on the disk, and reads them back for their checksums. ``flushed`` is
``bare`` and the wait alone, so that the rest of the price is known: most libraries do not wait.
``finiteness`` and ``checksums`` are those parts of a gated save alone. ``read`` and ``gated read`` are the
same for loading.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.launching import said_by_the_first
from benchmarks.repeats import Timed, pooled, ratio_to_bare, restless, timed, until_known
from benchmarks.steps.errors import BenchmarkError
from benchmarks.timing import interleaved

__all__ = ["FORMATS", "VARIANTS", "run"]

FORMATS = ("torch", "safetensors", "dcp")
VARIANTS = ("bare", "flushed", "gated", "finiteness", "checksums", "read", "gated read")
SHAPES = ((1024, 1024),) * 48  # 201 MB
ROUNDS = 7
# The largest relative uncertainty of the ratio of a gated save to a bare one. Disks vary.
BOUND = 0.2
_PATIENCE_S = 900


def run(
    rounds: int = ROUNDS,
    bound: float = BOUND,
    formats: Sequence[str] = FORMATS,
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
    import torch

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(turn)
    state = {f"w{i}": torch.randn(*shape, generator=draw) for i, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        steps = _variants(name, root, {"model": state})

        def prepare(_: str) -> None:
            shutil.rmtree(
                root / "bare", ignore_errors=True
            )  # each save writes new files, as a gated one does
            os.sync()  # what one variant has left to be written to the disk must not slow the next one

        times = interleaved(steps, rounds=rounds, warmup=1, prepare=prepare, seed=turn)
    return {variant: t.samples for variant, t in times.items()}


def _variants(name: str, folder: Path, state: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Return what is timed; the files that are read are there."""
    import stablenum_torch
    from stablenum.checkpoints.manifest import files_in, record_of
    from stablenum.files import sync_file
    from stablenum_torch._recovery.entries import nonfinite

    write, read = _plain(name)
    checkpoints = stablenum_torch.Checkpoints(folder / "gated", keep=1, format=name)  # type: ignore[arg-type]
    saved, bare, kept = checkpoints.save(0, state), folder / "bare", folder / "kept"
    if saved is None:
        raise BenchmarkError("no checkpoint was saved")
    write(kept, state)

    def flushed() -> None:
        write(bare, state)
        for file in files_in(bare):
            sync_file(bare / file)

    def gated_read() -> None:
        if checkpoints.load({"model": None}) != 0:
            raise BenchmarkError("another checkpoint was loaded")

    return {
        "bare": functools.partial(write, bare, state),
        "flushed": flushed,
        "gated": functools.partial(checkpoints.save, 0, state),
        "finiteness": functools.partial(nonfinite, state),
        "checksums": lambda: [record_of(kept / file) for file in files_in(kept)],
        "read": functools.partial(read, kept, state),
        "gated read": gated_read,
    }


def _plain(name: str) -> tuple[Callable[[Path, Any], object], Callable[[Path, Any], object]]:
    """Return how a format is written and read without a gate; both take a folder and the state."""
    import safetensors.torch
    import torch
    from torch.distributed import checkpoint

    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

    def in_file(file: str, save: Callable[[Any, Path], object]) -> Callable[[Path, Any], object]:
        def write(folder: Path, state: Any) -> None:
            folder.mkdir(exist_ok=True)
            save(state, folder / file)

        return write

    if name == "torch":
        return in_file("state.pt", torch.save), lambda folder, _: torch.load(folder / "state.pt")
    if name == "safetensors":
        library, file = safetensors.torch, "tensors.safetensors"
        write = in_file(file, lambda state, path: library.save_file(state["model"], path))
        # The library maps the file; only a copy is read.
        return write, lambda folder, _: [t.clone() for t in library.load_file(folder / file).values()]

    def write_dcp(folder: Path, state: Any) -> None:
        writer = checkpoint.FileSystemWriter(folder, sync_files=False)
        checkpoint.save(state, storage_writer=writer, no_dist=True)

    def read_dcp(folder: Path, state: Any) -> None:
        into = {"model": {key: torch.empty_like(value) for key, value in state["model"].items()}}
        checkpoint.load(into, checkpoint_id=folder, no_dist=True)

    return write_dcp, read_dcp


if __name__ == "__main__":
    given, (rounds, turn), sizes = sys.argv[1], [*map(int, sys.argv[2:4])], json.loads(sys.argv[4])
    print(json.dumps(_in_this_process(given, rounds, turn, sizes)))
