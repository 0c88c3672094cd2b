"""Try the safe function of a report in another run of the script, whose source is edited in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from stablenum.commands.explain.process import Running
from stablenum.diagnosis import Report
from stablenum.diagnosis.edits import Edit
from stablenum.diagnosis.edits.bounds import bounded
from stablenum.diagnosis.edits.edit import StaleEditError
from stablenum.diagnosis.edits.files import readable
from stablenum.diagnosis.edits.fix import Fix, patch_of
from stablenum.diagnosis.edits.safe_forms import edits_for
from stablenum.diagnosis.edits.written import written
from stablenum.diagnosis.replay.causes import NOTHING_TO_TRY
from stablenum.diagnosis.watch.edit_trials import Tried, steps_of_trial, tried
from stablenum.diagnosis.watch.plan import Outcome, Plan, again_from

__all__ = ["Texts", "with_edits_tried"]

# Each trial is a run of the script. Of the planted failures, none needs more than two changes.
_MOST_TRIALS, _MOST_EDITS = 2, 3

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
) -> tuple[Report, Texts | None]:
    """Return the report with an edit that helps, and what its trial has shown; if none does, with the reason
    for which nothing is offered. If the script then fails in another place, an edit of that place is tried
    together with the first. Return also the texts that the edits change, if
    these are of files that may be changed.

    Args:
        plan: how the script is run.
        first: its first run.
        report: why it failed.
        run: runs the script, in a process that is given as ``running``.
        say: called with messages about the progress.
        took: how many seconds the runs so far have taken.
    """
    if report.ok or first.failure is None or not report.findings:
        return report, None
    edits, why = _proposed(report, ())
    if not edits:
        return (report.untried(why) if why else report), None
    trials, seen = _Trials(plan, first, run, say, _TIMES_AS_LONG * took + _MORE_SECONDS), list[str]()
    for edit in edits[:_MOST_TRIALS]:
        result, applied = trials.of((edit,))
        if result.helps:
            changes = "this change" if len(applied) == 1 else f"these {len(applied)} changes"
            said = f"tried: with {changes} {result.said}"
            tried, texts = report.with_trial(said, patch=_shown(applied)), _texts(plan, applied)
            if texts is None:
                return tried, None
            return replace(tried, fixes=(_fix(report, applied, result, texts),)), texts
        seen.append(f"with {_in_one_line(edit)}, {result.said}")
    vain = "; ".join(seen)
    vainly = report.without_function()
    return vainly.with_trial(f"not tried; a change of the line was, without success: {vain}"), None


def _fix(report: Report, edits: tuple[Edit, ...], result: Tried, texts: Texts) -> Fix:
    """Return edits that help as a fix."""
    changes = [
        f"{Path(e.file).name}:{e.span[0]}: {' '.join(e.before.split())} becomes {_in_one_line(e)}"
        for e in edits
    ]
    return Fix(
        patch=patch_of(texts.before, texts.after),
        explanation=f"{'; '.join(changes)} ({report.verdict.cause.value})",
        proven=result.proven,
        evidence=f"In another run of the script, {result.said}.",
    )


class Texts(NamedTuple):
    """The text of each file that edits change, by its path, before and after."""

    before: dict[str, str]
    after: dict[str, str]


def _texts(plan: Plan, edits: Sequence[Edit]) -> Texts | None:
    """Return the texts that edits change; None if one of the files lies outside the folder of the script, or
    behind a link, or is not the one that was run."""
    folder = Path.cwd() if plan.module else Path(plan.script).resolve().parent
    files = dict.fromkeys(e.file for e in edits)
    before = {file: text for file in files if (text := readable(Path(file), folder)) is not None}
    if len(before) < len(files):
        return None
    try:
        after = {file: written(before[file], [e for e in edits if e.file == file]) for file in files}
    except StaleEditError:
        return None
    paths = {file: str(Path(file).resolve()) for file in files}
    return Texts({paths[f]: before[f] for f in files}, {paths[f]: after[f] for f in files})


class _Trials:
    """Runs of the script with edits."""

    def __init__(
        self,
        plan: Plan,
        first: Outcome,
        run: Callable[..., Outcome],
        say: Callable[[str], object],
        seconds: float,
    ) -> None:
        assert first.failure is not None
        self._plan, self._first, self._run, self._say, self._seconds = plan, first, run, say, seconds
        self._steps = steps_of_trial(first.failure.step)

    def of(self, edits: tuple[Edit, ...]) -> tuple[Tried, tuple[Edit, ...]]:
        """Return what edits lead to, alone or with one more where the script then fails, and all of them."""
        where = f"{_in_one_line(edits[-1])} in line {edits[-1].span[0]}"
        self._say(f"trying {where}, in at most {self._steps} steps of another run")
        plan = replace(self._plan, edits=tuple(e.to_dict() for e in edits), steps=self._steps, checkup=True)
        trial = _limited(plan, self._run, self._seconds)
        result = tried(self._first, trial)
        if trial.failure is not None and not trial.lost and len(edits) < _MOST_EDITS:
            further = self._further(plan, trial, edits)
            if further is not None:
                with_it, applied = self.of((*edits, further))
                if with_it.helps:
                    return with_it, applied
        return result, edits

    def _further(self, plan: Plan, trial: Outcome, edits: tuple[Edit, ...]) -> Edit | None:
        """Return an edit of the place where the script fails with these edits."""
        if trial.report is None and trial.failure is not None:
            begin = again_from(trial.failure, trial.optimizers)
            trial = _limited(
                replace(plan, record_from=begin, again=True, checkup=False), self._run, self._seconds
            )
        report = Report.from_dict(trial.report) if trial.report is not None else None
        found = [] if report is None or report.ok or not report.findings else _proposed(report, edits)[0]
        known = {_in_one_line(edit) for edit in edits}
        return next((edit for edit in found if _in_one_line(edit) not in known), None)


def _in_one_line(edit: Edit) -> str:
    return " ".join(edit.after.split())


def _shown(edits: tuple[Edit, ...]) -> tuple[str, ...]:
    """Return the lines of edits as in a patch; of a line, what it was and what all edits make of it."""
    imports, changes = list[str](), dict[tuple[str, int, int], list[tuple[str, ...]]]()
    for i, edit in enumerate(edits):
        shown = edit.shown(_source(edit.file, edits[:i]))
        imports += [line for line in shown if line.startswith("+ import ")]
        lines = tuple(line for line in shown if not line.startswith("+ import "))
        changes.setdefault((edit.file, *edit.span[:2]), []).append(lines)
    parts = list(dict.fromkeys(imports))
    for _, shown_lines in sorted(changes.items()):
        parts += [line for line in shown_lines[0] if line.startswith("- ")]
        parts += [line for line in shown_lines[-1] if line.startswith("+ ")]
    return tuple(parts)


def _source(file: str, edits: Sequence[Edit]) -> str:
    """Return the text of a file with the edits that are for it."""
    text = Path(file).read_text(encoding="utf-8")
    for edit in edits:
        text = edit.applied(text) if edit.file == file else text
    return text


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


def _proposed(report: Report, edits: Sequence[Edit]) -> tuple[list[Edit], str]:
    """Return edits of the place where a script with these edits fails, or why there is none; neither if
    nothing is to be tried."""
    if report.verdict.cause in NOTHING_TO_TRY:
        return [], ""
    finding = report.findings[0]
    if finding.place is None:
        return [], "no line of yours is known for it"
    if finding.library:
        return [], f"the operation is inside {finding.library}, whose source is left alone"
    try:
        source = _source(finding.place.file, edits)
    except (OSError, UnicodeDecodeError):
        return [], f"{finding.place.file} cannot be read"
    found = edits_for(finding, report.verdict, source)
    if found:
        return found, ""
    found = bounded(finding, report.evidence.framework, source)
    if found or report.verdict.code:
        return (
            found,
            "" if found else f"line {finding.place.line} does not show what the function would be given",
        )
    return [], "it is not a change of one expression"
