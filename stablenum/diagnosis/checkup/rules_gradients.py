"""Rules on gradients: which parameters get one, and whether it arrives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import Course
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import joined, places_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["RULES"]

# A loss that has fallen by less than this part of its first value has not come down.
_FALLEN = 0.1
# In fewer steps than this a gradient may well be 0.
_FEW = 10


def _no_graph(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    if course.groundless is not None:
        yield Complaint.of(
            Symptom.NO_GRAPH,
            Level.FAULT,
            "the backward pass started at a tensor without a graph",
            place=course.groundless,
        )


def _not_in_model(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    if course.strangers:
        yield Complaint.of(
            Symptom.NOT_IN_MODEL,
            Level.FAULT,
            f"{course.strangers} parameters of the optimizer belong to no module and got no gradient",
            place=course.optimizer_place,
        )


def _not_in_optimizer(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    last = readings[-1] if readings else None
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
        places=places_of(course.initialised.get(course.outside[0]), step.place if step else None),
        module=course.outside[0].rpartition(".")[0],
    )


def _gradients(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield parameters without a gradient, and with a gradient of zeros."""
    last = readings[-1] if readings else None
    missing, zero = [], []
    histories = {name: [p for _, p in course.history(name)] for name in course.names()}
    for name, seen in histories.items():
        if not any(p.has_gradient for p in seen):
            missing.append(name)
        elif (
            len(seen) > 1
            and course.steps >= _FEW
            and all(p.zero == 1.0 or not p.has_gradient for p in seen[1:])
        ):
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
    """Return the last step that is not differentiated, on the way from these parameters to the loss; None if
    the way does not end at one."""
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
    # What leaves the framework, as an array of NumPy does, is detached last.
    return last if last is not None and "detach" in last.primitive else None


def _flushed(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield the first step that turns gradients that are not 0 into 0."""
    for reading in readings:
        found = _flushing(reading)
        if found is not None:
            step, before, after = found
            factor = f" by {step.scalars[0]:.3g}" if step.operation in ("mul", "div") and step.scalars else ""
            yield Complaint.of(
                Symptom.FLUSHED_GRADIENTS,
                Level.FAULT,
                f"{step.operation}{factor}: {before.zero:.0%} of the elements were 0 before (RMS "
                f"{before.rms:.2g}), {after.zero:.0%} are after, in {after.dtype}",
                since=reading.probe.step,
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


def _bookkeeping(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
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


RULES = (_no_graph, _not_in_model, _not_in_optimizer, _gradients, _flushed, _bookkeeping)
