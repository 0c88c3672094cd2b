"""``python -m benchmarks.steps.run [--only TEXT]``: measure every row, each in processes of its own.

``python -m benchmarks steps`` measures all rows and writes ``benchmarks/results/cpu.json``; this module
called directly prints the rows whose name contains TEXT and writes nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.repeats import restless, timed, until_known
from benchmarks.steps import summary
from benchmarks.steps.errors import BenchmarkError, NoisyError, require
from benchmarks.steps.keeping import Kept
from benchmarks.steps.rows import ROWS, Row
from benchmarks.steps.show import row_table

__all__ = ["PEERS", "in_own_process", "main", "measure_all", "measure_row", "threads"]

PEERS = ("torch", "jax", "optax", "accelerate", "flax", "jmp")
# Parts that are not rows are measured in one process. If the machine is too busy, they are measured again
# after a pause, so that whatever disturbed the machine can end.
ATTEMPTS, PAUSE_S = 5, 20.0
PATIENCE_S = 1800  # for one process
ROOT = Path(__file__).parents[2]


def measure_all(
    console: Console,
    *,
    device: str = "cpu",
    parts: tuple[str, ...] = ("bandwidth", "compiling"),
    kept: Kept,
) -> dict[str, Any]:
    """Measure every row and every other part: the content of the file without the facts about the machine.

    Args:
        console: shows progress and tables.
        device: ``cpu`` or ``cuda``.
        parts: the parts to measure in addition to the rows.
        kept: the parts that have been measured already; each new part is added as soon as it is measured.

    Raises:
        BenchmarkError: a peer is missing, a result is wrong, or the machine was too noisy.
    """
    require(PEERS)
    report: dict[str, Any] = {"device": device, "threads": threads(), "peers": list(PEERS)}
    for part in parts:
        measured = functools.partial(_with_patience, console, part, device)
        report[part] = kept.part(part, measured)
    rows = []
    for row in ROWS:
        measured = functools.partial(measure_row, console, row, device)
        rows.append(kept.part(row.name, measured))
        console.print(row_table(rows[-1]))
    return report | {"rows": rows}


def measure_row(console: Console, row: Row, device: str) -> dict[str, Any]:
    """Measure a row, in as many processes as its uncertainty needs.

    Raises:
        BenchmarkError: a result is wrong, or the machine was too noisy.
    """
    parts = until_known(
        lambda turn: in_own_process(row.name, device=device, turn=turn),
        lambda parts: restless(row.name, timed(parts), row.bound),
        say=console.print,
    )
    return summary.result_of(row, parts)


def _with_patience(console: Console, part: str, device: str) -> Any:
    for turn in range(ATTEMPTS):
        try:
            return in_own_process(part, device=device, turn=turn)
        except NoisyError as noise:
            if turn == ATTEMPTS - 1:
                raise
            console.print(f"{noise} Measuring once more.")
            time.sleep(PAUSE_S)
    raise AssertionError("the last attempt returns or raises")


def threads() -> int:
    """The number of threads for PyTorch: BENCH_THREADS, or all cores if it is not set. JAX uses all cores."""
    return int(os.environ.get("BENCH_THREADS", os.cpu_count() or 1))


def in_own_process(part: str, *, device: str, turn: int) -> Any:
    """The result of ``benchmarks.steps.worker`` for the part.

    Raises:
        NoisyError: the process found the timings too noisy.
        BenchmarkError: the process failed or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.steps.worker", part, str(out)]
        command += ["--device", device, "--turn", str(turn)]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads()),
            "JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda",
            # The profiler and the compiler log messages that do not matter here.
            "KINETO_LOG_LEVEL": "99",
            "TORCH_LOGS": "-all",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
            )
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"{part}: did not end within {PATIENCE_S} seconds.") from error
        said = done.stderr.strip()
        if done.returncode == NoisyError.exit_code:
            raise NoisyError(said.splitlines()[-1])
        if done.returncode != 0:
            raise BenchmarkError(f"{part}: ended with {done.returncode}.\n{said}")
        return json.loads(out.read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> None:
    """Run the command described in the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cpu")
    given, console = parser.parse_args(arguments), Console()
    chosen = [row for row in ROWS if given.only in row.name]
    try:
        if not chosen:
            raise BenchmarkError(
                f"--only must be part of a row's name such as {ROWS[0].name!r}; got {given.only!r}."
            )
        require(PEERS)
        for row in chosen:
            console.print(f"measuring: {row.name} ...")
            console.print(row_table(measure_row(console, row, given.device)))
    except BenchmarkError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
