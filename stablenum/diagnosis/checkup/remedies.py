"""Cures that are tried on the script itself: what is changed in a second run, and what that run shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from stablenum.diagnosis.checkup.course import Course, ParameterSeen, median
from stablenum.diagnosis.checkup.rules_updates import BY_RATE
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.trials import deviations_for

__all__ = ["Change", "Remedy", "Shown", "outcome_of", "remedy_for", "resumed"]

# A step that suits most trainings changes a weight by this part of its size. Chosen, not measured; ``trials``
# asks for twice as much of the first step.
_USUAL_STEP = 0.005
# A trial takes so many steps, or this part of those that the script took: it is to cost less than the first
# run. Chosen, not measured.
_LEAST_STEPS, _PART = 30, 0.25
# Where a change shows only after the first loss, a trial begins with the loss of the first run. Batches that
# are not seeded may make this part of a difference; in a trial that was too short, none. Chosen, not
# measured.
_ALIKE, _SAME = 0.1, 1e-3
# A trial with less than this part of the losses was too short. Chosen, not measured.
_MOST = 0.8
# A rate is changed tenfold at least: factors are powers of ten, of which 1 changes nothing.
_LEAST_FACTOR = 10.0
# What a trial ends with is the mean of this part of its losses. Chosen, not measured.
_LAST = 4


class Change(StrEnum):
    """What a trial changes."""

    RATE = "rate"
    CLIP = "clip"
    NO_CLIP = "no_clip"
    EPS = "eps"
    NO_DECAY = "no_decay"
    CLEAR = "clear"
    INITIALISE = "initialise"
    SCALE_INPUT = "scale_input"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change to a training, made while its script runs once more.

    Attributes:
        change: what is changed.
        number: the factor on the rate, the bound of the clipping, or eps.
        deviations: name of a parameter -> the standard deviation of its new first values; 0 for zeros. For an
            input, the name of the weight of the layer that reads it.
        steps: how many steps the trial takes.
    """

    change: Change
    number: float = math.nan
    deviations: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0

    @property
    def measured(self) -> int:
        """How many steps of the trial are measured in full."""
        return int(self.change is Change.INITIALISE)

    def __str__(self) -> str:
        return {
            Change.RATE: f"{self.number:g} times the rate",
            Change.CLIP: f"gradients clipped to a norm of {self.number:g}",
            Change.NO_CLIP: "no clipping",
            Change.EPS: f"eps {self.number:g}",
            Change.NO_DECAY: "no weight decay",
            Change.CLEAR: "gradients cleared after each step",
            Change.INITIALISE: f"another initialisation of {len(self.deviations)} parameters",
            Change.SCALE_INPUT: "inputs of mean 0 and standard deviation 1",
            Change.FLOAT32: "parameters kept in float32 for the updates",
        }[self.change]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(self)
        return plain | {
            "change": self.change.value,
            "number": None if math.isnan(self.number) else self.number,
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Remedy:
        """Return the object from which :meth:`to_dict` made ``d``."""
        number = math.nan if d["number"] is None else d["number"]
        return cls(change=Change(d["change"]), number=number, deviations=d["deviations"], steps=d["steps"])


def remedy_for(found: Sequence[Complaint], course: Course) -> Remedy | None:
    """Return the change by which the cure of the first complaint can be tried; None if there is none."""
    if not found or found[0].level is Level.NOTE or not course.probes or len(course.values) < 2:
        return None
    make = _REMEDIES.get(found[0].symptom, _none)
    remedy = make(found[0], course)
    if remedy is None:
        return None
    steps = max(remedy.steps, _LEAST_STEPS, round(_PART * course.steps))
    if any(one.symptom is Symptom.LOSS_DIVERGES for one in (found[0], *found[0].consequences)):
        steps = course.steps  # the loss may take long to grow
    return replace(remedy, steps=min(course.steps, steps))


class Shown(NamedTuple):
    """What a trial has shown, and whether the loss was lower for it; None if it did not come far enough."""

    said: str
    better: bool | None


def outcome_of(remedy: Remedy, before: Sequence[float], after: Sequence[float]) -> Shown:
    """Return what a trial has shown.

    Args:
        remedy: what was tried.
        before: the losses without it.
        after: the losses with it; the training may have ended earlier.

    Example:
        >>> remedy = Remedy(change=Change.RATE, number=0.1)
        >>> outcome_of(remedy, [2.0, 3.0, 5.0, 9.0], [2.0, 1.0, 0.5, 0.25]).said
        'with 0.1 times the rate, the loss goes from 2 to 0.25 in 4 steps; unchanged, from 2 to 9'
    """
    count = min(len(before), len(after))
    if count < 2:
        return Shown("", None)
    part = max(1, count // _LAST)  # its mean, because the losses of single batches differ
    cured, unchanged = (math.fsum(values[count - part : count]) / part for values in (after, before))
    better = cured < unchanged or (math.isnan(unchanged) and not math.isnan(cured))
    return Shown(
        f"with {remedy}, the loss goes from {after[0]:.4g} to {cured:.4g} in {count} steps"
        f"{'' if better else ' (so far that is no better)'}; "
        f"unchanged, from {before[0]:.4g} to {unchanged:.4g}",
        better,
    )


def resumed(remedy: Remedy, before: Sequence[float], after: Sequence[float], steps: int) -> str:
    """Describe why a trial seems to have begun in the middle of the training; "" if it does not.

    Args:
        remedy: what was tried.
        before: the losses without it.
        after: the losses with it.
        steps: how many steps the training took without it.

    Example:
        >>> remedy = Remedy(change=Change.RATE, number=0.1, steps=2)
        >>> resumed(remedy, [2.0, 9.0], [2.0, 1.0], steps=2)
        ''
        >>> resumed(remedy, [2.0, 9.0], [9.0, 8.0], steps=2).partition(",")[0]
        'nothing is known: the second run began with a loss of 9'
    """
    wanted = len(before) * remedy.steps // max(1, steps)  # of two optimizers, one may have all losses
    short = len(after) < _MOST * wanted
    if not after:
        seen = "took no step"
    elif remedy.change in _BEGIN_OTHERWISE:
        seen = f"took {len(after)} of {wanted} steps" if short else ""
    else:
        alike = math.isclose(before[0], after[0], rel_tol=_SAME if short else _ALIKE)
        seen = "" if alike else f"began with a loss of {after[0]:.4g}, the first with {before[0]:.4g}"
    return f"nothing is known: the second run {seen}, so {_RESUMES}" if seen else ""


_RESUMES = "the script seems to resume from what the first saved"
_BEGIN_OTHERWISE = (Change.INITIALISE, Change.SCALE_INPUT, Change.FLOAT32)


def _none(one: Complaint, course: Course) -> Remedy | None:
    return None


def _lower_rate(one: Complaint, course: Course) -> Remedy:
    change = _relative(course)
    return _rate(min(1 / _LEAST_FACTOR, _USUAL_STEP / change) if change > 0 else 1 / _LEAST_FACTOR)


def _other_sign(one: Complaint, course: Course) -> Remedy:
    return Remedy(change=Change.RATE, number=-1.0)


def _less_decay(one: Complaint, course: Course) -> Remedy:
    return _lower_rate(one, course) if one.cure == BY_RATE else Remedy(change=Change.NO_DECAY)


def _higher_rate(one: Complaint, course: Course) -> Remedy | None:
    change = _relative(course)
    return _rate(max(_LEAST_FACTOR, _USUAL_STEP / change)) if change > 0 else None


def _rate(factor: float) -> Remedy:
    return Remedy(change=Change.RATE, number=10.0 ** round(math.log10(factor)))


def _relative(course: Course) -> float:
    """Return by which part of its size the median weight changes in a step."""
    seen = [p for probe in course.probes for p in probe.parameters]
    return median([p.relative for p in seen if len(p.shape) > 1 and p.update > 0])


def _initialise(one: Complaint, course: Course) -> Remedy | None:
    deviations = deviations_for(one.parameters, course)
    return Remedy(change=Change.INITIALISE, deviations=deviations) if deviations else None


def _dead(one: Complaint, course: Course) -> Remedy | None:
    """Lower the rate if units died; if they began dead, nothing is known that can be tried."""
    return replace(_lower_rate(one, course), steps=one.since + _LEAST_STEPS) if one.since > 0 else None


def _scale_input(one: Complaint, course: Course) -> Remedy | None:
    names = [p.name for p in _first(course) if p.name in one.parameters]
    return Remedy(change=Change.SCALE_INPUT, deviations=dict.fromkeys(names, 1.0)) if names else None


def _first(course: Course) -> tuple[ParameterSeen, ...]:
    return course.probes[0].parameters


_REMEDIES: dict[Symptom, Callable[[Complaint, Course], Remedy | None]] = {
    Symptom.UPHILL_UPDATES: _other_sign,
    Symptom.STEPS_TOO_LARGE: _lower_rate,
    Symptom.LOSS_DIVERGES: _lower_rate,
    Symptom.LOSS_OSCILLATES: _lower_rate,
    Symptom.STEPS_TOO_SMALL: _higher_rate,
    Symptom.DEAD_UNITS: _dead,
    Symptom.EXPLODING_ACTIVATIONS: _initialise,
    Symptom.VANISHING_ACTIVATIONS: _initialise,
    Symptom.ALIKE_UNITS: _initialise,
    Symptom.UNSCALED_INPUT: _scale_input,
    Symptom.EXPLODING_GRADIENTS: lambda one, course: Remedy(change=Change.CLIP, number=1.0),
    Symptom.CLIPPED_ALWAYS: lambda one, course: Remedy(change=Change.NO_CLIP),
    Symptom.EPS_DOMINATES: lambda one, course: Remedy(change=Change.EPS, number=1e-8),
    Symptom.WEIGHT_DECAY: _less_decay,
    Symptom.GRADIENTS_KEPT: lambda one, course: Remedy(change=Change.CLEAR),
    Symptom.LOST_UPDATES: lambda one, course: Remedy(change=Change.FLOAT32),
}
