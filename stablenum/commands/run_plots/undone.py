"""The steps of a run that were undone because it went back: how many, which of them are shown, and why."""

from __future__ import annotations

from collections.abc import Sequence

from stablenum.guard.reasons import APPLIED
from stablenum.runlog.lines import Rewind
from stablenum.runlog.reading import Run, Undone

__all__ = ["one_at_each_step", "rewind_sentence", "skipped_undone", "undone_phrases"]


def undone_phrases(run: Run) -> list[str]:
    """Return a phrase for each way in which steps of the run were undone; none if there are no such steps."""
    ways = (("a rewind", False), ("a restart", True))
    of_ways = [(way, [step for step in run.undone if step.restarted == how]) for way, how in ways]
    return [_phrase(way, steps) for way, steps in of_ways if steps]


def _phrase(way: str, steps: Sequence[Undone]) -> str:
    skipped = len(_skipped(steps))
    counted = f"{len(steps):,} step{'' if len(steps) == 1 else 's'} undone by {way}"
    return f"{counted}, of which {skipped:,} {'was' if skipped == 1 else 'were'} skipped"


def rewind_sentence(rewind: Rewind) -> str:
    """Return from where to where the run went back, why, and what was done."""
    return f"back from step {rewind.last:,} to step {rewind.first:,}: {rewind.seen}. {rewind.done}"


def skipped_undone(run: Run) -> list[Undone]:
    """Return the steps that were skipped, and then undone."""
    return _skipped(run.undone)


def _skipped(steps: Sequence[Undone]) -> list[Undone]:
    return [step for step in steps if step.reason not in APPLIED]


def one_at_each_step(run: Run) -> list[Undone]:
    """Return the undone steps by their numbers; of several with one number the last, skipped ones first."""
    chosen: dict[int, Undone] = {}
    for step in (*run.undone, *skipped_undone(run)):
        chosen[step.step] = step
    return [chosen[number] for number in sorted(chosen)]
