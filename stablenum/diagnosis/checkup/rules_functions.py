"""Rules on single functions inside a model: saturated, dead, or collapsed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import LARGE_CHANGE, PARTLY_DOWN, Course, relative_change
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import lines_assigning, places_of
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["RULES"]

# Of an output so much is at its edge, and of the units of a layer so many are 0 for a whole batch.
_SATURATED, _DEAD = 0.8, 0.9
# Of fewer rows, all units have to be: half of them are 0 in any row, and a few rows may agree by chance.
_ROWS = 8
# A router uses at least so many entries, or this part of them.
_USED, _OF_ENTRIES = 1.2, 0.3
# Until this step a model has learned nothing of which it could be sure. Chosen, not measured.
_EARLY = 2
# A step before which units died changed a weight by more than this part of its size.
_JUMP = LARGE_CHANGE
# What a softmax reads may be masked so many times. Chosen, not measured.
_MOST_MASKS = 8
# Of attention that has collapsed, the entropy is below the one and the largest logit above the other.
_AT_FIRST, _LATER = (0.6, 15.0), (0.15, 50.0)


def _few_of(entries: int) -> float:
    """Return how many entries a router at least uses."""
    return max(_USED, _OF_ENTRIES * entries)


def _saturated(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    for reading in readings:
        for step in reading.forward():
            if step.operation not in ("sigmoid", "tanh", "softmax") or not step.outputs:
                continue
            found = reading.signals.get(step.outputs[0])
            if found is None or not found.saturated > _SATURATED or step.index not in reading.differentiated:
                continue
            final = reading.is_last(step)
            if (final and reading.probe.step > _EARLY) or (step.operation == "softmax" and not final):
                continue  # a trained model is sure of itself; attention has its own rule
            into = reading.signal(step.inputs[0])
            yield Complaint.of(
                Symptom.SATURATED,
                Level.NOTE
                if course.fall() > PARTLY_DOWN or _is_learned(course, reading.probe.step)
                else Level.FAULT,
                (
                    f"{found.saturated:.0%} of {step.operation}'s output is within 0.01 of the edge",
                    *([f"it reads values of size {into.rms:.3g} (RMS)"] if into is not None else []),
                ),
                since=reading.probe.step,
                place=step.place,
                module=step.module,
            )
            return


def _is_learned(course: Course, since: int) -> bool:
    """Return whether a function has become sure of itself by steps of a sound size, where the loss does not
    tell whether they were of use: a policy at full reward has nothing left to learn."""
    return math.isnan(course.fall()) and since > _EARLY and not _jump(course, since)


def _dead(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    found: dict[tuple[object, str], list[tuple[int, float, Step]]] = {}
    for reading in readings:
        for step in reading.forward():
            made = reading.signals.get(step.outputs[0]) if step.outputs else None
            if step.operation != "relu" or made is None or math.isnan(made.dead):
                continue
            rows = made.size / max(1, made.shape[1 if len(made.shape) in (4, 5) else -1])
            part = made.dead if rows >= _ROWS or made.dead == 1.0 else 0.0
            found.setdefault((step.place, step.module), []).append((reading.probe.step, part, step))
    worst: tuple[int, float, Step, float] | None = None
    for seen in found.values():
        end = 1.0 if seen[-1][1] == 1.0 else min(part for _, part, _ in seen[-2:])
        since = next((step for step, part, _ in seen if part > _DEAD), seen[-1][0])
        if end > _DEAD and len(seen) > 1 and (worst is None or since < worst[0]):
            worst = since, end, seen[-1][2], seen[0][1]
    if worst is None:
        return
    since, end, step, began = worst
    jump = _jump(course, since)
    given = _initialised(course, readings[0], step) if since == 0 else ()
    yield Complaint.of(
        Symptom.DEAD_UNITS,
        Level.FAULT if end == 1.0 or not course.fall() > PARTLY_DOWN else Level.WARNING,
        (
            f"{end:.0%} of the units are 0 for the whole batch since step {since} ({began:.0%} at first)",
            *([jump] if jump else []),
        ),
        since=since,
        place=given[0] if given else step.place,
        places=places_of(*given[1:], step.place),
        module=step.module,
    )


def _initialised(course: Course, reading: Reading, activation: Step) -> tuple[Place, ...]:
    """Return where the parameters of the layer that an activation reads got their first values."""
    same = next(
        (s for s in reading.forward() if (s.place, s.module) == (activation.place, activation.module)), None
    )
    layer = None if same is None or not same.inputs else reading.producer(same.inputs[0])
    sources = [] if layer is None else [reading.source(i) for i in reversed(layer.inputs)]
    return places_of(*(course.initialised.get(v.name) for v in sources if v.role == "parameter"))


def _jump(course: Course, since: int) -> str:
    """Describe the step after which something was first seen."""
    from_zero = course.began_at_zero()
    large = [
        p
        for probe in course.probes
        for p in probe.parameters
        if probe.step < since and len(p.shape) > 1 and relative_change(p, probe.step, from_zero) > _JUMP
    ]
    if not large:
        return ""
    worst = max(large, key=lambda p: p.relative)
    return f"a step before it changed {worst.name} by {worst.relative:.2g} of its size"


def _attention(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    for symptom in (Symptom.ATTENTION_COLLAPSE, Symptom.ROUTER_COLLAPSE):
        for reading in readings:
            found = _softmax_inside(reading, symptom, course.loaded)
            if found is not None:
                step, shown = found
                scores = _scores(reading, step)
                factor = _factor(scores)
                yield Complaint.of(
                    symptom,
                    Level.FAULT if not course.fall() > PARTLY_DOWN else Level.WARNING,
                    (*shown, *([f"they are multiplied by {factor:.3g}"] if factor > 1 else [])),
                    since=reading.probe.step,
                    place=(scores or step).place,
                    places=places_of(*_factors_of(scores), step.place, *_loss_places(reading, symptom)),
                    module=step.module,
                )
                break


def _loss_places(reading: Reading, symptom: Symptom) -> list[Place | None]:
    """Return where the loss is put together, in which a router's balance has its place."""
    last = reading.loss_steps()[:1] if symptom is Symptom.ROUTER_COLLAPSE else []
    return [step.place for step in last]


def _factor(scores: Step | None) -> float:
    """Return the number with which scores are multiplied; 1 for none."""
    known = scores is not None and scores.operation == "mul" and len(scores.scalars) == 1
    return scores.scalars[0] if scores is not None and known else 1.0


def _factors_of(scores: Step | None) -> tuple[Place, ...]:
    """Return where the factors in the line of the scores get their values."""
    if scores is None or (place := scores.place) is None:
        return ()
    names = re.findall(r"[*/]\s*(?:self\.)?([A-Za-z_]\w*)\b(?!\()", place.code)
    return tuple(line for name in names for line in lines_assigning(name, place) if line.line != place.line)[
        :2
    ]


def _first_part(reading: Reading, step: Step) -> Step:
    """Return the first step of a function of several steps, whose last step this is."""
    while step.inputs:
        before = reading.producer(step.inputs[0])
        if before is None or before.operation != step.operation or before.place != step.place:
            break
        step = before
    return step


def _logits(reading: Reading, step: Step) -> Signal | None:
    """Return what a softmax reads, whose last step this is."""
    first = _first_part(reading, step)
    return reading.signal(first.inputs[0]) if first.inputs else None


def _scores(reading: Reading, step: Step) -> Step | None:
    """Return the step that computes what a softmax reads, past masks: the last that is no choice."""
    step = _first_part(reading, step)
    for _ in range(_MOST_MASKS):
        before = reading.producer(step.inputs[0]) if step.inputs else None
        if before is None or before.place is None or before.phase != "forward":
            return None
        if before.operation not in ("where", "masked_fill", "add"):
            return before
        step = before
    return None


def _softmax_inside(reading: Reading, symptom: Symptom, loaded: bool) -> tuple[Step, tuple[str, ...]] | None:
    for step in reading.forward():
        if step.operation != "softmax" or step.index not in reading.differentiated:
            continue
        if reading.is_last(step) and not (symptom is Symptom.ROUTER_COLLAPSE and reading.weighs(step)):
            continue
        made = reading.signals.get(step.outputs[0]) if step.outputs else None
        into = _logits(reading, step)
        if made is None or math.isnan(made.entropy) or made.shape[-1] < 2:
            continue
        size = max(abs(into.least), abs(into.greatest)) if into is not None else math.nan
        attention = len(made.shape) > 2
        begins = reading.probe.step == 0 and not loaded  # then attention is all but uniform
        entropy, logit = _AT_FIRST if begins else _LATER
        if symptom is Symptom.ATTENTION_COLLAPSE and attention and made.entropy < entropy and size > logit:
            return step, (
                f"the largest logit is {size:.3g}, the entropy {made.entropy:.1%} of a uniform row's",
            )
        if symptom is Symptom.ROUTER_COLLAPSE and not attention and made.used < _few_of(made.shape[-1]):
            return step, (f"the batch uses {made.used:.2g} of {made.shape[-1]} entries",)
    return None


RULES = (_saturated, _dead, _attention)
