"""The norm at which a run's gradients are clipped, where its rules have one for all gradients together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    for start, stop, rules in _segments(run):
        names = [rule.get("rule") for rule in rules]
        fixed = [float(rule["max_norm"]) for rule in rules if rule.get("rule") == _FIXED]
        if names and set(names) <= {_FIXED, *_OTHER}:
            found[start:stop] = [min(fixed, default=_NONE)] * (stop - start)
        elif set(names) & set(_JOINT) and set(names) <= {*_JOINT, *_OTHER}:
            found[start:stop] = [_at_step(run, i) for i in range(start, stop)]
    return found


def _at_step(run: Run, i: int) -> float:
    return run.grad_norm[i] * run.clip_coefficient[i] if run.clip_coefficient[i] < 1 else _NONE


def _segments(run: Run) -> Iterator[tuple[int, int, Sequence[Mapping[str, Any]]]]:
    """Yield the positions between two headers, with the clip rules that hold there."""
    starts = [step for step, _ in run.headers]
    for i, (first, header) in enumerate(run.headers):
        # After a return to an earlier step, a later header holds from there on.
        end = min(starts[i + 1 :], default=None)
        start = bisect_left(run.steps, first)
        stop = len(run) if end is None else bisect_left(run.steps, end)
        if start < stop:
            yield start, stop, (header.get("settings") or {}).get("clip", [])
