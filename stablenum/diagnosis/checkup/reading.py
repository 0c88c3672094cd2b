"""Questions to one measured step: its layers, what they read, and which gradients pass them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from stablenum.diagnosis.checkup.course import Probe
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.replay.operations import MOVING, SELECTING
from stablenum.diagnosis.replay.trace import Step, Value
from stablenum.diagnosis.replay.values import Place

__all__ = ["LAYERS", "Layer", "Reading"]

# Operations by which a layer applies its weights.
LAYERS = frozenset({
    "bilinear", "conv", "conv1d", "conv2d", "conv3d", "conv_general_dilated", "conv_transpose", "convolution",
    "dot", "dot_general", "einsum", "linear", "matmul",
})  # fmt: skip
# Operations that pass a value on as it is, or a part of it.
PASSING = (MOVING - SELECTING) | {"cast", "dropout", "detach"}

# Operations that multiply values with weights.
_WEIGHING = frozenset({"bmm", "einsum", "matmul", "mul"})

# Operations of many steps, and those that are often in a loop of the user's.
_SHARED = LAYERS | {"cross_entropy", "layer_norm", "log_softmax", "relu", "sigmoid", "softmax", "tanh"}

# A value is followed back through so many reshapes and casts. Chosen, not measured.
_MOST_MOVES = 64


def _call(step: Step) -> tuple[object, ...]:
    return step.operation, step.place, step.module


class Layer(NamedTuple):
    """A step that applies a weight.

    Attributes:
        step: the step.
        weight: the weight's name.
        input, output: what it reads beside the weight, and what it makes; None if that was not measured.
        source: the id of the value that it reads.
    """

    step: Step
    weight: str
    input: Signal | None
    output: Signal
    source: int


class Reading:
    """A measured step, with what rules ask of it."""

    def __init__(self, probe: Probe) -> None:
        self.probe, self.trace, self.signals = probe, probe.trace, probe.signals
        self.backwards: dict[int, list[Step]] = {}  # forward step -> its derivatives
        self.readers: dict[int, list[Step]] = {}  # value -> the steps that read it
        for step in self.trace.steps:
            if step.phase == "backward" and step.forward is not None:
                self.backwards.setdefault(step.forward, []).append(step)
            for i in step.inputs:
                self.readers.setdefault(i, []).append(step)
        self.from_parameters = self._reached_from("parameter")
        # Of the steps of one function, or of one line in a loop, the derivative may name any.
        self.calls: dict[tuple[object, ...], list[Step]] = {}
        for index, steps in self.backwards.items():
            self.calls.setdefault(_call(self.trace.steps[index]), []).extend(steps)
        self.differentiated = {
            s.index for s in self.trace.steps if s.phase == "forward" and self._has_derivative(s)
        }

    def _has_derivative(self, step: Step) -> bool:
        if step.index in self.backwards:
            return True
        return not self.probe.exact and step.operation in _SHARED and _call(step) in self.calls

    def _reached_from(self, role: str) -> set[int]:
        """Return the values that depend on a value from outside with this role."""
        found = {v.id for v in self.trace.values if v.producer is None and v.role == role}
        for step in self.trace.steps:
            if step.phase == "forward" and any(i in found for i in step.inputs):
                found.update(step.outputs)
        return found

    def forward(self) -> Iterator[Step]:
        """Return the steps of the forward pass."""
        return (s for s in self.trace.steps if s.phase == "forward")

    def source(self, value: int) -> Value:
        """Return the value from which this one was moved, reshaped or converted."""
        for _ in range(_MOST_MOVES):
            found = self.trace.values[value]
            if found.producer is None:
                return found
            step = self.trace.steps[found.producer]
            if step.operation not in PASSING or not step.inputs:
                return found
            value = step.inputs[0]
        return self.trace.values[value]

    def detached_before(self, value: int, *, since: int) -> list[Place]:
        """Return where the script detached a value on its way from the step that computed it, if that came
        after this one."""
        found = list[Place]()
        while (producer := self.trace.values[value].producer) is not None:
            step = self.trace.steps[producer]
            if step.operation not in PASSING or not step.inputs:
                break
            if "detach" in step.primitive and step.place is not None and "detach" in step.place.code:
                found.append(step.place)
            value = step.inputs[0]
        return found if producer is not None and producer > since else []

    def producer(self, value: int) -> Step | None:
        """Return the step that computed the value, past what only moves it."""
        found = self.source(value).producer
        return None if found is None else self.trace.steps[found]

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers in the order in which they ran."""
        return [layer for step in self.forward() if (layer := self._layer(step)) is not None]

    @cached_property
    def chain(self) -> list[Layer]:
        """The longest sequence of layers, each of which reads what came of the one before, that gradients
        pass."""
        layers = [layer for layer in self.layers if layer.step.index in self.differentiated]
        at = {layer.step.index: i for i, layer in enumerate(layers)}
        last: dict[int, int] = {}  # value -> the last layer that it comes from
        before: dict[int, int | None] = {}
        length: dict[int, int] = {}
        for step in self.forward():
            found = max((last[i] for i in step.inputs if i in last), default=None)
            own = at.get(step.index)
            if own is not None:
                before[own] = last.get(layers[own].source)
                previous = before[own]
                length[own] = 1 + (0 if previous is None else length[previous])
                found = own
            if found is not None:
                last.update(dict.fromkeys(step.outputs, found))
        chain: list[Layer] = []
        here = max(length, key=lambda i: (length[i], i), default=None)
        while here is not None:
            chain.append(layers[here])
            here = before[here]
        return chain[::-1]

    def _layer(self, step: Step) -> Layer | None:
        if step.operation not in LAYERS or not step.outputs:
            return None
        output = self.signals.get(step.outputs[0])
        sources = [self.source(i) for i in step.inputs]
        weights = [
            (i, v)
            for i, v in enumerate(sources)
            if v.role == "parameter" and len(self._shape(step.inputs[i])) > 1
        ]
        rest = [
            i for i, v in enumerate(sources) if v.role != "parameter" and len(self._shape(step.inputs[i])) > 0
        ]
        if output is None or not weights or not rest:
            return None
        source = step.inputs[rest[-1]]
        return Layer(step, weights[0][1].name, self.signal(source), output, source)

    def _shape(self, value: int) -> tuple[int, ...]:
        found = self.signal(value)
        return () if found is None else found.shape

    def signal(self, value: int) -> Signal | None:
        """Return what was measured of a value, or of that from which it was moved."""
        for _ in range(_MOST_MOVES):
            found = self.signals.get(value)
            producer = self.trace.values[value].producer
            if found is not None or producer is None:
                return found
            step = self.trace.steps[producer]
            if step.operation not in PASSING or not step.inputs:
                return None
            value = step.inputs[0]
        return None

    def gradient(self, step: Step) -> Signal | None:
        """Return the gradient with respect to the output of a forward step: what its derivatives read."""
        output = self.signals.get(step.outputs[0]) if step.outputs else None
        if output is None:
            return None
        found = [] if self.probe.exact else self._reading_the_same(step)
        for back in (*found, *self.backwards.get(step.index, [])):
            for i in back.inputs:
                made_by = self.trace.values[i].producer
                if made_by is None or self.trace.steps[made_by].phase != "backward":
                    continue
                if self._only_moves(self.trace.steps[made_by]):
                    continue
                seen = self.signal(i)
                if seen is not None and seen.size == output.size:
                    return seen
        return None

    def _only_moves(self, step: Step) -> bool:
        """Return whether a step of the backward pass transposes a value of the forward pass."""
        if len(step.inputs) != 1 or not step.outputs:
            return False
        producer = self.trace.values[step.inputs[0]].producer
        if producer is not None and self.trace.steps[producer].phase == "backward":
            return False
        before, after = self.signal(step.inputs[0]), self.signal(step.outputs[0])
        return before is not None and after is not None and before.norm == after.norm

    def _reading_the_same(self, step: Step) -> list[Step]:
        """Return derivatives on the line of a step that read what it read, apart from parameters."""
        sources = [self.source(i) for i in step.inputs]
        own = {v.id for v in sources if v.role not in ("parameter", "constant")}
        return [b for b in self.calls.get(_call(step), []) if own & {self.source(i).id for i in b.inputs}]

    def is_last(self, step: Step) -> bool:
        """Return whether no layer reads what comes of this step."""
        todo, seen = list(step.outputs), set()
        layers = {layer.step.index for layer in self.layers}
        while todo:
            for reader in self.readers.get(todo.pop(), []):
                if reader.index in seen or reader.phase != "forward":
                    continue
                if reader.index in layers or reader.operation in ("matmul", "bmm"):
                    return False
                seen.add(reader.index)
                todo += reader.outputs
        return True

    def weighs(self, step: Step) -> bool:
        """Return whether what comes of a step is a factor on rows that other parameters make, as the weights
        of experts are. What comes of the layer before it, as the logarithm in an entropy does, are no such
        rows."""
        layer = step
        while layer.operation not in LAYERS and layer.inputs:
            before = self.producer(layer.inputs[0])
            if before is None:
                break
            layer = before
        own, found = set(layer.outputs), set(step.outputs)
        for later in self.trace.steps[layer.index + 1 :]:
            if later.phase != "forward":
                continue
            if any(i in own for i in later.inputs):
                own.update(later.outputs)
            if later.index <= step.index or not any(i in found for i in later.inputs):
                continue
            others = [i for i in later.inputs if i not in own and i in self.from_parameters]
            shapes = [seen.shape for i in others if (seen := self.signal(i)) is not None]
            if later.operation in _WEIGHING and any(len(s) > 1 and s[-1] > 1 for s in shapes):
                return True
            found.update(i for i in later.outputs if i in self.signals)  # not the indices of the experts
        return False

    def output(self) -> tuple[Step, int] | None:
        """Return the last layer's step and the id of its output."""
        chain = self.chain
        return (chain[-1].step, chain[-1].step.outputs[0]) if chain else None

    def loss_steps(self) -> list[Step]:
        """Return the forward steps that have a derivative, the last first: the loss is computed by the first
        of them."""
        return sorted((self.trace.steps[i] for i in self.differentiated), key=lambda s: -s.index)

    def targets(self) -> Iterator[tuple[Step, int, int]]:
        """Return the steps that compare an output with data: the step, the output and the data, by id."""
        for step in self.loss_steps():
            # What only passes the gradient on, such as a difference, has no derivative of its own.
            makers = [self.trace.values[i].producer for i in step.inputs]
            passing = [self.trace.steps[i] for i in makers if i is not None and i not in self.differentiated]
            yield from self._comparisons([step, *passing])

    def _comparisons(self, steps: Sequence[Step]) -> Iterator[tuple[Step, int, int]]:
        for step in steps:
            if len(step.inputs) < 2:
                continue
            outputs = [i for i in step.inputs if i in self.from_parameters]
            data = [i for i in step.inputs if self.is_data(i)]
            if len(outputs) == 1 and len(data) == 1:
                yield step, outputs[0], data[0]

    def is_data(self, value: int) -> bool:
        """Return whether a value is an array that depends on no parameter."""
        found = self.signal(value)
        return value not in self.from_parameters and found is not None and found.size > 1

    def first_use(self) -> dict[str, Step]:
        """Return the first forward step that reads each parameter, by name."""
        found: dict[str, Step] = {}
        for step in self.forward():
            for i in step.inputs:
                value = self.trace.values[i]
                if value.role == "parameter" and value.name and value.producer is None:
                    found.setdefault(value.name, step)
        return found
