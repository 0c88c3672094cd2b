"""Mend one side of a comparison: propose rewrites of its source, try each, and keep those that help."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from linecache import getline
from typing import Any, NamedTuple

from stablenum.diagnosis.diff.differences import Difference, Location
from stablenum.diagnosis.diff.mending.amounts import ARITHMETIC
from stablenum.diagnosis.diff.mending.built import Built
from stablenum.diagnosis.diff.mending.clues import Clues, clues_of
from stablenum.diagnosis.diff.mending.names import Names, names_seen
from stablenum.diagnosis.diff.mending.proposals import lines_of, proposals
from stablenum.diagnosis.diff.mending.trials import NOT_RUN, Trial, Trials
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.report.report import DiffReport
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.diff.weights.given import Weights
from stablenum.diagnosis.edits.fix import Rewrite, texts_after
from stablenum.diagnosis.replay.trace import Step
from stablenum.errors import ProgramError

__all__ = ["Mended", "Mending", "mended"]

# After the changes for all differences of a report, programs are compared again, so often. Chosen: a report
# names nearly all differences at first.
_MOST_ROUNDS = 3
# A change that helps makes so many more values equal than it makes unequal: some are equal by chance, such as
# those that hold the signs of gradients. Chosen, not measured.
_LOST = 4
# A change may make a loop that does not end. Chosen: far above what a trial takes.
_MOST_SECONDS = 60.0


class Mended(NamedTuple):
    """A change that helps, and the difference that it mends."""

    rewrite: Rewrite
    difference: Difference


@dataclass(slots=True)
class Mending:
    """What was tried.

    Attributes:
        mended: the changes that help, in the order in which they are made.
        likely: changes with which the programs agree at their own weights, but not at others.
        agrees: whether the programs agree with all changes.
        tried: how many changes were tried.
        ended: why not all were; "" if they were.
    """

    mended: list[Mended] = field(default_factory=list)
    likely: list[Mended] = field(default_factory=list)
    agrees: bool = False
    tried: int = 0
    ended: str = ""

    @property
    def rewrites(self) -> list[Rewrite]:
        """The changes that help."""
        return [m.rewrite for m in self.mended]


def mended(
    found: tuple[DiffReport, Comparison],
    weights: Weights,
    texts: Mapping[str, str],
    build: Callable[[Mapping[str, str]], Built],
    again: Callable[[Mapping[str, str]], tuple[DiffReport, Comparison]],
    *,
    seconds: float,
    say: Callable[[str], object],
) -> Mending:
    """Return the changes of the right side's source after which it agrees with the left one, as far as they
    are found: those of the first difference first.

    Args:
        found: the report and the comparison of the two programs.
        weights: as in ``stablenum.diff``.
        texts: the source of each file that may be changed.
        build: makes the right program from changed sources, given by file; whatever it raises ends a trial.
        again: compares the left program with the right one as it is made from changed sources.
        seconds: for so long, changes are tried for one difference.
        say: called with messages about the progress.
    """
    mending = Mending()
    with names_seen(texts.keys()) as names:
        made = build({})
        unchanged = Trials(found[1], weights).unchanged(made.program)
    if not unchanged:
        mending.ended = "the program is different each time it is made: give its random numbers a seed"
        return mending
    namespace = made.namespace
    for _ in range(_MOST_ROUNDS):
        before = len(mending.mended)
        _round(mending, found, weights, texts, build, namespace, names, seconds, say)
        if mending.agrees or len(mending.mended) == before or mending.ended:
            break
        say("comparing the programs again")
        found = again(texts_after(mending.rewrites))
        if found[0].ok:
            mending.agrees = True
            break
    return mending


def _round(
    mending: Mending,
    found: tuple[DiffReport, Comparison],
    weights: Weights,
    texts: Mapping[str, str],
    build: Callable[[Mapping[str, str]], Built],
    namespace: Mapping[str, Any],
    names: Names,
    seconds: float,
    say: Callable[[str], object],
) -> None:
    """Try changes for each difference of a report."""
    report, comparison = found
    trials = Trials(comparison, weights)
    shared, differing = trials.shared, trials.differing
    end = time.monotonic() + seconds
    for number, difference in enumerate(report.differences, 1):
        best: tuple[int, Mended, Trial] | None = None
        targets = _targets(comparison, difference)
        clues = _clues(comparison, difference, namespace)
        last = number == len(report.differences)
        current = {**texts, **texts_after(mending.rewrites)}
        further = _more_lines(comparison, report, difference)
        for rewrite in proposals(difference, "right", current, clues, further, names):
            if time.monotonic() > end:
                mending.ended = "the time for it ran out"
                break
            mending.tried += 1
            say(f"difference {number}: trying {_shown(rewrite)}")
            changed = texts_after([*mending.rewrites, rewrite])
            trial = _tried(trials, build, changed, targets - shared)
            if trial is None:
                continue
            new = Mended(rewrite, difference)
            if trial.agrees and (trial.elsewhere or trials.recorded):
                mending.mended.append(new)
                mending.agrees = True
                return
            if trial.agrees:
                mending.likely.append(new)
                continue
            gained, lost = len(trial.shared - shared), len(shared - trial.shared)
            meets = bool(targets & trial.shared - shared)
            if gained > _LOST * lost and (meets or trial.differing < differing):
                best = max(filter(None, (best, (gained, new, trial))), key=lambda row: row[0])
                if not last:
                    break
        if best is not None:
            mending.mended.append(best[1])
            end = time.monotonic() + seconds  # for the next difference
            shared, differing = best[2].shared, best[2].differing
        if mending.ended:
            return


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, where that can be: in the main thread, and not on Windows."""
    alarm = getattr(signal, "SIGALRM", None)
    if alarm is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(alarm, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(alarm, before)


def _tried(
    trials: Trials,
    build: Callable[[Mapping[str, str]], Built],
    texts: Mapping[str, str],
    targets: frozenset[int],
) -> Trial | None:
    """Return what the changed texts give; None if they are no program, or one that is not nearer."""
    try:
        with time_limit(_MOST_SECONDS):
            program = build(texts).program
    except (Exception, SystemExit):  # noqa: BLE001  a change may break a program in any way
        return None
    try:
        with time_limit(_MOST_SECONDS):
            return trials.of(program, targets)
    except _NOT_COMPARED:
        return None


# What a program raises that runs otherwise, and a comparison of results that do not correspond.
_NOT_COMPARED = (ProgramError, TimeoutError, *NOT_RUN)


def _more_lines(comparison: Comparison, report: DiffReport, difference: Difference) -> list[str]:
    """Return further lines of the right side that lead to a difference: those that call its line, or if it
    names none, those of what has no counterpart."""
    place, steps = difference.right, comparison.right.trace.steps
    if place is not None and place.row is not None and place.row < len(steps):
        return [f"{frame.file}:{frame.line}" for frame in reversed(steps[place.row].frames)]
    rows = (row for row in report.right_rows if row.state in ("different", "follows", "unmatched"))
    return [row.where for row in rows] if place is None else []


def _shown(rewrite: Rewrite) -> str:
    old, new = (" ".join(text.split()) for text in (rewrite.old, rewrite.new))
    return f"line {rewrite.line}: {old} -> {new}"


def _targets(comparison: Comparison, difference: Difference) -> frozenset[int]:
    """Return the left values that a mended program has, too: those that the line makes from where it differs;
    none if the left side lacks the operation."""
    side = comparison.left
    return frozenset(v for s in _line(side, difference.left) for v in s.outputs if not side.neutral(v))


def _line(side: Side, place: Location | None) -> list[Step]:
    """Return the steps of a line from where it differs; none if a side lacks the operation."""
    if place is None or place.operation is None or place.row is None or place.row >= len(side.trace.steps):
        return []
    step = side.trace.steps[place.row]
    line = [s for s in side.trace.steps[place.row :] if s is step or (s.place and s.place == step.place)]
    return [s for s in line if s.phase == step.phase]


def _operands(side: Side, place: Location | None) -> list[tuple[str, float]]:
    """Return what a line does with numbers: the operation, and the number."""
    found = list[tuple[str, float]]()
    for step in _line(side, place):
        numbers = [*step.scalars]
        for i in step.inputs:
            made = side.trace.values[i]
            if made.producer is None and made.role == "constant" and side.prints[i].entries == 1:
                numbers.append(side.prints[i].total)
        found += [(step.operation, n) for n in numbers if step.operation in ARITHMETIC and n not in (0, 1)]
    return found


def _clues(comparison: Comparison, difference: Difference, namespace: Mapping[str, Any]) -> Clues:
    cause = difference.causes[0] if difference.causes else None
    written = tuple(s.program.written(s.steps) for s in (comparison.right, comparison.left))
    lines = [getline(f, n) for f, some in lines_of(difference, "left").items() for n in some]
    place = difference.left
    return clues_of(
        "" if cause is None else cause.code,
        None if cause is None or cause.numbers is None else cause.numbers[::-1],
        (written[0], written[1]),
        _with_codes(lines, difference),
        None if place is None else place.operation,
        _operands(comparison.left, place),
        namespace,
        comparison.right.program.framework,
    )


def _with_codes(lines: Sequence[str], difference: Difference) -> list[str]:
    codes = [] if difference.left is None else [difference.left.code]
    return [*dict.fromkeys([*codes, *(line.strip() for line in lines)])]
