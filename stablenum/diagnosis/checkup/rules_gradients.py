"""Rules on gradients: which parameters get one, and whether it arrives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from stablenum.diagnosis.checkup.course import HALFWAY_DOWN, NEARLY_DOWN, NOT_DOWN, UNTRAINED, Course
from stablenum.diagnosis.checkup.reading import LAYERS, Layer, Reading
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import joined, lines_assigning, lines_naming, places_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["RULES"]

# Units whose weights and gradients differ by less than this part of their size count as the same.
_ALIKE = 1e-3
# Operations that read rows of a table.
_TABLES = frozenset({"embedding", "gather", "index", "index_select", "take"})
# More than so many new optimizers, each for fewer than so many steps, are too many.
_MANY, _SOON = 4, 100
# What is said where a reentrant checkpoint gives no gradient to what is inside of it.
_CHECKPOINT = {
    "what": "a reentrant checkpoint gets nothing that needs a gradient, so the parameters inside it get none",
    "cure": "call checkpoint(..., use_reentrant=False), or let its input require a gradient "
    "(x.requires_grad_(), model.enable_input_require_grads() in Hugging Face)",
    "expects": "these parameters move",
}
_NO_STEP = "call optimizer.step() after the backward pass: no optimizer took a step"
# Before this step a gradient may well be 0.
_FEW = 10
# What happens in more than half of the steps, and in more than so many, is no accident.
_OFTEN, _LEAST_OFTEN = 0.5, 2
# Random numbers have a mean far below their size: less than this part of it.
_CENTRED = 0.5
# An operation flushes gradients to 0 if less than the first part of what it reads is 0, and more than the
# second of what it gives.
_ZERO_BEFORE, _ZERO_AFTER = 0.2, 0.7
# What is said where not only the optimizer's state is lost.
_DROPPED = {
    "what": "each step begins with the first parameters and the first optimizer state, so nothing is learned",
    "cure": "hand the new parameters and the new state that the step returns to the next step",
    "expects": "the parameters move",
}


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
    stepless: dict[str, Any] = {} if course.steps else {"cure": _NO_STEP}
    yield Complaint.of(
        Symptom.NOT_IN_OPTIMIZER,
        Level.NOTE if backbone and course.fall() > NOT_DOWN else Level.FAULT,
        f"{joined(course.outside)}: gradients, but no optimizer has "
        f"{'it' if len(course.outside) == 1 else 'them'}",
        parameters=course.outside,
        place=course.optimizer_place,
        places=places_of(
            course.constructed.get(course.outside[0]),
            course.initialised.get(course.outside[0]),
            step.place if step else None,
        ),
        module=course.outside[0].rpartition(".")[0],
        **stepless,
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
            and course.probes[-1].step >= _FEW
            and all(p.zero == 1.0 or not p.has_gradient for p in seen[1:])
        ):
            zero.append(name)
    # With several models, each has steps of its own.
    last = next((r for r in reversed(readings) if {*missing[:1], *zero[:1]} & {*r.first_use()}), last)
    used = last.first_use() if last else {}
    total = len(histories)

    def vectors(names: Sequence[str]) -> bool:
        # A bias may cancel, as the last one of a Wasserstein critic does.
        return all(len(histories[name][-1].shape) < 2 for name in names)

    if missing and last is not None and len(missing) < total:
        behind = _cut(last, missing)
        cut = None if behind is None else behind.place
        step = used.get(missing[0])
        checkpoint = next(iter(course.cut), None)
        unused = [name for name in missing if name not in used]
        why = " (the forward pass does not use them)" if len(unused) == len(missing) else ""
        yield Complaint.of(
            Symptom.NO_GRADIENT,
            Level.NOTE if vectors(missing) else Level.FAULT if checkpoint or cut else Level.WARNING,
            f"no gradient in {len(course.probes)} measured steps: {joined(missing)}{why}",
            parameters=tuple(missing),
            place=checkpoint or cut or (step.place if step else course.initialised.get(missing[0])),
            places=() if behind is None else tuple(reversed(behind.frames[:-1]))[:2],
            module=step.module if step else missing[0].rpartition(".")[0],
            **(_CHECKPOINT if checkpoint else {}),
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
        narrow = _narrow_layer(last) if everything and last is not None else None
        if narrow is not None and not any(map(_flushing, readings)):
            yield Complaint.of(
                Symptom.FLUSHED_GRADIENTS,
                Level.FAULT,
                f"every gradient is exactly 0 from step {course.probes[1].step} on; the layers compute in "
                f"{narrow.output.dtype}",
                since=course.probes[1].step,
                place=narrow.step.place,
                places=lines_naming("float16", course.step_place),
                module=narrow.step.module,
            )
        flat = next((one for one in course.custom if one.flat), None)
        by_rule = () if flat is None else places_of(flat.written, flat.place)
        named = () if flat is None else (f"the derivative that {flat.name} returns is exactly 0",)
        places = (*by_rule, *places_of(step.place if step else None))
        shown = (
            f"the gradient is exactly 0 from step {course.probes[1].step} on: "
            + (f"all {total} parameters" if everything else joined(zero)),
            *named,
        )
        yield Complaint.of(
            Symptom.ZERO_GRADIENT,
            Level.NOTE if vectors(zero) and not everything else Level.FAULT,
            shown,
            since=course.probes[1].step,
            parameters=tuple(zero),
            place=next(iter(places), None),
            places=places[1:],
            module=step.module if step else "",
        )


def _narrow_layer(reading: Reading) -> Layer | None:
    """Return the last layer that computes in float16, in which small gradients are 0."""
    return next((layer for layer in reversed(reading.layers) if layer.output.dtype == "float16"), None)


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


def _untrained(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield layers whose weights the model holds as plain arrays, so that nothing can train them."""
    if len(readings) < 2:
        return
    last, found = readings[-1], list[tuple[str, Step]]()
    before, after = (_held_as_arrays(reading) for reading in (readings[0], last))
    fixed = {name for name, seen in after.items() if seen == before.get(name)}
    for step in last.forward():
        sources = [last.source(i) for i in step.inputs]
        if step.operation not in LAYERS | _TABLES or any(v.role == "parameter" for v in sources):
            continue
        for value in sources:
            if value.role == UNTRAINED and value.name in fixed and value.name not in course.outside:
                found.append((value.name, step))
    if found:
        names = tuple(dict.fromkeys(name for name, _ in found))
        step = found[0][1]
        # The lines that assign the attribute.
        made = lines_assigning(names[0].rpartition(".")[2], step.place)
        yield Complaint.of(
            Symptom.NO_GRADIENT,
            Level.WARNING if not course.fall() > HALFWAY_DOWN else Level.NOTE,
            f"{joined(names)}: used as weights, but plain arrays, which no optimizer finds",
            parameters=names,
            place=next(iter(made), step.place),
            places=places_of(*made[1:], step.place),
            module=step.module,
            cure="make them torch.nn.Parameter" if course.framework == "torch" else "make them nnx.Param",
        )


def _held_as_arrays(reading: Reading) -> dict[str, tuple[float, float]]:
    """Return the size and the mean of the plain arrays of the model whose numbers look drawn at random.

    Arrays of one sign are masks, distances or adjacency matrices.
    """
    held = {v.name: reading.signals.get(v.id) for v in reading.trace.values if v.role == UNTRAINED}
    return {
        name: (seen.rms, seen.mean)
        for name, seen in held.items()
        if seen is not None and seen.least < 0 < seen.greatest and abs(seen.mean) < _CENTRED * seen.rms
    }


def _alike(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield weights whose units are still the same after steps that have moved them."""
    if len(course.probes) < 2:
        return
    moved = [p for p in course.probes[-1].parameters if len(p.shape) > 1 and p.weight > 0 and p.gradient > 0]
    inside = [p.name for p in moved if p.apart < _ALIKE]
    same: dict[object, list[str]] = {}
    for p in moved:
        # Arrays of the same elements have the same sums of squares, but for rounding.
        same.setdefault((p.shape, f"{p.weight:.5g}", f"{p.gradient:.5g}"), []).append(p.name)
    copies = max(same.values(), key=len, default=[])
    if not inside and len(copies) < 2:
        return
    names = inside or copies
    step = readings[-1].first_use().get(names[0])
    since = course.probes[-1].step
    known = course.initialised.get(names[0])
    given = places_of(known) or lines_assigning(names[0], course.step_place) or course.initialisers
    yield Complaint.of(
        Symptom.ALIKE_UNITS,
        Level.FAULT,
        f"{joined(names)}: "
        + ("all units are" if inside else "these arrays are")
        + f" still equal in step {since}, as are their gradients",
        parameters=tuple(names),
        place=next(iter(given), step.place if step else None),
        places=(*given[1:], *places_of(step.place if step else None)),
        module=names[0].rpartition(".")[0],
    )


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
                places=lines_naming(after.dtype, course.step_place),
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
            if (s := reading.signal(i)) is not None
            and (s.size == (after.size if after else 0) or (step.operation in LAYERS and i in gradients))
        ]
        if after is None or not before or after.size < 2:
            continue
        narrow = after.dtype in ("float16", "bfloat16")
        plain = step.operation in ("mul", "div", "cast") or (narrow and step.phase == "backward")
        worst = max(before, key=lambda s: s.zero)
        if any(_is_closed(reading, i) for i in step.inputs):
            continue
        if plain and worst.zero < _ZERO_BEFORE and after.zero > _ZERO_AFTER and worst.rms > 0:
            # Where a factor is 0, as in a mask or a gate that opens slowly, nothing is flushed.
            factors = [s.zero for i in step.inputs if (s := reading.signal(i)) is not None]
            if 0.0 not in step.scalars and math.fsum(factors) < after.zero:
                return step, worst, after
    return None


def _captured(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    if course.captured and course.steps > 2:
        yield Complaint.of(
            Symptom.CAPTURED_PARAMETERS,
            Level.FAULT,
            f"{joined(course.captured)}: constants of the step that was called {course.steps} times",
            parameters=course.captured,
            place=course.step_place,
            places=places_of(*(loss.place for loss in course.losses[:1])),
        )


def _bookkeeping(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    if len(course.kept) > max(_LEAST_OFTEN, _OFTEN * (course.steps - 1)):
        yield Complaint.of(
            Symptom.GRADIENTS_KEPT,
            Level.FAULT,
            f"{len(course.kept)} of {course.steps} steps began with the gradients of the step before",
            place=course.kept_place,
            since=course.kept[0],
        )
    number = min(len(course.renewed), course.steps)
    often = number > max(_LEAST_OFTEN, _OFTEN * (course.steps - 1))
    again = number > _MANY and course.steps / number < _SOON
    if often or again or course.unchanged_state > _LEAST_OFTEN:
        dropped = not (often or again) and _stands(course)
        same = "the same parameters and the same" if dropped else "the same"
        yield Complaint.of(
            Symptom.OPTIMIZER_RENEWED,
            # Each round of a distributed or staged training may start with a fresh optimizer.
            Level.NOTE if again and not often and course.fall() > NEARLY_DOWN else Level.FAULT,
            f"{number} new optimizers took {course.steps} steps"
            if often or again
            else f"each of {course.unchanged_state} measured steps began with {same} optimizer state",
            place=next(iter(course.renewed_places), None),
            places=course.renewed_places[1:],
            since=next(iter(course.renewed), 0),
            **(_DROPPED if dropped else {}),
        )


def _stands(course: Course) -> bool:
    """Return whether no parameter has changed between measured steps."""
    updates = [p.update for probe in course.probes for p in probe.parameters]
    return 0.0 in updates and not any(update > 0 for update in updates)


RULES = (
    _no_graph,
    _captured,
    _not_in_model,
    _not_in_optimizer,
    _gradients,
    _untrained,
    _alike,
    _flushed,
    _bookkeeping,
)
