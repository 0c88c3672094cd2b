"""``python -m benchmarks.steps.run [--only TEXT]``: measure every row, each in a process of its own.

Through ``python -m benchmarks steps`` all rows are measured and ``benchmarks/results/cpu.json`` is written;
called by itself it prints the rows whose name contains TEXT and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.steps.errors import BenchmarkError, NoisyError, require
from benchmarks.steps.rows import ROWS
from benchmarks.steps.show import row_table

__all__ = ["ATTEMPTS", "PEERS", "in_own_process", "main", "measure_all"]

PEERS = ("torch", "jax", "optax", "accelerate", "flax", "jmp")
# A busy machine is given more chances, after a pause of some seconds and with more rounds.
ATTEMPTS, MOST_ROUNDS, PAUSE_S = 5, 3, 20.0
ROOT = Path(__file__).parents[2]


def measure_all(
    console: Console,
    *,
    device: str = "cpu",
    only: str = "",
    parts: tuple[str, ...] = ("bandwidth", "compiling"),
    measured: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Every row and every other part: what is written to the file, the facts of the machine aside.

    Args:
        console: where progress and tables are shown.
        device: ``cpu`` or ``cuda``.
        only: rows whose name does not contain it are left out, and then the other parts too.
        parts: beside the rows.
        measured: measures one part; by default :func:`in_own_process`.

    Raises:
        BenchmarkError: a peer is missing, a result is wrong, or all attempts at a row were too noisy.
    """
    require(PEERS)
    measured = in_own_process if measured is None else measured
    report: dict[str, Any] = {"device": device, "threads": threads(), "peers": list(PEERS)}
    for part in () if only else parts:
        console.print(f"measuring: {part} ...")
        report[part] = _with_patience(console, measured, part, device)
    rows = []
    for row in ROWS:
        if only not in row.name:
            continue
        console.print(f"measuring: {row.name} ...")
        rows.append(_with_patience(console, measured, row.name, device))
        console.print(row_table(rows[-1]))
    if not rows:
        raise BenchmarkError(f"--only must be part of a row's name, as {ROWS[0].name!r}; got {only!r}.")
    return report | {"rows": rows}


def _with_patience(console: Console, measured: Callable[..., Any], part: str, device: str) -> Any:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return measured(part, device=device, attempt=min(attempt, MOST_ROUNDS))
        except NoisyError as noise:
            if attempt == ATTEMPTS:
                raise
            console.print(f"{noise} Once more.")
            time.sleep(PAUSE_S * attempt)
    raise AssertionError("the last attempt returns or raises")


def threads() -> int:
    """The cores that PyTorch is given: all, unless BENCH_THREADS says otherwise. JAX takes all."""
    return int(os.environ.get("BENCH_THREADS", os.cpu_count() or 1))


def in_own_process(part: str, *, device: str, attempt: int) -> Any:
    """What ``benchmarks.steps.worker`` measures of the part.

    Raises:
        NoisyError, BenchmarkError: as the process said.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.steps.worker", part, str(out)]
        command += ["--device", device, "--attempt", str(attempt)]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads()),
            "JAX_PLATFORMS": "cpu" if device == "cpu" else "cuda",
            # The profiler and the compiler log what is of no concern here.
            "KINETO_LOG_LEVEL": "99",
            "TORCH_LOGS": "-all",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        said = done.stderr.strip()
        if done.returncode == NoisyError.exit_code:
            raise NoisyError(said.splitlines()[-1])
        if done.returncode != 0:
            raise BenchmarkError(f"{part}: ended with {done.returncode}.\n{said}")
        return json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    try:
        measure_all(Console(), device=given.device, only=given.only)
    except BenchmarkError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
