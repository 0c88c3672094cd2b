"""Rules on what flows through the layers: activations, gradients, inputs, outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import Course, median
from stablenum.diagnosis.checkup.reading import Layer, Reading
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.replay.trace import Step

__all__ = ["RULES"]

# A chain of layers has at least so many.
_LEAST_LAYERS = 3
# The ratio between the first layer and the last, or the extreme one, beyond which a signal explodes or
# vanishes. A sound initialisation keeps it within about 10.
_RATIO = 1e3
_GRADIENT_RATIO = 1e4
# Inputs with a larger root mean square are not scaled; bytes have about 100, standardised data 1.
_INPUT = 30.0
# Targets so many times larger than the output.
_TARGET = 30.0
_SATURATED = 0.8
_DEAD = 0.9
# Items of a batch so similar, relative to the output's size, are the same.
_CONSTANT = 1e-4
_FALLEN = 0.3
_LOGIT = 50.0
# After so many steps running statistics with momentum 0.1 are those of the data; further apart than by this
# factor they are not. Fewer values per channel than this give no statistics.
_SETTLED, _APART, _FEW = 50, 4.0, 4

# Activation -> the initialisation for it, with its gain.
_INITIALISATIONS = {
    "relu": "Kaiming (He) initialisation, gain sqrt(2)",
    "leaky_relu": "Kaiming (He) initialisation for its slope",
    "gelu": "Kaiming (He) initialisation",
    "silu": "Kaiming (He) initialisation",
    "tanh": "Xavier (Glorot) initialisation, gain 5/3",
    "sigmoid": "Xavier (Glorot) initialisation, gain 1",
}


def _activation(reading: Reading, layer: Layer) -> str:
    """Return the activation that reads a layer's output; "" for none."""
    value = layer.step.outputs[0]
    for _ in range(6):
        readers = [s for s in reading.readers.get(value, []) if s.phase == "forward" and s.outputs]
        known = next((s.operation for s in readers if s.operation in _INITIALISATIONS), "")
        if known or not readers:
            return known
        value = readers[0].outputs[0]
    return ""


def _activations(course: Course, last: Reading | None) -> Iterator[Complaint]:
    if not course.probes:
        return
    reading = Reading(course.probes[0])
    chain = reading.chain()
    if len(chain) < _LEAST_LAYERS:
        return
    sizes = [layer.output.rms for layer in chain]
    first = next((s for s in sizes if s > 0), 0.0)
    if not first:
        return
    # A branch that begins at 0 is left out.
    top, low = max(sizes), min((s for s in sizes[1:] if s > 0), default=first)
    gains = [(b / a if a > 0 else 0.0, layer) for a, b, layer in zip(sizes, sizes[1:], chain[1:])]
    activation = next((a for layer in chain if (a := _activation(reading, layer))), "")
    init = _INITIALISATIONS.get(activation, "Xavier or Kaiming initialisation")
    shown = (
        "size (RMS) of the layers' outputs: " + ", ".join(f"{s:.2g}" for s in _some(sizes)),
        f"gain per layer {median([g for g, _ in gains]):.2g}; {activation or 'this chain'} needs about 1",
    )
    if top / first > _RATIO and course.probes[0].step == 0:
        worst = next((layer for gain, layer in gains if gain > 2), gains[0][1])
        symptom = Symptom.EXPLODING_ACTIVATIONS
    elif low / first < 1 / _RATIO and course.probes[0].step == 0:
        worst = next((layer for gain, layer in gains if gain < 0.5), gains[0][1])
        symptom = Symptom.VANISHING_ACTIVATIONS
    else:
        return
    yield Complaint.of(
        symptom,
        Level.NOTE if course.fall() > 0.5 and low / first > 1 / _RATIO**2 else Level.FAULT,
        shown,
        cure=f"use {init}: torch.nn.init or the initialiser of the layer"
        if course.framework == "torch"
        else f"use {init}: jax.nn.initializers",
        place=course.initialised.get(worst.weight, worst.step.place),
        places=tuple(p for p in (worst.step.place,) if p is not None),
        module=worst.step.module,
        parameters=tuple(dict.fromkeys(layer.weight for layer in chain if layer.weight)),
    )


def _some(sizes: Sequence[float]) -> Sequence[float]:
    return sizes if len(sizes) <= 8 else [*sizes[:4], *sizes[-4:]]


def _gradient_flow(course: Course, last: Reading | None) -> Iterator[Complaint]:
    for probe in course.probes[:3]:
        reading = Reading(probe)
        pairs = [(layer, g.norm) for layer in reading.chain() if (g := reading.gradient(layer.step))]
        pairs = [(layer, norm) for layer, norm in pairs if norm > 0]
        if len(pairs) < _LEAST_LAYERS:
            continue
        first, end = pairs[0][1], pairs[-1][1]
        sizes = [norm for _, norm in pairs]
        over = (
            "time" if len({(p[0].step.place, p[0].step.module) for p in pairs}) < len(pairs) / 2 else "depth"
        )
        shown = (
            f"norm of the gradient of the layers' outputs, first to last, over {over}: "
            + ", ".join(f"{s:.2g}" for s in _some(sizes)),
        )
        worst = pairs[0][0]
        if first / end > _GRADIENT_RATIO:
            symptom = Symptom.EXPLODING_GRADIENTS
        elif end / first > _GRADIENT_RATIO:
            symptom = Symptom.VANISHING_GRADIENTS
        else:
            continue
        yield Complaint.of(
            symptom,
            Level.FAULT if not course.fall() > _FALLEN else Level.NOTE,
            shown,
            since=probe.step,
            place=worst.step.place,
            places=tuple(p for p in (course.initialised.get(worst.weight),) if p is not None),
            module=worst.step.module,
        )
        return


def _detached(course: Course, last: Reading | None) -> Iterator[Complaint]:
    """Yield a layer that ran in a loop, of whose rounds only the last ones are differentiated."""
    if last is None or not last.probe.exact:
        return
    rounds: dict[tuple[object, ...], list[Layer]] = {}
    for layer in last.layers():
        rounds.setdefault((layer.step.place, layer.step.module, layer.weight), []).append(layer)
    for layers in rounds.values():
        trained = [layer.step.index in last.differentiated for layer in layers]
        number = sum(trained)
        if len(layers) < 3 or not 0 < number < len(layers) / 2 or not all(trained[-number:]):
            continue
        first = layers[-number]
        if first.source not in last.from_parameters:
            continue  # rounds that do not depend on one another
        cut = [
            s.place
            for s in last.trace.steps[layers[-number - 1].step.index : first.step.index]
            if "detach" in s.primitive and s.place not in (None, first.step.place)
        ]
        yield Complaint.of(
            Symptom.DETACHED,
            Level.FAULT,
            f"{number} of {len(layers)} rounds have a derivative",
            place=cut[-1] if cut else first.step.place,
            places=tuple(p for p in (first.step.place,) if p is not None),
            module=first.step.module,
        )
        return


def _inputs(course: Course, last: Reading | None) -> Iterator[Complaint]:
    if not course.probes:
        return
    reading = Reading(course.probes[0])
    for layer in reading.chain():
        found = layer.input
        if found is None or not reading.is_data(layer.source) or found.size < 2:
            continue
        if found.rms > _INPUT or 0 < found.rms < 1e-3:
            poor = not course.fall() > 0.9
            yield Complaint.of(
                Symptom.UNSCALED_INPUT,
                Level.FAULT if poor and found.rms > 10 * _INPUT else Level.WARNING if poor else Level.NOTE,
                f"the input of {layer.weight or 'the first layer'} has a root mean square of "
                f"{found.rms:.3g}, mean {found.mean:.3g}, values in "
                f"[{found.least:.3g}, {found.greatest:.3g}]",
                place=layer.step.place,
                module=layer.step.module,
            )
            return


def _targets(course: Course, last: Reading | None) -> Iterator[Complaint]:
    if not course.probes:
        return
    reading = Reading(course.probes[0])
    for step, output, data in reading.targets():
        target, made = reading.signal(data), reading.signal(output)
        if target is None or made is None or step.operation not in _COMPARING:
            continue
        if target.rms > _TARGET * max(made.rms, 1e-3) and target.rms > _INPUT:
            yield Complaint.of(
                Symptom.UNSCALED_TARGET,
                Level.WARNING if not course.fall() > 0.9 else Level.NOTE,
                f"the targets have a root mean square of {target.rms:.3g}, the output {made.rms:.3g}",
                place=step.place,
                module=step.module,
            )
            return


_COMPARING = ("sub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def _broadcast(course: Course, last: Reading | None) -> Iterator[Complaint]:
    if last is None:
        return
    for step, output, data in last.targets():
        a, b = last.signal(output), last.signal(data)
        made = last.signals.get(step.outputs[0]) if step.outputs else None
        if a is None or b is None or step.operation not in _COMPARING:
            continue
        joint = made.shape if made is not None else ()
        n = max(a.size, b.size)
        if a.size == b.size == n > 1 and joint == (n, n) and 1 in (*a.shape, *b.shape):
            yield Complaint.of(
                Symptom.BROADCAST_LOSS,
                Level.FAULT,
                f"shapes {list(a.shape)} and {list(b.shape)} became {list(joint)}",
                place=step.place,
                module=step.module,
            )
            return


def _wrong_axis(course: Course, last: Reading | None) -> Iterator[Complaint]:
    output = None if last is None else _output(last)
    found = None if last is None or output is None else last.signal(output[1])
    if last is None or found is None or not found.shape:
        return
    for one in last.probe.recurrences:
        if found.shape[0] == one.time != one.batch:
            yield Complaint.of(
                Symptom.WRONG_AXIS,
                Level.FAULT,
                f"it ran over {one.time} steps with a batch of {one.batch}; the output has "
                f"{found.shape[0]} rows",
                place=course.initialised.get(f"{one.module}.weight_ih_l0", one.place),
                places=tuple(p for p in (one.place,) if p is not None),
                module=one.module,
            )
            return


def _normalisation(course: Course, last: Reading | None) -> Iterator[Complaint]:
    """Yield batch norms whose running statistics are not those of the batches, or are used in training."""
    if last is None or course.steps < _SETTLED:
        return
    for step in last.forward():
        if step.operation != "batch_norm" or len(step.outputs) < 5 or step.index not in last.differentiated:
            continue
        after = [last.signals.get(i) for i in step.outputs]
        mean, variance, batch_mean, inverse = after[0], after[1], after[-2], after[-1]
        if mean is None or variance is None:
            continue
        own = _weight_of(last, step)
        common = {"module": step.module, "place": course.initialised.get(own, step.place)}
        if batch_mean is None or inverse is None:
            made = after[2]
            if made is not None and not 0.1 < made.rms < 10 and own in course.inside:
                yield Complaint.of(
                    Symptom.BATCH_NORM,
                    Level.WARNING,
                    "it runs in evaluation mode, with running statistics that leave values of size "
                    f"{made.rms:.2g}",
                    **common,
                )
                return
            continue
        deviation = 1.0 / inverse.rms
        shift = abs(mean.rms - batch_mean.rms) / deviation
        ratio = variance.mean / deviation**2
        count = (after[2].size / max(1, mean.size)) if after[2] is not None else _FEW
        shown = (
            f"after {course.steps} steps its running variance is {ratio:.2g} times that of the batch, and "
            "its "
            f"running mean is {shift:.2g} standard deviations away"
        )
        if count < _FEW and len(last.probe.parameters) > 0:
            yield Complaint.of(
                Symptom.BATCH_NORM,
                Level.WARNING,
                f"its statistics come from {count:.0f} values per channel",
                **common,
            )
            return
        if not 1 / _APART < ratio < _APART or shift > 1.0:
            yield Complaint.of(Symptom.BATCH_NORM, Level.WARNING, shown, **common)
            return


def _weight_of(reading: Reading, step: Step) -> str:
    return next(
        (v.name for i in step.inputs if (v := reading.trace.values[i]).role == "parameter" and v.name), ""
    )


def _before_loss(course: Course, last: Reading | None) -> Iterator[Complaint]:
    """Yield an activation whose output is taken for logits."""
    if last is None:
        return
    for step in last.forward():
        if step.operation not in _ON_LOGITS and "with_logits" not in step.primitive:
            continue
        read = next((last.producer(i) for i in step.inputs if i in last.from_parameters), None)
        loss = step.operation != "softmax"
        wrong = ("softmax", "sigmoid", "relu", "log_softmax") if loss else ("softmax",)
        if read is None or read.phase != "forward" or read.operation not in wrong:
            continue
        if read.operation == step.operation and (read.place, read.module) == (step.place, step.module):
            continue  # two parts of one call
        if (
            read.operation == "log_softmax"
            or step.index not in last.differentiated
            or not _is_last(last, step)
        ):
            continue
        yield Complaint.of(
            Symptom.ACTIVATION_BEFORE_LOSS,
            Level.FAULT,
            f"{step.operation} reads the output of {read.operation}",
            place=read.place,
            places=tuple(p for p in (step.place,) if p is not None),
            module=read.module,
        )
        return


_ON_LOGITS = ("cross_entropy", "log_softmax", "softmax")


def _is_last(reading: Reading, step: Step) -> bool:
    """Return whether no layer reads what comes of this step."""
    todo, seen = list(step.outputs), set()
    layers = {layer.step.index for layer in reading.layers()}
    while todo:
        for reader in reading.readers.get(todo.pop(), []):
            if reader.index in seen or reader.phase != "forward":
                continue
            if reader.index in layers or reader.operation in ("matmul", "bmm"):
                return False
            seen.add(reader.index)
            todo += reader.outputs
    return True


def _saturated(course: Course, last: Reading | None) -> Iterator[Complaint]:
    for probe in course.probes:
        reading = Reading(probe)
        for step in reading.forward():
            if step.operation not in ("sigmoid", "tanh", "softmax") or not step.outputs:
                continue
            found = reading.signals.get(step.outputs[0])
            if found is None or not found.saturated > _SATURATED or step.index not in reading.differentiated:
                continue
            final = _is_last(reading, step)
            if (final and probe.step > 2) or (step.operation == "softmax" and not final):
                continue  # a trained model is sure of itself; attention has its own rule
            into = reading.signal(step.inputs[0])
            yield Complaint.of(
                Symptom.SATURATED,
                Level.FAULT if not course.fall() > _FALLEN else Level.NOTE,
                (
                    f"{found.saturated:.0%} of {step.operation}'s output is within 0.01 of the edge",
                    *([f"it reads values of size {into.rms:.3g} (RMS)"] if into is not None else []),
                ),
                since=probe.step,
                place=step.place,
                module=step.module,
            )
            return


def _dead(course: Course, last: Reading | None) -> Iterator[Complaint]:
    found: dict[tuple[object, str], list[tuple[int, float, Step]]] = {}
    for probe in course.probes:
        reading = Reading(probe)
        for step in reading.forward():
            made = reading.signals.get(step.outputs[0]) if step.outputs else None
            if step.operation != "relu" or made is None or math.isnan(made.dead):
                continue
            rows = made.size / max(1, made.shape[1 if len(made.shape) in (4, 5) else -1])
            part = made.dead if rows >= 8 or made.dead == 1.0 else 0.0
            found.setdefault((step.place, step.module), []).append((probe.step, part, step))
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
    yield Complaint.of(
        Symptom.DEAD_UNITS,
        Level.FAULT if end == 1.0 or not course.fall() > _FALLEN else Level.WARNING,
        (
            f"{end:.0%} of the units are 0 for the whole batch since step {since} ({began:.0%} at first)",
            *([jump] if jump else []),
        ),
        since=since,
        place=step.place,
        module=step.module,
    )


def _jump(course: Course, since: int) -> str:
    """Describe the step after which something was first seen."""
    before = [p for probe in course.probes if probe.step < since for p in probe.parameters]
    large = [p for p in before if len(p.shape) > 1 and p.relative > 0.1]
    if not large:
        return ""
    worst = max(large, key=lambda p: p.relative)
    return f"a step before it changed {worst.name} by {worst.relative:.2g} of its size"


def _constant(course: Course, last: Reading | None) -> Iterator[Complaint]:
    spreads = []
    for probe in course.probes[-3:]:
        reading = Reading(probe)
        output = _output(reading)
        found = None if output is None else reading.signal(output[1])
        if output is None or found is None or math.isnan(found.spread) or found.shape[0] < 2:
            return
        spreads.append((found.spread, found.rms, output[0]))
    if len(spreads) < 2 or any(s >= _CONSTANT for s, _, _ in spreads):
        return
    spread, rms, step = spreads[-1]
    yield Complaint.of(
        Symptom.CONSTANT_OUTPUT,
        Level.FAULT,
        f"the outputs of a batch differ by {spread:.2g} of their size ({rms:.2g})",
        place=step.place,
        module=step.module,
    )


def _output(reading: Reading) -> tuple[Step, int] | None:
    """Return the last layer's step and the id of its output."""
    chain = reading.chain()
    return (chain[-1].step, chain[-1].step.outputs[0]) if chain else None


def _attention(course: Course, last: Reading | None) -> Iterator[Complaint]:
    for symptom in (Symptom.ATTENTION_COLLAPSE, Symptom.ROUTER_COLLAPSE):
        for probe in course.probes:
            reading = Reading(probe)
            found = _softmax_inside(reading, symptom)
            if found is not None:
                step, shown = found
                yield Complaint.of(
                    symptom,
                    Level.FAULT if not course.fall() > _FALLEN else Level.WARNING,
                    shown,
                    since=probe.step,
                    place=step.place,
                    module=step.module,
                )
                break


def _logits(reading: Reading, step: Step) -> Signal | None:
    """Return what a softmax reads, whose last step this is."""
    while step.inputs:
        before = reading.producer(step.inputs[0])
        if before is None or before.operation != step.operation or before.place != step.place:
            return reading.signal(step.inputs[0])
        step = before
    return None


def _softmax_inside(reading: Reading, symptom: Symptom) -> tuple[Step, tuple[str, ...]] | None:
    for step in reading.forward():
        if step.operation != "softmax" or step.index not in reading.differentiated or _is_last(reading, step):
            continue
        made = reading.signals.get(step.outputs[0]) if step.outputs else None
        into = _logits(reading, step)
        if made is None or math.isnan(made.entropy) or made.shape[-1] < 2:
            continue
        size = max(abs(into.least), abs(into.greatest)) if into is not None else math.nan
        attention = len(made.shape) > 2
        if symptom is Symptom.ATTENTION_COLLAPSE and attention and made.entropy < 0.15 and size > _LOGIT:
            return step, (
                f"the largest logit is {size:.3g}, the entropy {made.entropy:.1%} of a uniform row's",
            )
        if symptom is Symptom.ROUTER_COLLAPSE and not attention and made.load > 0.9:
            return step, (f"one of {made.shape[-1]} entries has {made.load:.0%} of the weight of the batch",)
    return None


RULES = (
    _activations, _gradient_flow, _detached, _inputs, _targets, _broadcast, _wrong_axis, _normalisation,
    _before_loss,    _saturated, _dead, _constant,    _attention,
)  # fmt: skip
