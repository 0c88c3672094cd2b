"""The interface to which a watcher reports what it sees; a failure stops the script."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from stablenum.diagnosis import Cause, Checkup, Report
from stablenum.diagnosis.checkup.course import Course
from stablenum.diagnosis.checkup.remedies import Change, Remedy, remedy_for
from stablenum.diagnosis.checkup.trials import sizes_in
from stablenum.diagnosis.watch.frames import raised_by_a_signal
from stablenum.diagnosis.watch.launch import has_failed, mark_failed
from stablenum.diagnosis.watch.numpy_errors import NumpyErrors
from stablenum.diagnosis.watch.plan import Failure, Outcome, Plan
from stablenum.diagnosis.watch.script_errors import is_about_numbers

__all__ = ["FAILED", "Doubt", "Session", "Stop"]

FAILED = object()  # what a sheltered action returns if it fails
# More doubts than this are kept only if the script has not settled them.
_MANY = 100


class Stop(BaseException):
    """Stops the script at its first failure; ``except Exception`` in the script does not catch it."""


class Doubt(NamedTuple):
    """A value that is not finite, but that training may never use, such as a metric or a printed gradient.

    Attributes:
        failure: what it is if training needed it.
        report: the diagnosis; None if the step was not recorded.
        settled: asked when the script has ended: whether the value did no harm.
    """

    failure: Failure
    report: Report | None
    settled: Callable[[], bool]


# Causes that lie in what an earlier step has left.
_FROM_BEFORE = (Cause.BATCH, Cause.PARAMETERS)


class Session:
    """One run of a script.

    Attributes:
        plan: how the script is run.
        outcome: what has been seen so far.
        on_error: called with an exception that ends the script.
        on_leave: ends the process.
        on_end: called when the script has ended without a doubt that it has not settled.
        on_verdict: called in any case, at the very end.
        numpy: what NumPy has warned of.
        doubts: values that count as failures only if they are not settled when the script has ended.
        ending: held by the thread that concludes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outcome = Outcome()
        self.on_error: list[Callable[[BaseException], None]] = []
        self.on_leave: Callable[[], None] | None = None
        self.on_end: list[Callable[[], object]] = []
        self.on_verdict: list[Callable[[], object]] = []
        self.numpy = NumpyErrors()
        self.doubts: list[Doubt] = []
        self.ending = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether a failure has been found. If the script continues regardless, it is no longer watched."""
        return self.outcome.failure is not None

    def ignores(self, *names: str) -> bool:
        """Return whether the user asked not to judge one of these names, or what a running function makes."""
        ignored = self.plan.ignore
        if not ignored:
            return False
        if any(name in ignored for name in names):
            return True
        frame = sys._getframe(1)
        while frame.f_back is not None:
            if frame.f_code.co_name in ignored:
                return True
            frame = frame.f_back
        return False

    def sheltered(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the action of a watcher returns; :data:`FAILED` if it fails.

        An error of the watcher itself is noted, and the script goes on. What a signal handler of the script
        raises meanwhile is the script's.
        """
        try:
            return action(*args, **kwargs)
        except Exception as error:
            if raised_by_a_signal(error):
                raise
            name = getattr(action, "__name__", type(action).__name__)
            self.outcome.note_trouble(name, f"{type(error).__name__}: {error}")
            return FAILED

    def doubt(self, doubt: Doubt) -> None:
        """Keep a doubt until the script has ended, unless nothing may be passed by."""
        if self.plan.strict:
            self.found(doubt.failure, doubt.report)
        self.doubts.append(doubt)
        if len(self.doubts) % _MANY == 0:
            earlier, self.doubts = self.doubts, []
            for one in earlier:
                (self._pass_by if one.settled() else self.doubts.append)(one)

    def give_up(self, doubt: Doubt) -> NoReturn:
        """Stop the script, of which too much is in doubt, at the first doubt that it has not settled."""
        first = next((d for d in self.doubts if not d.settled()), doubt)
        self.found(first.failure, first.report)

    def _pass_by(self, doubt: Doubt) -> None:
        """Note the first doubt that the script has settled."""
        place = "" if doubt.report is None else f" ({str(doubt.report).splitlines()[0]})"
        self.outcome.harmless = self.outcome.harmless or f"{doubt.failure}{place}"

    def conclude(self) -> None:
        """Record the first doubt that the script has not settled, because the script has ended."""
        self._conclude()
        for told in self.on_verdict:
            self.sheltered(told)

    def _conclude(self) -> None:
        for doubt in [] if self.over else self.doubts:
            if self.sheltered(doubt.settled) is not False:
                self._pass_by(doubt)
            else:
                self._record(doubt.failure, doubt.report)
                return
        if not self.over and is_about_numbers(self.outcome.error):
            self._blame_passed_by()
            if not self.over:
                self._blame_numpy()
        for end in self.on_end:
            self.sheltered(end)

    @property
    def remedy(self) -> Remedy | None:
        """The change to the training that this run tries; None if it tries none."""
        return None if self.plan.remedy is None else Remedy.from_dict(self.plan.remedy)

    def judge(self, course: Course, changes: Collection[Change]) -> None:
        """Record what a checkup has found in a training, or what a trial has shown.

        Args:
            course: the training.
            changes: what the watcher can try.
        """
        outcome = self.outcome
        outcome.losses = course.values
        if self.plan.remedy is not None:
            drawn = self.remedy is not None and self.remedy.measured and course.probes
            outcome.sizes = sizes_in(course.probes[0]) if drawn else ""
            return
        report = Checkup.of(course)
        outcome.checkup = report.to_dict()
        found = remedy_for(report.complaints, course)
        if found is not None and found.change in changes:
            outcome.remedy = found.to_dict()

    def note_applied(self) -> None:
        """Note that the change that is tried was made."""
        self.outcome.applied = True

    def leave(self) -> None:
        """Write the outcome and end the process, because the script caught :class:`Stop` and trains on."""
        if self.on_leave is not None:
            self.on_leave()

    def stop(self) -> NoReturn:
        """Stop the script, because enough of it has been seen."""
        raise Stop

    def found(self, failure: Failure, report: Report | None = None) -> NoReturn:
        """Record the first failure, with its report if the step was recorded, and stop the script."""
        self._record(failure, report)
        raise Stop

    def _blame_passed_by(self) -> None:
        """Record what was passed by, because the script has failed over such a number: the last that was not
        bad before, or else the last."""
        explained = [d for d in reversed(self.doubts) if d.report is not None]
        made = [d for d in explained if d.report is not None and d.report.verdict.cause not in _FROM_BEFORE]
        for doubt in [*made, *explained][:1]:
            self._record(doubt.failure, doubt.report)
            self.outcome.harmless = ""

    def _blame_numpy(self) -> None:
        """Record NumPy's first warning as the failure: no framework has seen what the script fails with."""
        report = self.numpy.report(next(iter(self.outcome.watched), "torch"))
        if report is not None:
            name = self.outcome.error.partition(":")[0]
            self.outcome.failure = Failure(step=self.outcome.steps, what="error", names=(name,))
            self.outcome.report = report.to_dict()

    def mark_failed(self) -> None:
        """Note that this process fails, before it leaves others that train with it."""
        if self.plan.marks:
            mark_failed(Path(self.plan.marks), self.plan.rank)

    def is_left_alone(self, within: float = 2.0) -> bool:
        """Return whether another process has failed that trains with this one, or fails within so many
        seconds: the command notes it a little after such a process has died."""
        if not self.plan.marks:
            return False
        until = time.monotonic() + within
        while not has_failed(Path(self.plan.marks), but=self.plan.rank):
            if time.monotonic() >= until:
                return False
            time.sleep(0.1)
        return True

    def _record(self, failure: Failure, report: Report | None) -> None:
        self.mark_failed()
        self.outcome.failure = failure
        self.outcome.report = None if report is None else self.numpy.placed(report).to_dict()
