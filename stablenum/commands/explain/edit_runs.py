"""Try the safe function of a report in another run of the script, whose source is edited in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stablenum.commands.explain.process import Running
from stablenum.diagnosis import Report
from stablenum.diagnosis.edits import Edit
from stablenum.diagnosis.edits.safe_forms import edits_for
from stablenum.diagnosis.replay.causes import NOTHING_TO_TRY
from stablenum.diagnosis.watch.edit_trials import steps_of_trial, tried
from stablenum.diagnosis.watch.plan import Outcome, Plan

__all__ = ["with_edits_tried"]

# Each trial is a run of the script.
_MOST_TRIALS = 2


# A trial may take this much longer, and hold this much more memory, than the runs before it: a loop that
# ended at a NaN may not end without it. Chosen, not measured; imports alone take seconds.
_TIMES_AS_LONG, _MORE_SECONDS = 3, 60.0
_MORE_MEMORY = 2 * 2**30
_POLL = 0.5


def with_edits_tried(
    plan: Plan,
    first: Outcome,
    report: Report,
    run: Callable[..., Outcome],
    say: Callable[[str], object],
    *,
    took: float,
) -> Report:
    """Return the report with an edit that helps, and what its trial has shown; if none does, with the reason
    for which nothing is offered.

    Args:
        plan: how the script is run.
        first: its first run.
        report: why it failed.
        run: runs the script, in a process that is given as ``running``.
        say: called with messages about the progress.
        took: how many seconds the runs so far have taken.
    """
    if report.ok or first.failure is None or not report.findings:
        return report
    edits, why = _proposed(report)
    if not edits:
        return report.untried(why) if why else report
    seen = list[str]()
    for edit, source in edits[:_MOST_TRIALS]:
        steps, new = steps_of_trial(first.failure.step), " ".join(edit.after.split())
        say(f"trying {new} in line {edit.span[0]}, in at most {steps} steps of another run")
        planned = replace(plan, edits=(edit.to_dict(),), steps=steps, checkup=True)
        trial = _limited(planned, run, _TIMES_AS_LONG * took + _MORE_SECONDS)
        result = tried(first, trial)
        if result.helps:
            return report.with_trial(f"tried: with this change {result.said}", patch=edit.shown(source))
        seen.append(f"with {new}, {result.said}")
    return report.without_function().with_trial(f"not tried; the safe form was, in vain: {'; '.join(seen)}")


def _limited(plan: Plan, run: Callable[..., Outcome], seconds: float) -> Outcome:
    """Run the script, and end it if it takes longer, or much more memory than the runs before it."""
    running, over = Running(), threading.Event()
    begun, before, why = time.monotonic(), _most_memory(), list[str]()

    def watch() -> None:
        while not over.wait(_POLL):
            if time.monotonic() > begun + seconds:
                why.append(f"the script did not get there in {seconds:.0f} s")
            elif running.memory > before + _MORE_MEMORY:
                why.append(f"the script took {(running.memory - before) / 2**30:.1f} GiB more memory")
            if why:
                running.stop()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        outcome = run(plan, running=running)
    finally:
        over.set()
    return replace(outcome, lost=True, error=why[0]) if why else outcome


def _most_memory() -> int:
    """Return the most memory in bytes that a run has held so far; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def _proposed(report: Report) -> tuple[list[tuple[Edit, str]], str]:
    """Return edits with the text of their file, or why there is none; neither if nothing is to be tried."""
    if report.verdict.cause in NOTHING_TO_TRY:
        return [], ""
    finding = report.findings[0]
    if finding.place is None:
        return [], "no line of yours is known for it"
    if finding.library:
        return [], f"the operation is inside {finding.library}, whose source is left alone"
    if not report.verdict.code:
        return [], "it is not a change of one expression"
    try:
        source = Path(finding.place.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return [], f"{finding.place.file} cannot be read"
    found = edits_for(finding, report.verdict, source)
    return [(edit, source) for edit in found], "" if found else (
        f"line {finding.place.line} does not show what the function would be given"
    )
