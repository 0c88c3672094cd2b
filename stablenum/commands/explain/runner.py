"""Running the script, and running it again to record the step that failed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from stablenum._support.interrupts import and_restore
from stablenum.commands.explain.edit_runs import Texts, with_edits_tried
from stablenum.commands.explain.process import Running
from stablenum.diagnosis import Report
from stablenum.diagnosis.checkup.remedies import Remedy, outcome_of, resumed
from stablenum.diagnosis.checkup.report import Checkup
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.watch.plan import Outcome, Plan, again_from

__all__ = ["MOST_RUNS", "Explained", "check_up", "explain", "run_once", "unreproduced"]

# If the step at which the script fails changes from run to run, the last run records every step.
MOST_RUNS = 3


class Explained(NamedTuple):
    """The result of running the script.

    Attributes:
        outcome: the outcome of the first run.
        report: why the script failed; None if nothing was found, or if the process ended abruptly.
        runs: the number of times the script ran.
        checkup: what may be wrong although nothing failed; None if nothing was measured.
        on_rank: the rank on which it failed first, of several; None if there is only one process.
        texts: the files with which another run was finite, before and after the change; None for none.
    """

    outcome: Outcome
    report: Report | None
    runs: int
    checkup: Checkup | None = None
    on_rank: int | None = None
    texts: Texts | None = None


def explain(plan: Plan, say: Callable[[str], object]) -> Explained:
    """Run the script until it fails; if that step was not recorded, run it again and record the step. Then
    run it once more with the remedy, if that is a change of an expression.

    Args:
        plan: what to run; with ``record_from``, there is only one run.
        say: called with messages about the progress.
    """
    begun = time.monotonic()
    found = _explain(plan, say)
    if found.report is None:
        return found
    if plan.record_from is not None:
        return found._replace(report=found.report.untried("--once allows one run"))
    run, took = partial(run_once, shown=False), time.monotonic() - begun
    report, texts = with_edits_tried(plan, found.outcome, found.report, run, say, took=took)
    return found._replace(report=report, texts=texts)


def _explain(plan: Plan, say: Callable[[str], object]) -> Explained:
    """Run the script until the step that fails is recorded."""
    first = run_once(replace(plan, checkup=plan.record_from is None), shown=True)
    if first.failure is None or first.report is not None:
        return Explained(first, _report(first), 1, _checkup(first))
    outcome, runs = first, 1
    while runs < MOST_RUNS and outcome.failure is not None and outcome.report is None:
        last = runs == MOST_RUNS - 1
        begin = again_from(outcome.failure, outcome.optimizers)
        say(f"{outcome.failure}; running the script again to record {'every step' if last else 'that step'}")
        settings = outcome.failure.what == "setting"
        again = replace(plan, record_from=0 if last else begin, again=True, settings=settings)
        outcome = run_once(again, shown=False)
        runs += 1
    if outcome.failure is not None:  # the script failed, but never in a step that was recorded
        return Explained(first, _report(outcome), runs)
    return Explained(first, unreproduced(first, outcome), runs)


def check_up(plan: Plan, say: Callable[[str], object], *, once: bool) -> tuple[Checkup | None, Outcome]:
    """Run the script, and return what its checkup has found; None if nothing was measured. If the cure of the
    first finding can be tried, some steps of the script run once more with it, unless ``once`` is True."""
    outcome = run_once(plan, shown=True)
    report = _checkup(outcome)
    if report is None or outcome.remedy is None or once:
        return report, outcome
    remedy = Remedy.from_dict(outcome.remedy)
    say(f"trying {remedy}, in {remedy.steps} steps of another run of the script")
    trial = run_once(replace(plan, remedy=outcome.remedy, steps=remedy.steps), shown=False)
    # A script that resumes at its end has no loss, and may fail for that.
    failed = trial.lost or trial.troubles or (trial.error and trial.losses)
    doubt = "" if failed else resumed(remedy, outcome.losses, trial.losses, report.steps)
    if doubt:
        return report.with_tried(doubt), outcome
    if trial.troubles or not trial.applied:
        say("the cure could not be applied, so nothing is known about it")
        return report, outcome
    shown = outcome_of(remedy, outcome.losses, trial.losses)
    said = "; ".join(filter(None, (shown.said, trial.sizes)))
    return report.with_refuted(said) if shown.better is False else report.with_tried(said), outcome


def _checkup(outcome: Outcome) -> Checkup | None:
    return None if outcome.checkup is None else Checkup.from_dict(outcome.checkup)


def _report(outcome: Outcome) -> Report | None:
    return None if outcome.report is None else Report.from_dict(outcome.report)


def unreproduced(first: Outcome, second: Outcome) -> Report:
    """Return the report on a failure that did not show in another run."""
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


def run_once(
    plan: Plan, *, shown: bool, environment: Mapping[str, str] | None = None, running: Running | None = None
) -> Outcome:
    """Run the script once, in a separate process.

    Args:
        plan: what to run.
        shown: whether its output is shown.
        environment: variables that it gets besides those of this process.
        running: the process, for those who may have to end it.

    Raises:
        SystemExit: a signal asks this process to end; the script has ended.
    """
    running = running or Running()
    outcome = and_restore(lambda: _outcome(running, plan, environment or {}, shown=shown), running.end)
    running.exit_if_asked()
    return outcome


def _outcome(running: Running, plan: Plan, environment: Mapping[str, str], *, shown: bool) -> Outcome:
    folder = running.begin()
    planned, ended = folder / "plan.json", folder / "outcome.json"
    plan.write(planned)
    command = [sys.executable, "-m", "stablenum.commands.explain.child", str(planned), str(ended)]
    # Without a fixed hash seed, sets of strings have a different order in each process.
    variables = {"PYTHONHASHSEED": str(plan.seed % 2**32), **os.environ, **environment}
    code = running.run(command, variables, None if shown else subprocess.DEVNULL)
    if not ended.exists():
        code = 128 - code if code < 0 else code
        error = f"a sudden exit of its process (exit code {code})"
        return Outcome(exit_code=code or 1, error=error, lost=True)
    outcome = Outcome.from_dict(json.loads(ended.read_text(encoding="utf-8")))
    name = _Names(plan)
    outcome.report = name.within(outcome.report)
    outcome.checkup = name.within(outcome.checkup)
    if outcome.sent is not None:
        outcome.sent = replace(outcome.sent, report=name.within(outcome.sent.report))
    outcome.harmless = name.within(outcome.harmless)
    return outcome


class _Names:
    """Names files as the command line does: Python names the script, and what it imports, by whole paths."""

    def __init__(self, plan: Plan) -> None:
        self._script = None if plan.module else (os.path.abspath(plan.script), plan.script)
        # A path that is part of a longer one is left alone.
        folder = rf"(?<![\w./-]){re.escape(os.getcwd() + os.sep)}"
        self._folder = None if os.path.isabs(plan.script) else re.compile(folder)

    def within(self, part: Any) -> Any:
        """Return plain values with these names."""
        if isinstance(part, dict):
            return {key: self.within(value) for key, value in part.items()}
        if isinstance(part, list):
            return [self.within(value) for value in part]
        return self._named(part) if isinstance(part, str) else part

    def _named(self, text: str) -> str:
        text = text if self._script is None else text.replace(*self._script)
        return text if self._folder is None else self._folder.sub("", text)
