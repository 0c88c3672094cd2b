"""Running the script, and running it again to record the step that failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from stablenum.commands.explain.plan import Outcome, Plan
from stablenum.commands.explain.process import Running
from stablenum.diagnosis import Report
from stablenum.diagnosis.checkup.remedies import Remedy, outcome_of
from stablenum.diagnosis.checkup.report import Checkup
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.interrupts import and_restore

__all__ = ["Explained", "check_up", "explain"]

# If the step at which the script fails changes from run to run, the last run records every step.
MOST_RUNS = 3


class Explained(NamedTuple):
    """The result of running the script.

    Attributes:
        outcome: the outcome of the first run.
        report: why the script failed; None if nothing was found, or if the process ended abruptly.
        runs: the number of times the script ran.
        checkup: what may be wrong although nothing failed; None if nothing was measured.
    """

    outcome: Outcome
    report: Report | None
    runs: int
    checkup: Checkup | None = None


def explain(plan: Plan, say: Callable[[str], object]) -> Explained:
    """Run the script until it fails; if that step was not recorded, run it again and record the step.

    Args:
        plan: what to run; with ``record_from``, there is only one run.
        say: called with messages about the progress.
    """
    first = _run(replace(plan, checkup=plan.record_from is None), shown=True)
    if first.failure is None or first.report is not None:
        return Explained(first, _report(first), 1, _checkup(first))
    outcome, runs = first, 1
    while runs < MOST_RUNS and outcome.failure is not None and outcome.report is None:
        last = runs == MOST_RUNS - 1
        # The gradients of this step may have been computed before other optimizers took their steps.
        begin = max(0, outcome.failure.step - max(0, outcome.optimizers - 1))
        say(f"{outcome.failure}; running the script again to record {'every step' if last else 'that step'}")
        settings = outcome.failure.what == "setting"
        again = replace(plan, record_from=0 if last else begin, again=True, settings=settings)
        outcome = _run(again, shown=False)
        runs += 1
    if outcome.failure is not None:  # the script failed, but never in a step that was recorded
        return Explained(first, _report(outcome), runs)
    return Explained(first, _unreproduced(first, outcome), runs)


def check_up(plan: Plan, say: Callable[[str], object], *, once: bool) -> tuple[Checkup | None, Outcome]:
    """Run the script, and return what its checkup has found; None if nothing was measured. If the cure of the
    first finding can be tried, some steps of the script run once more with it, unless ``once`` is True."""
    outcome = _run(plan, shown=True)
    report = _checkup(outcome)
    if report is None or outcome.remedy is None or once:
        return report, outcome
    remedy = Remedy.from_dict(outcome.remedy)
    say(f"trying {remedy}, in {remedy.steps} steps of another run of the script")
    trial = _run(replace(plan, remedy=outcome.remedy, steps=remedy.steps), shown=False)
    if trial.troubles or not trial.applied:
        say("the cure could not be applied, so nothing is known about it")
        return report, outcome
    shown = [outcome_of(remedy, outcome.losses, trial.losses), trial.sizes]
    return report.with_tried("; ".join(filter(None, shown))), outcome


def _checkup(outcome: Outcome) -> Checkup | None:
    return None if outcome.checkup is None else Checkup.from_dict(outcome.checkup)


def _report(outcome: Outcome) -> Report | None:
    return None if outcome.report is None else Report.from_dict(outcome.report)


def _unreproduced(first: Outcome, second: Outcome) -> Report:
    return Report.of(
        Evidence(
            framework=first.watched[0] if first.watched else "torch",
            reproduced=False,
            differences=_DIFFERENCES,
        ),
        notes=(
            f"first run: {first.failure}",
            *([f"the second run ended with {second.error}"] if second.error else []),
        ),
    )


# What a second run of a script does not share with the first.
_DIFFERENCES = (
    "random numbers from generators that the script does not seed",
    "files that the first run wrote",
    "compiled functions, which ran eagerly in the second run",
    "the order of threads, workers and kernels that are not deterministic",
)


def _run(plan: Plan, *, shown: bool) -> Outcome:
    """Run the script once, in a separate process. Its output is dropped unless ``shown`` is True.

    Raises:
        SystemExit: a signal asks this process to end; the script has ended.
    """
    running = Running()
    outcome = and_restore(lambda: _outcome(running, plan, shown=shown), running.end)
    running.exit_if_asked()
    return outcome


def _outcome(running: Running, plan: Plan, *, shown: bool) -> Outcome:
    folder = running.begin()
    planned, ended = folder / "plan.json", folder / "outcome.json"
    plan.write(planned)
    command = [sys.executable, "-m", "stablenum.commands.explain.child", str(planned), str(ended)]
    # Without a fixed hash seed, sets of strings have a different order in each process.
    environment = {"PYTHONHASHSEED": str(plan.seed % 2**32), **os.environ}
    code = running.run(command, environment, None if shown else subprocess.DEVNULL)
    if not ended.exists():
        code = 128 - code if code < 0 else code
        return Outcome(exit_code=code or 1, error=f"a sudden exit of its process (exit code {code})")
    outcome = Outcome.from_dict(json.loads(ended.read_text(encoding="utf-8")))
    whole = os.path.abspath(plan.script)
    outcome.report = _as_given(outcome.report, whole, plan.script)
    outcome.checkup = _as_given(outcome.checkup, whole, plan.script)
    outcome.harmless = outcome.harmless.replace(whole, plan.script)
    return outcome


def _as_given(part: Any, path: str, script: str) -> Any:
    """Return plain values with the script named as on the command line; Python names it by its whole path."""
    if isinstance(part, dict):
        return {key: _as_given(value, path, script) for key, value in part.items()}
    if isinstance(part, list):
        return [_as_given(value, path, script) for value in part]
    return script if part == path else part
