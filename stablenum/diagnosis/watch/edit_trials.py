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
# A safe form rounds otherwise than what it replaces: the first loss may be so many ulps away. The later ones
# come from parameters that moved apart, by so much of their size at most. Chosen.
_ULP, _MOST_ULPS, _MOST_APART = 2.0**-23, 16, 1e-3
# The median of so many losses is shown. Chosen: single batches differ more than a few steps change.
_SHOWN = 10


class Tried(NamedTuple):
    """The result of a trial.

    Attributes:
        helps: whether the step that failed is finite with the edit.
        said: what the trial has shown.
        proven: whether also nothing failed after it, and what was finite before is as it was.
    """

    helps: bool
    said: str
    proven: bool = False


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
        >>> tried(first, Outcome(exit_code=1, error="TypeError: x must be an array")).said
        'the script ends with TypeError: x must be an array'
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
    same, before = _as_before(first, trial)
    said = "; ".join(filter(None, (finite, before, _losses(trial, step))))
    helps = not _runs_away(trial, step)
    return Tried(helps, said, proven=helps and same and after > 0)


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


def _as_before(first: Outcome, trial: Outcome) -> tuple[bool, str]:
    """Return whether the losses before the failure are as they were, and a description: the first one, in
    which only the edit differs, within some ulps of float32, and the others as near as a training keeps what
    rounds otherwise."""
    assert first.failure is not None
    pairs = [
        (a, b)
        for a, b in zip(first.losses[: first.failure.step], trial.losses, strict=False)
        if math.isfinite(a)
    ]
    if not pairs:
        return first.failure.step == 0, ""
    apart = [abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in pairs]
    same = apart[0] <= _MOST_ULPS * _ULP and max(apart) <= _MOST_APART
    if not same:
        return False, f"but the losses before it differ, by {max(apart):.2g} of their size"
    if max(apart) == 0:
        many = f"the {len(pairs)} losses before it are the same"
        return True, many if len(pairs) > 1 else "the loss before it is the same"
    return True, f"the losses before it are the same within {math.ceil(max(apart) / _ULP)} ulps of float32"


def _losses(trial: Outcome, step: int) -> str:
    """Describe the loss before the step that failed and at the end."""
    before = [x for x in trial.losses[max(0, step - _SHOWN) : step] if math.isfinite(x)]
    after = [x for x in trial.losses[step + 1 :][-_SHOWN:] if math.isfinite(x)]
    if not (before and after):
        return ""
    return f"the loss is {median(before):.4g} before it and {median(after):.4g} at the end of that run"
