"""What another run of a script, with an edit of its source, has shown of the edit."""

from __future__ import annotations

import math
from statistics import median
from typing import NamedTuple

from stablenum.diagnosis.watch.plan import Outcome

__all__ = ["Tried", "steps_of_trial", "tried"]

# So many steps are taken after the one that failed: as many as before it, within these bounds. They are
# chosen, not measured: enough to see a loss move, and a small part of most trainings.
_LEAST_AFTER, _MOST_AFTER = 10, 100
# A loss runs away if it ends so many times its range above the largest before the failure. Chosen.
_FAR = 10
# The median of so many losses is shown. Chosen: single batches differ more than a few steps change.
_SHOWN = 10


class Tried(NamedTuple):
    """The result of a trial.

    Attributes:
        helps: whether the step that failed is finite with the edit.
        said: what the trial has shown.
    """

    helps: bool
    said: str


def steps_of_trial(failed: int) -> int:
    """Return the number of steps of a trial, given the number, from 0, of the step that failed."""
    return failed + 1 + min(max(failed, _LEAST_AFTER), _MOST_AFTER)


def tried(first: Outcome, trial: Outcome) -> Tried:
    """Return what a trial has shown.

    Args:
        first: the run that failed.
        trial: the run with the edit.

    Example:
        >>> from stablenum.diagnosis.watch.plan import Failure
        >>> first = Outcome(failure=Failure(step=5, what="loss"))
        >>> tried(first, Outcome(steps=16)).said
        'step 5 is finite, and so are the 10 steps after it'
        >>> tried(first, Outcome(exit_code=1, error="TypeError: x must be an array"))
        Tried(helps=False, said='the script ends with TypeError: x must be an array')
    """
    assert first.failure is not None
    step, unit = first.failure.step, first.failure.unit
    if trial.lost or trial.troubles:
        return Tried(False, f"nothing is known, because {trial.error or trial.trouble}")
    if trial.failure is not None and trial.failure.step <= step:
        place = _place(trial)
        same = place and place == _place(first)
        return Tried(False, f"{unit} {step} still fails{'' if same or not place else f', at {place}'}")
    if trial.error and trial.failure is None:
        return Tried(False, f"the script ends with {trial.error}")
    taken = trial.steps if unit == "step" else trial.calls
    after = (taken if trial.failure is None else trial.failure.step) - step - 1
    finite = f"{unit} {step} is finite"
    if after > 0:
        finite += f", and so {f'are the {after} {unit}s' if after > 1 else f'is the {unit}'} after it"
    if trial.failure is not None:
        return Tried(True, f"{finite}; then {trial.failure}{_at(_place(trial))}")
    said = "; ".join(filter(None, (finite, _losses(trial, step))))
    return Tried(not _runs_away(trial, step), said)


def _place(outcome: Outcome) -> str:
    findings = (outcome.report or {}).get("evidence", {}).get("findings") or [{}]
    place = findings[0].get("place")
    return f"{place['file']}:{place['line']}" if place else ""


def _at(place: str) -> str:
    return f", at {place}" if place else ""


def _runs_away(trial: Outcome, step: int) -> bool:
    """Return whether the loss ends far above all that it was before the step that failed."""
    before = [x for x in trial.losses[:step] if math.isfinite(x)]
    after = [x for x in trial.losses[step + 1 :][-_SHOWN:] if math.isfinite(x)]
    return bool(before and after) and median(after) > max(before) + _FAR * (max(before) - min(before))


def _losses(trial: Outcome, step: int) -> str:
    """Describe the loss before the step that failed and at the end."""
    before = [x for x in trial.losses[max(0, step - _SHOWN) : step] if math.isfinite(x)]
    after = [x for x in trial.losses[step + 1 :][-_SHOWN:] if math.isfinite(x)]
    if not (before and after):
        return ""
    return f"the loss is {median(before):.4g} before it and {median(after):.4g} at the end of that run"
