"""Rules on what flows through a chain of layers: activations forward, gradients backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from stablenum.diagnosis.checkup.course import HALFWAY_DOWN, PARTLY_DOWN, Course, median
from stablenum.diagnosis.checkup.reading import Layer, Reading
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import places_of
from stablenum.diagnosis.replay.values import Place

__all__ = ["RULES", "activation_after", "activation_of", "gain_for", "some"]

# A chain of layers, or of rounds of one, has at least so many.
_LEAST_LAYERS = 3
# The ratio between the first layer and the last, or the extreme one, beyond which a signal explodes or
# vanishes. A sound initialisation keeps it within about 10.
_RATIO = 1e3
# The same of gradients, which vary more along a chain that trains.
_GRADIENT_RATIO = 1e4
# The layer is named that first makes a signal larger, or smaller, by more than twice.
_GAIN, _LOSS = 2, 0.5
# The activation after a layer may follow so many other operations. Chosen, not measured.
_MOST_BETWEEN = 6
# Gradients are looked at in so many of the first measured steps.
_FIRST = 3
# Sizes are shown up to so many, of which half are the first and half the last ones. Chosen, not measured.
_MOST_SHOWN = 8

# Activation -> the initialisation for it, and its gain.
_INITIALISATIONS = {
    "relu": ("Kaiming (He) initialisation, gain sqrt(2)", math.sqrt(2)),
    "leaky_relu": ("Kaiming (He) initialisation for its slope", math.sqrt(2)),
    "gelu": ("Kaiming (He) initialisation", math.sqrt(2)),
    "silu": ("Kaiming (He) initialisation", math.sqrt(2)),
    "tanh": ("Xavier (Glorot) initialisation, gain 5/3", 5 / 3),
    "sigmoid": ("Xavier (Glorot) initialisation, gain 1", 1.0),
}


def activation_of(reading: Reading) -> str:
    """Return the first activation in the chain of layers; "" for none."""
    return next((a for layer in reading.chain if (a := activation_after(reading, layer))), "")


def gain_for(activation: str) -> float:
    """Return the factor on 1 / sqrt(inputs) that keeps a signal's size through layers and activations."""
    return _INITIALISATIONS.get(activation, ("", 1.0))[1]


def activation_after(reading: Reading, layer: Layer) -> str:
    """Return the activation that reads a layer's output; "" for none."""
    value = layer.step.outputs[0]
    for _ in range(_MOST_BETWEEN):
        readers = [s for s in reading.readers.get(value, []) if s.phase == "forward" and s.outputs]
        known = next((s.operation for s in readers if s.operation in _INITIALISATIONS), "")
        if known or not readers:
            return known
        value = readers[0].outputs[0]
    return ""


def _activations(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    if not readings:
        return
    reading = readings[0]
    chain = reading.chain
    if len(chain) < _LEAST_LAYERS:
        return
    sizes = [layer.output.rms for layer in chain]
    first = next((s for s in sizes if s > 0), 0.0)
    if not first:
        return
    # A branch that begins at 0 is left out.
    top, low = max(sizes), min((s for s in sizes[1:] if s > 0), default=first)
    gains = [(b / a if a > 0 else 0.0, layer) for a, b, layer in zip(sizes, sizes[1:], chain[1:])]
    activation = activation_of(reading)
    init, _ = _INITIALISATIONS.get(activation, ("Xavier or Kaiming initialisation", 1.0))
    shown = (
        "size (RMS) of the layers' outputs: " + ", ".join(f"{s:.2g}" for s in some(sizes)),
        f"gain per layer {median([g for g, _ in gains]):.2g}; {activation or 'this chain'} needs about 1",
    )
    if top / first > _RATIO and reading.probe.step == 0:
        worst = next((layer for gain, layer in gains if gain > _GAIN), gains[0][1])
        symptom = Symptom.EXPLODING_ACTIVATIONS
    elif low / first < 1 / _RATIO and reading.probe.step == 0:
        worst = next((layer for gain, layer in gains if gain < _LOSS), gains[0][1])
        symptom = Symptom.VANISHING_ACTIVATIONS
    else:
        return
    yield Complaint.of(
        symptom,
        Level.NOTE if course.fall() > HALFWAY_DOWN and low / first > 1 / _RATIO**2 else Level.FAULT,
        shown,
        cure=f"use {init}: torch.nn.init or the initialiser of the layer"
        if course.framework == "torch"
        else f"use {init}: jax.nn.initializers",
        place=course.initialised.get(worst.weight) or next(iter(course.initialisers), worst.step.place),
        places=(*course.initialisers[1:], *places_of(worst.step.place)),
        module=worst.step.module,
        parameters=tuple(dict.fromkeys(layer.weight for layer in chain if layer.weight)),
    )


def some(sizes: Sequence[float]) -> Sequence[float]:
    """Return the numbers to show: all, or the first and the last ones."""
    if len(sizes) <= _MOST_SHOWN:
        return sizes
    return [*sizes[: _MOST_SHOWN // 2], *sizes[-(_MOST_SHOWN // 2) :]]


def _gradient_flow(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    for reading in readings[:_FIRST]:
        pairs = [(layer, g.norm) for layer in reading.chain if (g := reading.gradient(layer.step))]
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
            + ", ".join(f"{s:.2g}" for s in some(sizes)),
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
            Level.FAULT if not course.fall() > PARTLY_DOWN else Level.NOTE,
            shown,
            since=reading.probe.step,
            place=worst.step.place,
            places=_initialised(course, worst.weight),
            module=worst.step.module,
        )
        return


def _initialised(course: Course, weight: str) -> tuple[Place, ...]:
    """Return where the parameters of a weight's layer got their first values."""
    layer = weight.rpartition(".")[0]
    names = [weight, *(name for name in course.initialised if name.rpartition(".")[0] == layer)]
    return places_of(*(course.initialised.get(name) for name in names))


def _detached(course: Course, readings: Sequence[Reading]) -> Iterator[Complaint]:
    """Yield a layer that ran in a loop, of whose rounds only the last ones are differentiated."""
    last = readings[-1] if readings else None
    if last is None or not last.probe.exact:
        return
    rounds: dict[tuple[object, ...], list[Layer]] = {}
    for layer in last.layers:
        rounds.setdefault((layer.step.place, layer.step.module, layer.weight), []).append(layer)
    for layers in rounds.values():
        trained = [layer.step.index in last.differentiated for layer in layers]
        number = sum(trained)
        if len(layers) < _LEAST_LAYERS or not 0 < number < len(layers) / 2 or not all(trained[-number:]):
            continue
        first = layers[-number]
        if first.source not in last.from_parameters:
            continue  # rounds that do not depend on one another
        cut = [
            s.place
            for s in last.trace.steps[layers[-number - 1].step.index : first.step.index]
            if "detach" in s.primitive and s.place not in (None, first.step.place)
        ]
        cut += last.detached_before(first.source, since=layers[-number - 1].step.index)
        if not cut:  # rounds without gradients, such as the steps of an episode
            continue
        yield Complaint.of(
            Symptom.DETACHED,
            Level.FAULT,
            f"{number} of {len(layers)} rounds have a derivative",
            place=cut[-1],
            places=tuple(p for p in (first.step.place,) if p is not None),
            module=first.step.module,
        )
        return


RULES = (_activations, _gradient_flow, _detached)
