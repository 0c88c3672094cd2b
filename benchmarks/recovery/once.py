"""Run one training with every fault in every way, in a process of its own, and print rows of JSON."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.recovery.data import STREAMS
from benchmarks.recovery.faults import DELAYS, FAULTS, nothing
from benchmarks.recovery.judge import shown_after, verdict
from benchmarks.recovery.runs import Run
from benchmarks.recovery.ways import WAYS, Outcome, same_data

__all__ = ["CLEAN", "ORDERS", "PLAIN", "Training", "rows"]

ORDERS = (101, 102, 103, 104)  # of the data, for clean runs that differ in nothing else
CLEAN = "none"  # the name of no fault
PLAIN, OURS = "no protection", "Recovery"


class Training:
    """One training: what it begins with, and its data.

    Args:
        framework: ``"torch"`` or ``"jax"``.
        program: ``"digits"`` or ``"transformer"``.
        seed: of the first weights, and of the order of the data.
    """

    def __init__(self, framework: str, program: str, seed: int) -> None:
        self.framework, self.program, self.seed = framework, program, seed
        self.stream = STREAMS[program](seed)
        self._controls: dict[tuple[int, ...], Outcome] = {}

    def make(self, guard: dict[str, Any] | None) -> Run:
        """A run at its beginning; only its own framework is imported."""
        if self.framework == "torch":
            from benchmarks.recovery.torch_runs import TorchRun

            return TorchRun(self.program, self.seed, self.stream.held_out, guard)
        from benchmarks.recovery.jax_runs import JaxRun

        return JaxRun(self.program, self.seed, self.stream.held_out, guard)

    def control(self, outcome: Outcome) -> Outcome | None:
        """The clean run on the data of a run that ended and may have left some out."""
        if not (outcome.ended and outcome.positions):
            return None
        read = tuple(outcome.positions[step] for step in range(len(outcome.positions)))
        if read not in self._controls:
            self._controls[read] = same_data(self.make, self.stream.at, outcome)
        return self._controls[read]


def rows(
    training: Training,
    faults: Sequence[str] = (CLEAN, *FAULTS),
    delays: Sequence[int] = DELAYS,
    ways: Sequence[str] = tuple(WAYS),
) -> Iterator[dict[str, Any]]:
    """Yield a row for each fault, delay and way, after one with the final losses of clean runs."""
    clean = WAYS[PLAIN](training.make, training.stream.at, nothing())
    yield {"clean": clean.run.evaluate(), "other_orders": _other_orders(training)}
    for fault in faults:
        for delay in delays if fault != CLEAN else (0,):
            planted = nothing() if fault == CLEAN else FAULTS[fault](delay)
            for way in ways:
                outcome = WAYS[way](training.make, training.stream.at, planted)
                row = verdict(outcome, clean, training.control(outcome))
                if way == PLAIN and fault != CLEAN:
                    row |= shown_after(outcome, clean, planted.cause)
                yield {"fault": fault, "delay": delay, "way": way} | row


def _other_orders(training: Training) -> list[float]:
    """The final losses of clean runs from the same weights, with their data in other orders."""
    streams = (STREAMS[training.program](order) for order in ORDERS)
    return [WAYS[PLAIN](training.make, stream.at, nothing()).run.evaluate() for stream in streams]


def _main(framework: str, program: str, seed: str) -> None:
    logging.getLogger("stablenum").setLevel(logging.CRITICAL)  # what happens is in the rows
    for row in rows(Training(framework, program, int(seed))):
        print(json.dumps(row, allow_nan=False), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
