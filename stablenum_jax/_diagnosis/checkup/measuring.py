"""Evaluate one step of a running script equation by equation, and measure what its equations make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import array_api_compat.numpy as numpy_namespace
import jax
import jax.numpy as jnp
import numpy as np

from stablenum.diagnosis.checkup.course import Drawn, ParameterSeen, Probe, measure_update
from stablenum.diagnosis.checkup.signals import BOUNDED, Signal, measure_signal
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum_jax._diagnosis.checkup.held import running_statistics
from stablenum_jax._diagnosis.checkup.marks import (
    GRADIENT,
    LOSS,
    PARAMETER,
    STATE,
    USED,
    read_mark,
)
from stablenum_jax._diagnosis.replay.cells import Cell, Context
from stablenum_jax._diagnosis.replay.interpreter import Interpreter
from stablenum_jax._diagnosis.replay.phases import assign_phases
from stablenum_jax._trees.leaves import is_floating

__all__ = ["FirstCall", "MeasuredCall", "parameters_seen", "probe_of"]

# The equation of a function of many that gives its result.
_LAST = {"softmax": "div"}


class _MeasuringInterpreter(Interpreter):
    """An interpreter that notes what is marked, and measures values, but not those of an update."""

    def __init__(self, sources: dict[int, Any] | None) -> None:
        super().__init__()
        self._sources = self._sources if sources is None else sources
        self.signals: dict[int, Signal] = {}
        self.marked: dict[str, dict[str, Cell]] = {}
        self.out_of_range: dict[int, str] = {}
        self.keys: list[Drawn] = []
        self._updating = False

    def outside(self, data: Any, role: str, name: str = "") -> Cell:
        cell = super().outside(data, role, name)
        self._measure(cell, "")
        return cell

    def record(
        self, eqn: Any, inputs: Sequence[Cell], outputs: Sequence[Cell], ctx: Context, operation: str = ""
    ) -> Step:
        step = super().record(eqn, inputs, outputs, ctx, operation)
        self.kept.pop(step.index, None)
        found = read_mark(eqn.params) if eqn.primitive.name == "name" else None
        if found is not None:
            self._updating = found[0] in (USED, STATE) or (self._updating and found[0] != PARAMETER)
            self.marked.setdefault(found[0], {}).setdefault(found[1], outputs[0])
        if eqn.primitive.name == "gather" and len(inputs) > 1:
            shown = out_of_range(eqn.params, *(c.data for c in inputs[:2]))
            if shown:
                self.out_of_range[step.index] = shown
        if eqn.primitive.name == "random_bits":
            self.keys.append(Drawn(np.asarray(jax.random.key_data(inputs[0].data)).tobytes(), step.place))
        name = step.operation
        bounded = name in BOUNDED and _LAST.get(name, eqn.primitive.name) == eqn.primitive.name
        if found is not None or not self._updating:
            for cell in outputs:
                self._measure(cell, name if bounded else "")
        return step

    def _measure(self, cell: Cell, operation: str) -> None:
        if not is_floating(cell.data) or not self.trace.values[cell.id].finite or not np.size(cell.data):
            return
        x = np.asarray(cell.data)
        if x.dtype.kind == "c":
            return
        wide = x if x.dtype == np.float64 else x.astype(np.float32)
        # Rows of a softmax sum to 1, also in bfloat16, which has three digits. Chosen, not measured.
        if operation == "softmax" and not (wide.ndim and np.allclose(wide.sum(axis=-1), 1.0, atol=0.05)):
            operation = ""  # a part of it
        with np.errstate(all="ignore"):
            numbers = measure_signal(wide, operation, xp=numpy_namespace)
        self.signals[cell.id] = Signal.of(x.shape, x.dtype.name, numbers.tolist())


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """One call of a program that trains.

    Attributes:
        program: the closed jaxpr.
        given: its inputs.
        trace, signals: as in a probe.
        marked: kind of a mark -> name -> the value.
        inputs: the position of each parameter among the inputs, by name.
        captured: names of the parameters, if they are constants of the program.
        out_of_range: index of a step -> what is wrong with the indices that it reads with.
        keys: with which keys random numbers were drawn, and where.
        losses: the positions of the loss among the results; empty if it is not returned.
        results: what the program returns.
        reached: names of parameters on whose value something depends that the gradient comes from.
    """

    program: Any
    given: Sequence[Any]
    trace: Trace
    signals: dict[int, Signal]
    marked: dict[str, dict[str, Any]]
    inputs: dict[str, int]
    losses: tuple[int, ...]
    results: tuple[Any, ...] = ()
    reached: frozenset[str] = field(default_factory=frozenset)
    captured: tuple[str, ...] = ()
    out_of_range: dict[int, str] = field(default_factory=dict)
    keys: tuple[Drawn, ...] = ()

    @classmethod
    def of(
        cls,
        closed: Any,
        leaves: Sequence[Any],
        held: Sequence[tuple[str, str]] | None = None,
        sources: dict[int, Any] | None = None,
    ) -> MeasuredCall:
        """Evaluate a closed jaxpr with these inputs, and measure it.

        Args:
            closed: the program.
            leaves: its inputs.
            held: the role and the name of each input, if they are known.
            sources: where its equations were written, as far as earlier calls have found out.
        """
        run = _MeasuringInterpreter(sources)
        known = held or [("input", "")] * len(leaves)
        given = [run.outside(leaf, *one) for leaf, one in zip(leaves, known, strict=True)]
        consts = [run.constant(c) for c in closed.consts]
        outputs = run.run(closed.jaxpr, consts, given, Context())
        trace, marked = run.trace, run.marked
        assign_phases(trace, run.written, [], [c.id for c in outputs])
        at = {c.id: i for i, c in enumerate(given)}
        inputs: dict[str, int] = {}
        for name, cell in marked.get(PARAMETER, {}).items():
            source = _before(trace, cell.id)
            if source in at:
                inputs[name] = at[source]
                trace.values[source].role, trace.values[source].name = "parameter", name
        loss = [c.id for c in marked.get(LOSS, {}).values()]
        places = tuple(
            i for i, c in enumerate(outputs) if loss and _before(trace, c.id) == _before(trace, loss[0])
        )
        _until_used(trace, marked)
        depends = _dependent(trace, set(at))
        reached = frozenset(n for n, c in marked.get(GRADIENT, {}).items() if c.id in depends)
        results = tuple(c.data for c in outputs)
        return cls(
            closed,
            leaves,
            trace,
            run.signals,
            marked,
            inputs,
            places,
            results,
            reached,
            () if PARAMETER in marked else tuple(marked.get(GRADIENT, {})),
            run.out_of_range,
            tuple(run.keys),
        )

    def drawn(self, deviations: Mapping[str, float]) -> dict[str, Any]:
        """Return parameters drawn from normal distributions of these standard deviations, by name."""
        rng = np.random.default_rng(0)
        old = {name: np.asarray(self.given[self.inputs[name]]) for name in deviations}
        return {n: jnp.asarray(deviations[n] * rng.normal(size=x.shape), x.dtype) for n, x in old.items()}

    def again(self, changes: Mapping[str, Any]) -> MeasuredCall:
        """Evaluate and measure the call with other values of some parameters, by name."""
        given = list(self.given)
        for name, value in changes.items():
            given[self.inputs[name]] = value
        return MeasuredCall.of(self.program, given)


def probe_of(call: MeasuredCall, step: int, parameters: tuple[ParameterSeen, ...] = ()) -> Probe:
    """Return what a call was measured to be."""
    return Probe(
        step=step,
        trace=call.trace,
        signals=call.signals,
        parameters=parameters,
        running=running_statistics(call.trace, call.signals),
        out_of_range=call.out_of_range,
        drawn=call.keys,
        exact=False,
    )


class FirstCall:
    """The first step of a training, which can be evaluated again: see ``FirstStep``.

    Args:
        call: the step.
        after: its inputs with the parameters after the step.
    """

    def __init__(self, call: MeasuredCall, after: Sequence[Any]) -> None:
        self._call, self._after = call, after

    def with_weights(self, deviations: Mapping[str, float]) -> Probe:
        """Measure the step with some parameters drawn afresh."""
        return probe_of(self._call.again(self._call.drawn(deviations)), 0)

    def loss_after(self, part: float) -> float:
        """Return the loss after a part of the first update."""
        changes = {}
        for name, i in self._call.inputs.items():
            before, after = (np.asarray(x[i]).astype(np.float64) for x in (self._call.given, self._after))
            changes[name] = jnp.asarray(before + part * (after - before), self._call.given[i].dtype)
        return next(float(cell.data) for cell in self._call.again(changes).marked[LOSS].values())


def out_of_range(params: Any, operand: Any, indices: Any) -> str:
    """Describe the indices of a gather that lie outside of what it reads; "" if all lie inside, or if the
    script has said what to do with them."""
    if params.get("mode") is not jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        return ""
    numbers, sizes, shape = params["dimension_numbers"], params["slice_sizes"], np.shape(operand)
    given = np.asarray(indices)
    for k, axis in enumerate(numbers.start_index_map):
        last, along = shape[axis] - sizes[axis], given[..., k]
        wrong = along[(along < 0) | (along > last)]
        if wrong.size:
            return f"{wrong.size} of {along.size} indices, such as {wrong[0]}, into an axis of {shape[axis]}"
    return ""


def _before(trace: Trace, value: int) -> int:
    """Return the value that marks, conversions and reshapes have passed on."""
    while (producer := trace.values[value].producer) is not None:
        step = trace.steps[producer]
        if (
            step.primitive not in ("name", "convert_element_type", "reshape", "copy", "copy_p")
            or not step.inputs
        ):
            return value
        value = step.inputs[0]
    return value


def _until_used(trace: Trace, marked: dict[str, dict[str, Any]]) -> None:
    """Take what happens to gradients before the optimizer uses them for the script's own."""
    used = [trace.values[c.id].producer for c in marked.get(USED, {}).values()]
    last = max((i for i in used if i is not None), default=-1)
    for step in trace.steps[: last + 1]:
        if step.phase == "update":
            step.phase = "forward"


def _dependent(trace: Trace, values: set[int]) -> set[int]:
    """Return the values that depend on these."""
    found = set(values)
    for step in trace.steps:
        if any(i in found for i in step.inputs):
            found.update(step.outputs)
    return found


def _in_parts(x: Any) -> Any:
    """Return an array in float64; the real and imaginary parts of complex numbers along one more axis."""
    parts = np.stack([x.real, x.imag], axis=-1) if np.iscomplexobj(x) else x
    return parts.astype(np.float64)


def _uphill(gradient: Any, raw: Any) -> Any:
    """Return the gradient that an optimizer reads such that it points uphill: its conjugate, if it is complex
    and still JAX's own.

    Args:
        gradient: what the optimizer reads.
        raw: what JAX has returned; None if that is not known.
    """
    if not np.iscomplexobj(gradient):
        return gradient
    if raw is None or np.shape(raw) != np.shape(gradient):
        return np.conj(gradient)
    read = _in_parts(gradient)
    conjugated = np.sum(read * _in_parts(np.conj(raw))) > np.sum(read * _in_parts(raw))
    return gradient if conjugated else np.conj(gradient)


def _follows_conjugate(before: Any, after: Any, gradient: Any) -> float:
    """Return by how much nearer a complex change is to JAX's own gradient than to its conjugate.

    This is the difference of the cosines; NaN for real numbers.
    """
    if not np.iscomplexobj(before):
        return math.nan
    change = -_in_parts(after - before)
    sizes = np.linalg.norm(change) * np.linalg.norm(_in_parts(gradient))
    toward = [np.sum(change * _in_parts(g)) for g in (gradient, np.conj(gradient))]
    return float((toward[0] - toward[1]) / sizes) if sizes > 0 else math.nan


def parameters_seen(
    call: MeasuredCall, after: Sequence[Any] | None, rate: float
) -> tuple[ParameterSeen, ...]:
    """Return what a step has done with its parameters.

    Args:
        call: the step.
        after: the inputs of the next call; None after the last.
        rate: the learning rate, if it is known.
    """
    gradients = call.marked.get(USED) or call.marked.get(GRADIENT, {})
    first = call.marked.get(GRADIENT, {})
    seen = []
    for name, position in call.inputs.items():
        w = np.asarray(call.given[position])
        cell = gradients.get(name) or first.get(name)
        g = np.zeros(w.shape) if cell is None else np.asarray(cell.data)
        if g.shape != w.shape:
            continue
        known = after is not None and np.shape(after[position]) == w.shape
        later = np.asarray(after[position]) if known and after is not None else w
        raw = np.asarray(first[name].data) if name in first else None
        wide = [_in_parts(x) for x in (w, later, _uphill(g, raw))]
        with np.errstate(all="ignore"):
            numbers = measure_update(*wide, xp=numpy_namespace).tolist()
            follows = _follows_conjugate(w, later, raw) if known and raw is not None else math.nan
        if not known:
            numbers[3:6] = [math.nan] * 3
            numbers[7] = math.nan
        one = ParameterSeen(name, w.shape, w.dtype.name, rate, name in call.reached, *numbers)
        seen.append(one._replace(mirrored=follows))
    return tuple(seen)
