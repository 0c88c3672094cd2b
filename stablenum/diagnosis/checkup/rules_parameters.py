"""Rules on parameters: what gets a gradient, what moves, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import Course, ParameterSeen, median
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["RULES", "joined"]

# Of a parameter's elements that have a gradient, more than this part stands still.
_MOSTLY = 0.5
# Adam's relative steps are about 1e-3; above _LARGE a parameter is another one after a few steps, and below
# _SMALL it takes ten thousand steps to change by a tenth.
_LARGE, _SMALL = 0.1, 1e-5
# Adam's steps are a tenth of the rate and more.
_OF_THE_RATE = 0.02
# A loss that has fallen by less than this part of its first value has not come down.
_FALLEN = 0.1


def joined(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


def _no_graph(course: Course, last: Reading | None) -> Iterator[Complaint]:
    if course.groundless is not None:
        yield Complaint.of(
            Symptom.NO_GRAPH,
            Level.FAULT,
            "the backward pass started at a tensor without a graph",
            place=course.groundless,
        )


def _not_in_model(course: Course, last: Reading | None) -> Iterator[Complaint]:
    if course.strangers:
        yield Complaint.of(
            Symptom.NOT_IN_MODEL,
            Level.FAULT,
            f"{course.strangers} parameters of the optimizer belong to no module and got no gradient",
            place=course.optimizer_place,
        )


def _not_in_optimizer(course: Course, last: Reading | None) -> Iterator[Complaint]:
    if not course.outside:
        return
    used = last.first_use() if last else {}
    own = [used[name].index for name in course.inside if name in used]
    others = [used[name].index for name in course.outside if name in used]
    # A part in front of all that is trained, by itself, is a backbone that is frozen in this way.
    backbone = bool(own and others) and max(others) < min(own)
    step = used.get(course.outside[0])
    yield Complaint.of(
        Symptom.NOT_IN_OPTIMIZER,
        Level.NOTE if backbone and course.fall() > _FALLEN else Level.FAULT,
        f"{joined(course.outside)}: gradients, but no optimizer has "
        f"{'it' if len(course.outside) == 1 else 'them'}",
        parameters=course.outside,
        place=course.optimizer_place,
        places=_places(course.initialised.get(course.outside[0]), step.place if step else None),
        module=course.outside[0].rpartition(".")[0],
    )


def _places(*places: Place | None) -> tuple[Place, ...]:
    """Return the lines that are known."""
    return tuple(p for p in dict.fromkeys(places) if p is not None)


def _gradients(course: Course, last: Reading | None) -> Iterator[Complaint]:
    """Yield parameters without a gradient, and with a gradient of zeros."""
    missing, zero = [], []
    histories = {name: [p for _, p in course.history(name)] for name in course.names()}
    for name, seen in histories.items():
        if not any(p.has_gradient for p in seen):
            missing.append(name)
        elif len(seen) > 1 and all(p.zero == 1.0 or not p.has_gradient for p in seen[1:]):
            zero.append(name)
    used = last.first_use() if last else {}
    total = len(histories)
    if missing and last is not None and len(missing) < total:
        behind = _cut(last, missing)
        cut = None if behind is None else behind.place
        step = used.get(missing[0])
        unused = [name for name in missing if name not in used]
        why = " (the forward pass does not use them)" if len(unused) == len(missing) else ""
        yield Complaint.of(
            Symptom.NO_GRADIENT,
            Level.FAULT if cut is not None else Level.WARNING,
            f"no gradient in {len(course.probes)} measured steps: {joined(missing)}{why}",
            parameters=tuple(missing),
            place=cut or (step.place if step else course.initialised.get(missing[0])),
            places=() if behind is None else tuple(reversed(behind.frames[:-1]))[:2],
            module=step.module if step else missing[0].rpartition(".")[0],
        )
    elif missing:
        yield Complaint.of(
            Symptom.NO_GRADIENT,
            Level.FAULT,
            f"no parameter of the optimizer had a gradient in {len(course.probes)} measured steps",
            parameters=tuple(missing),
            place=course.step_place,
        )
    if zero:
        step = used.get(zero[0])
        everything = len(zero) == total - len(missing)
        yield Complaint.of(
            Symptom.ZERO_GRADIENT,
            Level.FAULT,
            f"the gradient is exactly 0 from step {course.probes[1].step} on: "
            + (f"all {total} parameters" if everything else joined(zero)),
            since=course.probes[1].step,
            parameters=tuple(zero),
            place=step.place if step else None,
            module=step.module if step else "",
        )


def _cut(reading: Reading, names: Sequence[str]) -> Step | None:
    """Return the last step that is not differentiated, on the way from these parameters to the loss."""
    wanted = set(names)
    reached = {
        v.id
        for v in reading.trace.values
        if v.producer is None and v.role == "parameter" and v.name in wanted
    }
    last: Step | None = None
    for step in reading.forward():
        if not any(i in reached for i in step.inputs):
            continue
        if step.index in reading.differentiated:
            return last or step
        reached.update(step.outputs)
        if step.outputs:
            last = step
    return None


def _flushed(course: Course, last: Reading | None) -> Iterator[Complaint]:
    """Yield the first step that turns gradients that are not 0 into 0."""
    for probe in course.probes:
        reading = Reading(probe)
        found = _flushing(reading)
        if found is not None:
            step, before, after = found
            factor = f" by {step.scalars[0]:.3g}" if step.operation in ("mul", "div") and step.scalars else ""
            yield Complaint.of(
                Symptom.FLUSHED_GRADIENTS,
                Level.FAULT,
                f"{step.operation}{factor}: {before.zero:.0%} of the elements were 0 before (RMS "
                f"{before.rms:.2g}), {after.zero:.0%} are after, in {after.dtype}",
                since=probe.step,
                place=step.place,
                module=step.module,
            )
            return


# Operations whose derivatives are 0 in places.
_ZEROING = ("relu", "where", "clamp", "dropout", "maximum", "max_pool2d")


def _is_closed(reading: Reading, value: int) -> bool:
    """Return whether a factor is 0, as a gate that begins closed; a constant may be 0 in its format only."""
    found = reading.signal(value)
    return found is not None and found.rms == 0 and reading.source(value).role != "constant"


def _flushing(reading: Reading) -> tuple[Step, Signal, Signal] | None:
    trace, signals = reading.trace, reading.signals
    gradients: set[int] = set()
    for step in trace.steps:
        if step.phase == "update":
            continue
        after_gradient = any(i in gradients for i in step.inputs)
        if step.phase == "backward" or after_gradient:
            gradients.update(step.outputs)
        else:
            continue
        if not step.outputs or step.operation in _ZEROING:
            continue
        after = signals.get(step.outputs[0])
        before = [
            s
            for i in step.inputs
            if (s := reading.signal(i)) is not None and s.size == (after.size if after else 0)
        ]
        if after is None or not before or after.size < 2:
            continue
        narrow = after.dtype in ("float16", "bfloat16")
        plain = step.operation in ("mul", "div", "cast") or (narrow and step.phase == "backward")
        worst = max(before, key=lambda s: s.zero)
        if any(_is_closed(reading, i) for i in step.inputs):
            continue
        if plain and worst.zero < 0.2 and after.zero > 0.7 and worst.rms > 0:
            return step, worst, after
    return None


def _rate(course: Course, last: Reading | None) -> Iterator[Complaint]:
    rates = list(dict(course.rates).values())
    nothing = [i for i, rate in enumerate(rates) if rate == 0.0]
    if len(rates) > 3 and len(nothing) > 0.3 * len(rates):
        since = nothing[0] if len(nothing) < len(rates) else 0
        yield Complaint.of(
            Symptom.RATE_ZERO,
            Level.FAULT,
            f"the rate is 0 in {len(nothing)} of {len(rates)} steps, from step {since} on",
            since=since,
            place=course.scheduled[0] if course.scheduled else course.optimizer_place,
            places=_places(course.optimizer_place),
        )


def _lost(course: Course, last: Reading | None) -> Iterator[Complaint]:
    lost: dict[str, ParameterSeen] = {}
    # Where gradients are accumulated, nothing moves in most steps.
    moved = {probe.step for probe in course.probes if any(p.update > 0 for p in probe.parameters)}
    for name in course.names():
        history = [p for step, p in course.history(name) if step in moved]
        seen = [p for p in history if p.has_gradient and p.gradient > 0 and p.rate != 0.0]
        if len(seen) > 1 and median([p.still for p in seen[-3:]]) > _MOSTLY:  # a last stage counts
            lost[name] = seen[-1]
    if not lost:
        return
    first = next(iter(lost.values()))
    narrow = any("16" in p.dtype or "8" in p.dtype for p in lost.values())
    total = sum(p.size for p in lost.values())
    share = total / max(1, sum(course.history(n)[-1][1].size for n in course.names()))
    if not narrow and share < _MOSTLY:
        return
    yield Complaint.of(
        Symptom.LOST_UPDATES,
        Level.FAULT if narrow else Level.WARNING,
        f"{joined(list(lost))}: {first.still:.0%} of the elements of {first.dtype} that have a gradient "
        f"did not change (weights {first.weight:.2g}, rate {first.rate:.2g})",
        parameters=tuple(lost),
        place=course.optimizer_place,
        places=_places(course.initialised.get(next(iter(lost)))),
    )


def _sizes(course: Course, last: Reading | None) -> Iterator[Complaint]:
    """Yield steps that are too large or too small for the loss to fall."""
    fall = course.fall()
    per_step = [
        median([p.relative for p in probe.parameters if len(p.shape) > 1 and p.update > 0 and p.weight > 0])
        for probe in course.probes
    ]
    per_step = [x for x in per_step if not math.isnan(x)]
    if not per_step or math.isnan(fall):
        return
    usual = median(per_step)
    # The first steps of Adam have the size of the rate, whatever the gradient.
    large = per_step[0] > 10 * _LARGE or max(*per_step[1:4], usual, 0.0) > _LARGE
    rate = course.rates[-1][1] if course.rates else math.nan
    shown = f"the median weight changes by {usual:.2g} of its size per step" + (
        "" if math.isnan(rate) else f", at a rate of {rate:.2g}"
    )
    came = f"the loss {'fell' if fall >= 0 else 'rose'} by {abs(fall):.1%} in {course.steps} steps"
    if large and fall < _FALLEN:
        yield Complaint.of(
            Symptom.STEPS_TOO_LARGE,
            Level.FAULT,
            (shown, came),
            place=course.optimizer_place,
            places=course.scheduled,
        )
    elif (usual < _SMALL or usual * course.steps < 0.1) and fall < _FALLEN / 2 and course.steps >= 5:
        yield Complaint.of(
            Symptom.STEPS_TOO_SMALL,
            Level.NOTE if course.loaded else Level.WARNING,
            (shown, came),
            place=course.scheduled[0] if course.scheduled else course.optimizer_place,
            places=_places(course.optimizer_place),
        )


def _eps(course: Course, last: Reading | None) -> Iterator[Complaint]:
    for kind, settings in course.settings:
        eps = settings.get("eps")
        if eps is None or "ada" not in kind.lower():
            continue
        later = course.probes[-1].parameters if course.probes else ()
        small = [p for p in later if p.has_gradient and 0 < p.gradient < 0.1 * eps]
        if small and sum(p.size for p in small) > _MOSTLY * sum(p.size for p in later):
            worst = max(small, key=lambda p: p.size)
            yield Complaint.of(
                Symptom.EPS_DOMINATES,
                Level.WARNING,
                f"eps is {eps:.2g}, the gradient of {worst.name} {worst.gradient:.2g} (RMS): its steps are "
                f"{worst.update / worst.rate if worst.rate else math.nan:.2g} of the learning rate",
                parameters=tuple(p.name for p in small),
                place=course.optimizer_place,
            )
            return


def _stale(course: Course, last: Reading | None) -> Iterator[Complaint]:
    """Yield an optimizer of Adam's kind whose steps are far smaller than its rate although eps is not to
    blame: its second moments remember larger gradients."""
    eps = max((s.get("eps", 0.0) for kind, s in course.settings if "adam" in kind.lower()), default=None)
    if eps is None:
        return
    small: list[tuple[int, ParameterSeen, float]] = []
    for probe in course.probes[-3:]:
        seen = [p for p in probe.parameters if p.gradient > 10 * eps and p.rate > 0 and len(p.shape) > 1]
        ratios = [p.update / p.rate for p in seen]
        if seen and median(ratios) < _OF_THE_RATE:
            small.append((probe.step, seen[0], median(ratios)))
    if len(small) == 3:
        step, worst, ratio = small[0]
        yield Complaint.of(
            Symptom.STALE_STATE,
            Level.FAULT if course.loaded_state else Level.WARNING,
            f"steps are {ratio:.2g} of the learning rate although the gradient of {worst.name} is "
            f"{worst.gradient:.2g} (RMS), far above eps: the second moments are of larger gradients",
            since=step,
            place=course.loaded_state or course.optimizer_place,
            places=course.made,
        )


def _decay(course: Course, last: Reading | None) -> Iterator[Complaint]:
    shrunk: dict[str, float] = {}
    for name in course.names():
        seen = course.history(name)
        first, end = seen[0][1].weight, seen[-1][1].weight
        rates = [p.shrink for _, p in seen if not math.isnan(p.shrink)]
        known = len(seen) > 2 and len(seen[0][1].shape) > 1 and first > 0
        if known and end < 0.5 * first and median(rates) * (seen[-1][0] - seen[0][0]) > 0.5:
            shrunk[name] = end / first
    matrices = [n for n in course.names() if len(course.history(n)[0][1].shape) > 1]
    if shrunk and len(shrunk) > _MOSTLY * len(matrices):
        name = min(shrunk, key=lambda n: shrunk[n])
        decay = max((s.get("weight_decay", 0.0) for _, s in course.settings), default=0.0)
        given = f" (weight_decay {decay:g})" if decay else ""
        yield Complaint.of(
            Symptom.WEIGHT_DECAY,
            Level.FAULT if decay > 0 or course.fall() < _FALLEN else Level.WARNING,
            f"{name} has shrunk to {shrunk[name]:.0%} of its size{given}, and so have {len(shrunk)} of "
            f"{len(matrices)} weights",
            parameters=tuple(shrunk),
            place=course.optimizer_place,
        )


def _bookkeeping(course: Course, last: Reading | None) -> Iterator[Complaint]:
    if len(course.kept) > max(2, 0.5 * (course.steps - 1)):
        yield Complaint.of(
            Symptom.GRADIENTS_KEPT,
            Level.FAULT,
            f"{len(course.kept)} of {course.steps} steps began with the gradients of the step before",
            place=course.kept_place,
            since=course.kept[0],
        )
    if len(course.renewed) > max(2, 0.5 * (course.steps - 1)):
        yield Complaint.of(
            Symptom.OPTIMIZER_RENEWED,
            Level.FAULT,
            f"{len(course.renewed)} new optimizers took {course.steps} steps",
            place=course.renewed_place,
            since=course.renewed[0],
        )


def _clipped(course: Course, last: Reading | None) -> Iterator[Complaint]:
    clips = [c for c in course.clips if c.bound > 0 and math.isfinite(c.norm)]
    over = [c for c in clips if c.norm > c.bound]
    if len(clips) > 2 and len(over) > 0.95 * len(clips):
        ratio = median([c.norm / c.bound for c in over])
        if ratio > 10:
            yield Complaint.of(
                Symptom.CLIPPED_ALWAYS,
                Level.WARNING if ratio > 100 or course.fall() < 0.3 else Level.NOTE,
                f"{len(over)} of {len(clips)} steps were clipped to {over[-1].bound:g}; the usual norm is "
                f"{ratio:.3g} times as large",
                place=over[-1].place or course.step_place,
            )


RULES = (
    _no_graph, _not_in_model, _not_in_optimizer, _gradients, _flushed, _rate, _lost, _sizes, _eps, _stale,
    _decay,    _bookkeeping, _clipped,
)  # fmt: skip
