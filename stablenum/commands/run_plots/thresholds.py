"""The norm at which a run's gradients are clipped, where its rules have one for all gradients together."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

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
    found: list[float] = []
    starts = [bisect_left(run.steps, first) for first, _ in run.in_force]
    for (_, header), (start, end) in zip(run.in_force, pairwise([*starts, len(run)]), strict=True):
        found += [_NONE] * (start - len(found))
        rules = (header.get("settings") or {}).get("clip", [])
        names = {rule.get("rule") for rule in rules}
        fixed = [rule.get("max_norm", _NONE) for rule in rules if rule.get("rule") == _FIXED]
        if fixed and names <= {_FIXED, *_OTHER}:
            found += [min(fixed)] * (end - start)
        elif names & set(_JOINT) and names <= {*_JOINT, *_OTHER}:
            found += [_at_step(run, i) for i in range(start, end)]
        else:
            found += [_NONE] * (end - start)
    return found


def _at_step(run: Run, i: int) -> float:
    return run.grad_norm[i] * run.clip_coefficient[i] if run.clip_coefficient[i] < 1 else _NONE
