"""Whether a run recovered: compared with the clean run."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.recovery.runs import STEPS
from benchmarks.recovery.ways import Outcome

__all__ = ["LAST", "WITHIN", "last_mean", "shown_after", "verdict"]

WITHIN = 1.02  # of the clean run's final loss
LAST = 50  # steps whose mean loss is stated as well
STANDS_OUT = 1.1  # a mean loss above this many times the clean run's
MEAN_OF = 5


def verdict(outcome: Outcome, clean: Outcome, same_data: Outcome | None = None) -> dict[str, Any]:
    """What the table says of a run.

    A run has recovered if it made all its steps, all of its state is finite, and its final loss on the
    held-out part is at most 2 % above the clean run's. A run that left data out has read others than the
    clean run, which may be better ones; so its loss must also be at most 2 % above that of a clean run on the
    data that it has read.

    Args:
        outcome: the run.
        clean: the run without a fault and without protection.
        same_data: the clean run on the data in the past of the run's final state, if they are others.

    Returns:
        Plain values, of which ``lost`` is the number of steps that were made and are not in the final state,
        because they were skipped or undone.
    """
    final, reference = outcome.run.evaluate(), clean.run.evaluate()
    finite = outcome.run.finite()
    row = {
        "ended": outcome.ended,
        "finite": finite,
        "final": _number(final),
        "over_clean": _number(final / reference - 1.0),
        "last_over_clean": _number(last_mean(outcome) / last_mean(clean) - 1.0),
        "lost": outcome.made - outcome.run.updates(),
        "attempts": outcome.attempts,
        "why": outcome.why,
    }
    good = final <= WITHIN * reference
    if same_data is not None:
        control = same_data.run.evaluate()
        row |= {"over_same_data": _number(final / control - 1.0), "same_bits": final == control}
        good = good and final <= WITHIN * control
    return row | {"recovered": outcome.ended and finite and good}


def last_mean(outcome: Outcome) -> float:
    """The mean loss of the last steps; NaN for a run that did not get there."""
    found = [outcome.losses.get(step, math.nan) for step in range(STEPS - LAST, STEPS)]
    return sum(found) / len(found)


def shown_after(outcome: Outcome, clean: Outcome, cause: int) -> dict[str, int | None]:
    """How many steps after the cause a run without protection differs from the clean one.

    Returns:
        ``differs``: to the first loss or evaluation that is not the clean run's, bit for bit.
        ``stands_out``: to the first evaluation that is not finite, or the first step whose mean loss of five
        is 10 % above the clean run's or not finite. None if there is none.
    """

    def mean(losses: dict[int, float], step: int) -> float:
        return sum(losses[i] for i in range(step - MEAN_OF + 1, step + 1)) / MEAN_OF

    theirs, ours = clean.losses, outcome.losses
    evaluated = outcome.evaluations.items()
    differs = [i for i in range(STEPS) if ours[i] != theirs[i]]
    differs += [i for i, loss in evaluated if loss != clean.evaluations[i]]
    above = [i for i in range(MEAN_OF - 1, STEPS) if not mean(ours, i) <= STANDS_OUT * mean(theirs, i)]
    above += [i for i, loss in evaluated if not math.isfinite(loss)]
    return {
        name: min(steps) - cause if steps else None
        for name, steps in (("differs", differs), ("stands_out", above))
    }


def _number(x: float) -> float | None:
    return round(x, 5) if math.isfinite(x) else None
