"""``python -m benchmarks.steps.worker PART OUT``: measure one part in this process and write it as JSON.

PART is a row's name, ``bandwidth``, ``compiling`` or ``transformer``; ``--turn`` is the number of processes
that have measured the part before. A process of its own has clean memory and its own thread pool. It exits
with 1 if there is no trustworthy result and with 3 if the timings are too noisy; in both cases nothing is
written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.rows import row_named

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command described in the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turn", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        result = _measured(given.part, given.device, given.turn)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    given.out.write_text(json.dumps(result), encoding="utf-8")


def _measured(part: str, device: str, turn: int) -> Any:
    if part == "bandwidth":
        from benchmarks.steps.bandwidth import bandwidth
        from benchmarks.steps.devices import timer_of

        return bandwidth(device=device, timer=timer_of(device), rounds=15 * (turn + 1))
    if part == "compiling":
        from benchmarks.steps.compiling import compiling

        return compiling(device=device)
    if part == "transformer":
        from benchmarks.steps.transformer import LARGE, transformer

        return transformer(LARGE, device=device, turn=turn)
    from benchmarks.steps.measure import measure

    return measure(row_named(part), device=device, turn=turn)


if __name__ == "__main__":
    main()
