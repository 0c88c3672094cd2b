"""Runs the script, and runs it again to record the step that failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from stablenum.commands.explain.plan import Outcome, Plan
from stablenum.diagnosis import Evidence, Report

__all__ = ["Explained", "explain"]

# A failure that moves from run to run is recorded from the start the last time.
MOST_RUNS = 3


class Explained(NamedTuple):
    """What became of the script.

    Attributes:
        outcome: of the first run.
        report: why it failed; None if nothing was found, or if the process died.
        runs: how often the script was run.
    """

    outcome: Outcome
    report: Report | None
    runs: int


def explain(plan: Plan, say: Callable[[str], object]) -> Explained:
    """Run until something is not finite; then, if that step was not recorded, run again and record it.

    Args:
        plan: what to run; with ``record_from`` every run is the only one.
        say: told what is happening.
    """
    first = _run(plan, shown=True)
    if first.failure is None or first.report is not None:
        return Explained(first, _report(first), 1)
    outcome, runs = first, 1
    while runs < MOST_RUNS and outcome.failure is not None and outcome.report is None:
        last = runs == MOST_RUNS - 1
        # Gradients of this step may have been computed before the steps of other optimizers.
        begin = max(1, outcome.failure.step - max(0, outcome.optimizers - 1))
        say(f"{outcome.failure}; running the script again to record {'all' if last else 'that step'}")
        outcome = _run(replace(plan, record_from=1 if last else begin, again=True), shown=False)
        runs += 1
    if outcome.failure is not None:  # it failed, and nobody could record it
        return Explained(first, _report(outcome), runs)
    return Explained(first, _unreproduced(first, outcome), runs)


def _report(outcome: Outcome) -> Report | None:
    return None if outcome.report is None else Report.from_dict(outcome.report)


def _unreproduced(first: Outcome, second: Outcome) -> Report:
    return Report.of(
        Evidence(framework=first.watched[0] if first.watched else "torch", reproduced=False),
        notes=(
            f"first run: {first.failure}",
            *([f"the second run ended with {second.error}"] if second.error else []),
            "the script, run again from the same seed, did not come to it; does it seed all its generators?",
        ),
    )


def _run(plan: Plan, *, shown: bool) -> Outcome:
    """One run in a process of its own. A second run's output would be the first one's once more."""
    with tempfile.TemporaryDirectory(prefix="stablenum-") as folder:
        told, heard = Path(folder) / "plan.json", Path(folder) / "outcome.json"
        plan.write(told)
        command = [sys.executable, "-m", "stablenum.commands.explain.child", str(told), str(heard)]
        # Sets of strings have an order of their own in each process otherwise.
        environment = {"PYTHONHASHSEED": str(plan.seed % 2**32), **os.environ}
        output = None if shown else subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        code = _wait(process)
        if not heard.exists():
            code = 128 - code if code < 0 else code
            return Outcome(exit_code=code or 1, error=f"the process ended by itself, with exit code {code}")
        return Outcome.from_dict(json.loads(heard.read_text(encoding="utf-8")))


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Ctrl-C reaches the script as well, which has time to end as it likes."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue
