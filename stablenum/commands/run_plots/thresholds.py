"""The norm at which a run's gradients are clipped, where its rules have one for all gradients together."""

from __future__ import annotations

from bisect import bisect_left

from stablenum.runlog.reading import Run

__all__ = ["thresholds"]

_FIXED = "ClipByGlobalNorm"
_JOINT = (_FIXED, "AutoClip", "ZClip")
_OTHER = ("ClipByValue", "ClipUpdateRMS")  # they leave the coefficient of the joint norm as it is
_NONE = float("nan")


def thresholds(run: Run) -> list[float]:
    """Return the threshold of each step: NaN where it is not known.

    That of ``ClipByGlobalNorm`` is a setting. ``AutoClip`` and ``ZClip`` set theirs at each step; it is known
    where the step was clipped, from the norm and the coefficient. Rules that treat each parameter by itself
    have none.
    """
    found = [_NONE] * len(run)
    for first, header in run.headers:  # each holds from its first step on, until the next one
        start = bisect_left(run.steps, first)
        rules = (header.get("settings") or {}).get("clip", [])
        names = {rule.get("rule") for rule in rules}
        fixed = [rule.get("max_norm", _NONE) for rule in rules if rule.get("rule") == _FIXED]
        count = len(run) - start
        if fixed and names <= {_FIXED, *_OTHER}:
            found[start:] = [min(fixed)] * count
        elif names & set(_JOINT) and names <= {*_JOINT, *_OTHER}:
            found[start:] = [_at_step(run, i) for i in range(start, len(run))]
        else:
            found[start:] = [_NONE] * count
    return found


def _at_step(run: Run, i: int) -> float:
    return run.grad_norm[i] * run.clip_coefficient[i] if run.clip_coefficient[i] < 1 else _NONE
