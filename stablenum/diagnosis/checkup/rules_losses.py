"""Rules on the course of the loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import PARTLY_DOWN, Course, median
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import joined
from stablenum.diagnosis.replay.descent import Descent

__all__ = ["RULES"]

# Fewer losses show neither a course nor turns.
_LEAST = 10
# A loss oscillates that turns around in so many of the steps, by so much of its size.
_TURNS, _FAR = 0.8, 0.5
_STRICT_CURE = (
    "run `stablenum explain --strict` on the script, which names the operation where that begins, even if "
    "the guard copes with it"
)


def _not_finite(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield parameters and running statistics that are NaN or inf: a fact, whatever else is measured."""
    found: dict[str, int] = {}
    for probe in course.probes:
        bad = [p.name for p in probe.parameters if not math.isfinite(p.weight)]
        bad += [
            f"the running statistics of {r.name}"
            for r in probe.running
            if not math.isfinite(r.mean.rms + r.variance.rms)
        ]
        for name in bad:
            found.setdefault(name, probe.step)
    if not found:
        return
    first = min(found.values())
    began = [name for name, step in found.items() if step == first]
    yield Complaint.of(
        Symptom.NOT_FINITE,
        Level.FAULT,
        f"{joined(began)}: non-finite in step {first}, the first such step that was measured; "
        f"{len(found)} in all",
        since=first,
        parameters=tuple(found),
        place=course.step_place,
        **({"cure": _STRICT_CURE} if course.guarded else {}),
    )


def _unbounded(course: Course) -> str:
    """Describe an objective that has run away below 0; "" if none has, or if the script multiplies it by a
    number that has grown, as a barrier method does."""
    descent = Descent()
    for loss in course.losses:
        descent.note(loss.place, loss.step, loss.value)
    said = descent.runaway()
    return "" if said and _grows_by_a_number(course) else said


def _grows_by_a_number(course: Course) -> bool:
    """Return whether a number that the script gives to each step has grown by at least half as many orders of
    magnitude as the loss."""
    losses = {loss.step: abs(loss.value) for loss in course.losses}
    known = [(losses[step], numbers) for step, numbers in course.numbers if step in losses]
    if len(known) < 2:
        return False
    (first, before), (last, after) = known[0], known[-1]
    grown = last / max(1.0, first)
    ratios = [abs(after[name] / before[name]) for name in before.keys() & after.keys() if before[name]]
    return any(ratio > 1.0 and ratio**2 >= grown for ratio in ratios)


def _loss(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    bad = [loss for loss in course.losses if not math.isfinite(loss.value)]
    last = [loss.value for loss in course.losses[-2 if course.guarded else -1 :]]
    if bad:
        yield Complaint.of(
            Symptom.LOSS_NOT_FINITE,
            # A script may cope with a bad batch, and a guard does: what follows may not have been measured.
            Level.NOTE if any(math.isfinite(v) for v in last) else Level.FAULT,
            f"it is {bad[0].value} in step {bad[0].step}, and not finite in {len(bad)} of "
            f"{len(course.losses)} steps",
            since=bad[0].step,
            place=bad[0].place,
            **({"cure": _STRICT_CURE} if course.guarded else {}),
        )
    values = course.values
    if bad or len(values) < _LEAST:
        return
    size = median([abs(v) for v in values])
    fall, place = course.fall(), course.step_place
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(values, values[1:], values[2:])) / (len(values) - 2)
    if unbounded := _unbounded(course):
        yield Complaint.of(
            Symptom.LOSS_DIVERGES,
            Level.WARNING,
            unbounded,
            place=place,
            what="the objective falls without a lower bound",
            cure="check its sign (what is to be maximised is negated before it is minimised); if that is "
            "right, give it a lower bound, such as a penalty or a floor for a variance",
            expects="a loss that levels off",
        )
    elif course.is_constant() and not course.is_surrogate():
        yield Complaint.of(
            Symptom.LOSS_CONSTANT,
            Level.FAULT,
            f"the loss is {values[-1]:.6g} in all {len(values)} steps",
            place=place,
        )
    elif fall < -1.0 and values[-1] > 2 * abs(values[0]):
        yield Complaint.of(
            Symptom.LOSS_DIVERGES,
            Level.FAULT,
            f"the loss rose from {values[0]:.3g} to {values[-1]:.3g}",
            place=course.optimizer_place,
            places=course.scheduled,
        )
    elif turns > _TURNS and median(steps) > _FAR * size and fall < PARTLY_DOWN:
        yield Complaint.of(
            Symptom.LOSS_OSCILLATES,
            Level.WARNING,
            f"it turns around in {turns:.0%} of the steps, by {median(steps) / size:.0%} of its size",
            place=place,
        )


RULES = (_not_finite, _loss)
