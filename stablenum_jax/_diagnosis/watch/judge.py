"""Judges the results of calls, replays those that are not finite, and says what settles the doubt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from stablenum.diagnosis import Cause, Report
from stablenum.diagnosis.replay.growth import Growth
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.watch.courses import GOOD, Course
from stablenum.diagnosis.watch.frames import raised_by_a_signal
from stablenum.diagnosis.watch.plan import Failure
from stablenum.diagnosis.watch.script_errors import last_line
from stablenum.diagnosis.watch.session import Doubt, Session
from stablenum_jax._diagnosis.replay.processes import spans_in
from stablenum_jax._diagnosis.watch.adoption import Adoption, matters
from stablenum_jax._diagnosis.watch.calls import Call
from stablenum_jax._diagnosis.watch.origins import Origins
from stablenum_jax._diagnosis.watch.programs import Program
from stablenum_jax._diagnosis.watch.results import Suspicion, floating_leaves, metrics_among, named, suspicion
from stablenum_jax._diagnosis.watch.sizes import carried, sizes_of
from stablenum_jax._diagnosis.watch.trees import Tree

__all__ = ["Judge"]


_UNSEEN = "a guard skipped this call, but what it measured cannot be seen among the call's results"


class Judge:
    """Judges the calls of a script.

    Attributes:
        replaying: whether a replay is running, whose calls are not the script's.
        marking: whether our own trace looks for what depends on losses and gradients.
        differentiating: the keys of the functions that differentiate.
    """

    def __init__(self, session: Session, origins: Origins) -> None:
        self._session, self._origins = session, origins
        self.replaying = self.marking = False
        self.differentiating: set[Any] = set()
        self._courses: defaultdict[Any, Course] = defaultdict(Course)
        self._trained = 0  # the number of finite results of functions that differentiate
        self._growth: defaultdict[str, Growth] = defaultdict(partial(Growth, unit="call"))  # by name
        self._adoption: Adoption | None = None  # of the last result of which only the loss was bad
        self._metrics: list[tuple[Any, Doubt]] = []  # those that are not finite

    def note_growth(self, call: Call) -> None:
        """Note how large the arguments of a call are, and whether it goes on with those of a bad loss."""
        if self._adoption is not None:
            self._adoption.look(call)
        self._growth[call.name].note(self._session.outcome.calls, sizes_of(call.given))

    def judge(self, call: Call, result: Tree) -> None:
        """Judge the result of a call, and doubt what is not finite in it."""
        program = call.program
        trains = program is None or call.judged is not None or call.key in self.differentiating
        seen = result if call.judged is None else Tree(call.judged(result.value))
        found = suspicion(seen, call.given, derivative=call.is_derivative)
        entries = len(floating_leaves(seen))
        if found and program is not None and call.judged is None:
            found, call = self.apart(found, call, program, result.value)
            entries -= len(program.metrics)
        if not found and entries:
            self._courses[call.key].note_good()
            self._trained += trains
        if not found or (program is not None and program.patience <= 0):
            return
        trains = trains or found.skipped
        sound = self.explain(
            call, known_bad=found.known_bad, trains=trains, result=result.value, skipped=found.skipped
        )
        if program is not None:
            program.patience -= sound

    # --- metrics ---------------------------------------------------------------------------------

    def apart(self, found: Suspicion, call: Call, program: Program, result: Any) -> tuple[Suspicion, Call]:
        """Return what is left without entries that the user ignores and without metrics, and the call whose
        replay leaves them out, too.

        A metric is an entry without derivative. It is in doubt until it is clear that nothing needs it.
        """
        ignored = named(result, self._session.plan.ignore)
        new = found.positions - ignored - program.metrics
        metrics = self.metrics_of(call, program, new) if new else new
        left = found.leaving_out(ignored | program.metrics | metrics)
        if metrics and not left:
            self.doubt_metrics(call, metrics, result)
        program.metrics |= metrics
        again = partial(program.replay, call.args, call.kwargs, ignored | program.metrics)
        return left, replace(call, replay=again)

    def metrics_of(self, call: Call, program: Program, positions: frozenset[int]) -> frozenset[int]:
        """Return those entries of a jitted function's result that training does not need."""
        self.marking = True
        try:
            return metrics_among(*program.bound(call.args, call.kwargs), positions)
        finally:
            self.marking = False

    def doubt_metrics(self, call: Call, metrics: frozenset[int], result: Any) -> None:
        """Explain metrics that are not finite, in case that something needs them after all."""
        report = self.report(call, known_bad=False)
        if report.ok:
            return
        doubt = Doubt(
            self.failure_of(call), report, lambda: any(course.good for course in self._courses.values())
        )
        leaves = jax.tree.leaves(result)
        self._metrics += [(leaves[i], doubt) for i in sorted(metrics)]
        self._session.doubt(doubt)

    # --- everything else -------------------------------------------------------------------------

    def explain(
        self,
        call: Call,
        *,
        known_bad: bool,
        raises: bool = False,
        trains: bool = True,
        result: Any = None,
        skipped: bool = False,
    ) -> bool:
        """Explain a call and doubt its result; return whether the replay found nothing wrong.

        Raises:
            Stop: there were too many bad results in a row.
        """
        course = self._courses[call.key]
        if not course.begins_badly():
            if course.hopeless and course.doubt is not None:
                self._session.give_up(course.doubt)
            return False
        report = self.report(call, known_bad=known_bad)
        if skipped and report.verdict.cause is Cause.TRANSIENT:  # no run disagrees: the replay saw too little
            evidence = replace(report.evidence, reproduced=None, differences=(), unjudged=_UNSEEN)
            report = Report.of(evidence, notes=report.notes, seconds=report.seconds)
        # A loss scale that is too high comes down by itself.
        if report.ok or report.verdict.cause is Cause.LOSS_SCALE:
            course.bad = 0
            return report.ok
        adoption = None
        if trains and result is not None and matters(call, report):
            self._adoption = adoption = Adoption(call, result)
        failure, report = self.first_cause(call, self.with_growth(call, report, result))
        settled = self.settled_by(course, adoption, raises=raises, trains=trains)
        course.doubt = Doubt(failure, report, settled)
        self._session.doubt(course.doubt)
        return False

    def report(self, call: Call, *, known_bad: bool) -> Report:
        """Return the report on a call."""
        return self.reported(call.name, lambda: call.replay(known_bad=known_bad))

    def reported(self, name: str, replay: Callable[[], Report]) -> Report:
        """Return the report of a replay, whose calls are not watched."""
        self.replaying = True
        try:
            return replay()
        except Exception as error:  # the failure is reported even without a replay
            if raised_by_a_signal(error):
                raise
            why = f"the replay of {name} failed with {last_line(error)}"
            return Report.of(Evidence(framework="jax", unreplayed=why))
        finally:
            self.replaying = False

    def with_growth(self, call: Call, report: Report, result: Any) -> Report:
        """Return the report, which says so if parameters had exploded before the call."""
        parameters = carried(call.args, result)

        def counts(name: str) -> bool:
            return not parameters or not name.startswith("args") or name.startswith(parameters)

        exploded = self._growth[call.name].explosion(counts)
        if not exploded:
            return report
        evidence = replace(report.evidence, exploded=exploded)
        return Report.of(evidence, notes=report.notes, seconds=report.seconds)

    def first_cause(self, call: Call, report: Report) -> tuple[Failure, Report]:
        """Return the failure and its report: those of an earlier call or operation if it made a bad input of
        this one."""
        brought = report.verdict.cause in (Cause.BATCH, Cause.PARAMETERS)
        earlier = self._origins.doubted_in((call.args, call.kwargs), infinite=brought)
        if earlier is not None:
            return earlier.failure, earlier.report or report
        if report.verdict.cause is Cause.BATCH:
            report = self._origins.placed(report, (call.args, call.kwargs))
        read = report.findings[0].outputs if report.verdict.cause is Cause.BATCH else ()
        for metric, doubt in self._metrics if read else ():
            if (metric.shape, metric.dtype.name) == (read[0].shape, read[0].dtype):
                return doubt.failure, doubt.report or report
        return self.failure_of(call), report

    def failure_of(self, call: Call) -> Failure:
        """Return the failure of the call, which has just ended."""
        step = max(0, self._session.outcome.calls - 1)
        # All processes replay a step whose arrays span them, and find the same.
        elsewhere = jax.process_index() > 0 and spans_in((call.args, call.kwargs))
        return Failure(
            step=step,
            what="output",
            names=(call.name,),
            unit="call",
            reporter="process 0" if elsewhere else "",
        )

    def settled_by(
        self, course: Course, adoption: Adoption | None, *, raises: bool, trains: bool
    ) -> Callable[[], bool]:
        """Return what tells whether the script copes with a bad result, or with the error that it brings."""
        at, trained = course.good, self._trained

        def settled() -> bool:
            if adoption is not None and adoption.seen:  # the script went on as if the loss had been finite
                return False
            ended_well = self._session.outcome.exit_code == 0
            if ended_well and (raises or (not trains and self._trained >= GOOD)):
                return True
            if not trains and self._trained >= trained + GOOD:
                return True
            return course.recovered(at, others=self._trained - trained)

        return settled
