"""Rules on what the model reads and puts out: inputs, targets, shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import NEARLY_DOWN, Course
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import places_of
from stablenum.diagnosis.replay.source_files import lines_with

__all__ = ["RULES"]

# Inputs with a larger root mean square are not scaled; bytes have about 100, standardised data 1. So are
# those with a smaller one than the second.
_INPUT, _SMALL = 30.0, 1e-3
# Beyond this many times that bound, inputs are a fault rather than a warning, if the loss does not come down.
_FAR = 10
# How scripts make arrays of their data.
_DATA = r"torch\.(?:as_)?tensor\(|from_numpy\(|\.FloatTensor\(|jnp\.(?:as)?array\("
# Targets so many times larger than the output.
_TARGET = 30.0
# Items of a batch so similar, relative to the output's size, are the same.
_CONSTANT = 1e-4
# Random numbers are the same in every step if they were in at least so many. Chosen, not measured: a schedule
# may well use one key for a few steps.
_LEAST_DRAWN = 5
# An output is constant if it was in so many of the last measured steps.
_LAST = 3


def _inputs(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    if not readings:
        return
    reading = readings[0]
    for layer in reading.chain:
        found = layer.input
        if found is None or not reading.is_data(layer.source) or found.size < 2:
            continue
        if found.rms > _INPUT or 0 < found.rms < _SMALL:
            poor = not course.fall() > NEARLY_DOWN
            yield Complaint.of(
                Symptom.UNSCALED_INPUT,
                Level.FAULT if poor and found.rms > _FAR * _INPUT else Level.WARNING if poor else Level.NOTE,
                f"the input of {layer.weight or 'the first layer'} has a root mean square of "
                f"{found.rms:.3g}, mean {found.mean:.3g}, values in "
                f"[{found.least:.3g}, {found.greatest:.3g}]",
                place=layer.step.place,
                places=lines_with(course.step_place, _DATA),
                module=layer.step.module,
                parameters=(layer.weight,),
            )
            return


def _targets(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    if not readings:
        return
    reading = readings[0]
    for step, output, data in reading.targets():
        target, made = reading.signal(data), reading.signal(output)
        if target is None or made is None or step.operation not in _COMPARING:
            continue
        if target.rms > _TARGET * max(made.rms, _SMALL) and target.rms > _INPUT:
            yield Complaint.of(
                Symptom.UNSCALED_TARGET,
                Level.WARNING if not course.fall() > NEARLY_DOWN else Level.NOTE,
                f"the targets have a root mean square of {target.rms:.3g}, the output {made.rms:.3g}",
                place=step.place,
                places=lines_with(course.step_place, _DATA),
                module=step.module,
            )
            return


_COMPARING = ("sub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def _broadcast(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    last = readings[-1] if readings else None
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


def _wrong_axis(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    last = readings[-1] if readings else None
    output = None if last is None else last.output()
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
                place=course.initialised.get(one.weight, one.place),
                places=places_of(one.place),
                module=one.module,
            )
            return


def _before_loss(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield an activation whose output is taken for logits."""
    last = readings[-1] if readings else None
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
        if read.operation == "log_softmax" or step.index not in last.differentiated or not last.is_last(step):
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


def _log_probabilities(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield a loss on log-probabilities that reads numbers above 0, which are none."""
    last = readings[-1] if readings else None
    for step in () if last is None else last.forward():
        read = last.signal(step.inputs[0]) if last is not None and step.inputs else None
        if "nll_loss" in step.primitive and read is not None and read.greatest > _ABOVE:
            yield Complaint.of(
                Symptom.ACTIVATION_BEFORE_LOSS,
                Level.FAULT,
                f"nll_loss reads values up to {read.greatest:.3g}",
                place=step.place,
                module=step.module,
                what="the loss expects log-probabilities but reads other numbers, so it has no lower bound",
                cure="use cross_entropy, which takes logits, or apply log_softmax first",
            )
            return


def _over_batch(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield a softmax at the end that runs over the items of the batch."""
    last = readings[-1] if readings else None
    output = None if last is None else last.output()
    made = None if last is None or output is None else last.signal(output[1])
    if last is None or made is None or len(made.shape) < 2 or made.shape[1] in (1, made.shape[0]):
        return
    for step in last.forward():
        if step.operation not in _ON_LOGITS or step.options.get("axis") not in (0, (0,)):
            continue
        read = last.signal(step.inputs[0])
        if read is not None and read.shape == made.shape and last.is_last(step):
            yield Complaint.of(
                Symptom.WRONG_AXIS,
                Level.FAULT,
                f"{step.operation} runs over axis 0 of shape {list(read.shape)}",
                place=step.place,
                module=step.module,
                what="probabilities add up to 1 over the batch, not over the classes",
                cure="give the axis of the classes, which is usually the last one (-1)",
                expects="probabilities that depend on their own item alone",
            )
            return


def _unreachable(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield targets that the last activation cannot give."""
    for step, output, data in readings[0].targets() if readings else ():
        target, last = readings[0].signal(data), readings[0].producer(output)
        if (
            target is None
            or last is None
            or step.operation not in _COMPARING
            or last.operation not in _RANGES
        ):
            continue
        least, most = _RANGES[last.operation]
        margin = _BEYOND * max(1.0, target.rms)
        # Single targets may lie outside of a bounded range, but not the usual one.
        usual = math.isinf(most) or target.rms > most + _BEYOND
        if usual and (target.least < least - margin or target.greatest > most + margin):
            yield Complaint.of(
                Symptom.UNSCALED_TARGET,
                Level.WARNING if not course.fall() > NEARLY_DOWN else Level.NOTE,
                f"the targets are in [{target.least:.3g}, {target.greatest:.3g}]; {last.operation} gives "
                f"[{least:g}, {most:g}]",
                place=last.place,
                places=places_of(step.place),
                module=last.module,
                what="the targets lie outside of what the last activation can give",
                cure="leave that activation out, or scale the targets into its range",
            )
            return


# Targets that lie outside of what an activation gives by more than this part of their size are out of reach.
_BEYOND = 0.5
# Activation -> what it gives.
_RANGES = {"sigmoid": (0.0, 1.0), "softmax": (0.0, 1.0), "tanh": (-1.0, 1.0), "relu": (0.0, math.inf)}
# Log-probabilities end at 0, but for rounding.
_ABOVE = 0.01
_ON_LOGITS = ("cross_entropy", "log_softmax", "softmax")


def _out_of_range(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    for reading in readings:
        for index, shown in reading.probe.out_of_range.items():
            step = reading.trace.steps[index]
            if step.phase == "forward":
                yield Complaint.of(
                    Symptom.INDEX_OUT_OF_RANGE,
                    Level.FAULT,
                    shown,
                    since=reading.probe.step,
                    place=step.place,
                    places=step.frames[:-1][::-1][:2],
                    module=step.module,
                )
                return


def _constant(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    spreads = []
    for reading in readings[-_LAST:]:
        output = reading.output()
        found = None if output is None else reading.signal(output[1])
        if output is None or found is None or math.isnan(found.spread) or found.shape[0] < 2:
            return
        given = reading.chain[0].input
        if given is not None and given.spread < _CONSTANT:  # a batch of one item, many times
            return
        spreads.append((found.spread, found.rms, output[0]))
    if len(spreads) < 2 or any(s >= _CONSTANT for s, _, _ in spreads):
        return
    spread, rms, step = spreads[-1]
    yield Complaint.of(
        Symptom.CONSTANT_OUTPUT,
        # Where all targets are the same, so is a good output.
        Level.NOTE if course.fall() > NEARLY_DOWN else Level.FAULT,
        f"the outputs of a batch differ by {spread:.2g} of their size ({rms:.2g})",
        place=step.place,
        module=step.module,
    )


def _same_numbers(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield random numbers that every measured step has drawn with the same keys."""
    drawn = [probe.drawn for probe in course.probes if probe.drawn]
    if len(drawn) < _LEAST_DRAWN or len(drawn) < len(course.probes):
        return
    if any([d.key for d in one] != [d.key for d in drawn[0]] for one in drawn):
        return
    places = list(dict.fromkeys(d.place for d in drawn[0]))
    yield Complaint.of(
        Symptom.SAME_RANDOM_NUMBERS,
        Level.WARNING,
        f"{len({d.key for d in drawn[0]})} keys, the same in all {len(drawn)} measured steps",
        place=places[0],
        places=places_of(*places[1:], course.step_place),
    )


RULES = (
    _out_of_range,
    _same_numbers,
    _inputs,
    _log_probabilities,
    _over_batch,
    _unreachable,
    _targets,
    _broadcast,
    _wrong_axis,
    _before_loss,
    _constant,
)
