"""Cures that can be tried on the first step: what is changed for it, and what the trial shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from stablenum.diagnosis.checkup.course import Course, Probe, median
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.rules_flow import activation_after, activation_of, gain_for, some
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom

__all__ = ["FirstStep", "deviations_for", "sizes_in", "with_trial"]

# A first step that suits most trainings changes a weight by this part of its size. Chosen, not measured.
_USUAL_STEP = 0.01


class FirstStep(Protocol):
    """The first step of a training, which can be evaluated again on its batch."""

    def with_weights(self, deviations: Mapping[str, float]) -> Probe:
        """Measure the step with these parameters drawn from normal distributions of these standard
        deviations."""

    def loss_after(self, part: float) -> float:
        """Return the loss after this part of the first update."""


def with_trial(found: Sequence[Complaint], course: Course, first: FirstStep | None) -> tuple[Complaint, ...]:
    """Try the cure of the first complaint, if it is one that can be tried."""
    if first is None or not found or found[0].level is Level.NOTE or not course.probes:
        return tuple(found)
    trial = _TRIALS.get(found[0].symptom)
    tried = "" if trial is None else trial(found[0], course, first)
    return (found[0].with_(tried=tried), *found[1:])


def _initialisation(one: Complaint, course: Course, first: FirstStep) -> str:
    deviations = deviations_for(one.parameters, course)
    shown = sizes_in(first.with_weights(deviations)) if deviations else ""
    return f"with that initialisation, {shown}" if shown else ""


def deviations_for(names: Sequence[str], course: Course) -> dict[str, float]:
    """Return the standard deviations with which to draw weights afresh, with the gain for the activation that
    follows, and 0 for their biases; empty if there are no weights among the names."""
    before = Reading(course.probes[0])
    shapes = {p.name: p.shape for p in course.probes[0].parameters}
    usual = gain_for(activation_of(before))
    gains = {layer.weight: gain_for(activation_after(before, layer)) for layer in before.layers}
    weights = [name for name in names if len(shapes.get(name, ())) > 1]
    read = {layer.weight: layer.input.shape[-1] for layer in before.chain if layer.input is not None}
    inputs = {name: _inputs(shapes[name], read.get(name, 0), course.framework) for name in weights}
    drawn = {name: gains.get(name, usual) / math.sqrt(count) for name, count in inputs.items()}
    return {**dict.fromkeys(_biases(weights, shapes), 0.0), **drawn}


def sizes_in(probe: Probe) -> str:
    """Describe how large a step's activations and gradients are, layer by layer; "" if it has no layers."""
    found = _sizes(Reading(probe))
    return "; ".join(f"{what}: {', '.join(f'{x:.2g}' for x in some(values))}" for what, values in found)


def _inputs(shape: tuple[int, ...], read: int, framework: str) -> int:
    """Return the number of inputs of each unit.

    Args:
        shape: the weight's shape.
        read: the length of the last axis of what the layer reads, which tells the axes of a matrix apart.
        framework: torch's kernels have their inputs behind the outputs, JAX's in front of them.
    """
    if len(shape) == 2 and read in shape:
        return read
    return math.prod(shape[1:] if framework == "torch" else shape[:-1])


def _biases(weights: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the vectors beside these weights whose name begins with b."""
    folders = {name.rpartition(".")[0] for name in weights}
    split = [(name, *name.rpartition(".")[::2]) for name, shape in shapes.items() if len(shape) == 1]
    return [name for name, folder, last in split if folder in folders and last.startswith("b")]


def _sizes(reading: Reading) -> list[tuple[str, list[float]]]:
    gradients = [g.norm for layer in reading.chain if (g := reading.gradient(layer.step)) is not None]
    found = [
        ("size of the layers' outputs", [layer.output.rms for layer in reading.chain]),
        ("norm of their gradients", gradients),
    ]
    return [(what, values) for what, values in found if len(values) > 1]


def _rate(one: Complaint, course: Course, first: FirstStep) -> str:
    """Take a part of the first update, so that it has a usual size."""
    changes = [p.relative for p in course.probes[0].parameters if len(p.shape) > 1 and p.update > 0]
    change, losses = median(changes), course.values
    if math.isnan(change) or len(losses) < 2 or course.probes[0].step != 0:
        return ""
    part = 10.0 ** min(-1, round(math.log10(_USUAL_STEP / change)))
    loss = first.loss_after(part)
    return (
        f"with {part:g} times the rate, the first step takes the loss from {losses[0]:.4g} to {loss:.4g}, "
        f"while the loss of the next step was {losses[1]:.4g}"
    )


_TRIALS = {
    Symptom.EXPLODING_ACTIVATIONS: _initialisation,
    Symptom.VANISHING_ACTIVATIONS: _initialisation,
    Symptom.STEPS_TOO_LARGE: _rate,
}
