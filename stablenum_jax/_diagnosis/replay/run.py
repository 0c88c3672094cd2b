"""One replay of a program: evaluate it, judge its results, and find the first causes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit

from stablenum.diagnosis import Finding, Place
from stablenum.diagnosis.replay.findings import finding_of, places_left
from stablenum.diagnosis.replay.shards import alike, shards_of, spread_of
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.replay.trials import Read
from stablenum.diagnosis.replay.walk import Origin, first_causes, on_the_way
from stablenum_jax._diagnosis.replay.cells import Cell, Context
from stablenum_jax._diagnosis.replay.flags import flags_of, outliers_of, stats_of
from stablenum_jax._diagnosis.replay.guards import seen_by_guards
from stablenum_jax._diagnosis.replay.inputs import Leaf
from stablenum_jax._diagnosis.replay.interpreter import Interpreter, Kept
from stablenum_jax._diagnosis.replay.jax_internals import alone, bind
from stablenum_jax._diagnosis.replay.optimizers import with_optimizer
from stablenum_jax._diagnosis.replay.phases import COMPARING, assign_phases
from stablenum_jax._diagnosis.replay.programs import Program
from stablenum_jax._diagnosis.replay.shards import described, holders
from stablenum_jax._diagnosis.replay.source_lines import callers
from stablenum_jax._trees.leaves import is_floating

__all__ = ["Run", "result_flags", "run_compiled", "run_eagerly", "run_instrumented"]

_LOW_PRECISION = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
MOST_FINDINGS = 8


@dataclass
class Run:
    """An evaluated replay.

    Attributes:
        program: what was evaluated.
        interpreter: holds the trace.
        inputs, outputs: cells of constants and arguments, and of all results.
        bad: positions among the judged results that are not finite.
        measured: indices of values that a guard inside measured and that are not finite.
        spread: the shardings of inputs that were gathered from several processes.
        twins: the id of an origin -> it and those of the same operation in other shards.
    """

    program: Program
    interpreter: Interpreter
    inputs: list[Cell]
    outputs: list[Cell]
    bad: tuple[int, ...]
    measured: tuple[int, ...] = ()
    spread: dict[int, Any] = field(default_factory=dict)
    twins: dict[int, list[Origin]] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether a result, or what a guard measured, is not finite."""
        return bool(self.bad or self.measured)

    @property
    def trace(self) -> Trace:
        """What was recorded."""
        return self.interpreter.trace

    def origins(self) -> list[Origin]:
        """Return the first causes of the bad results, after the phases of all steps have been found."""
        program, trace = self.program, self.trace
        loss = [self.outputs[i].id for i in program.loss]
        assign_phases(trace, self.interpreter.written, loss, [c.id for c in self.outputs])
        groups = alike(first_causes(trace, self._bad()))[:MOST_FINDINGS]
        self.twins = {id(group[0]): group for group in groups}
        return [group[0] for group in groups]

    def only_loss(self) -> bool:
        """Return whether no step of the backward pass or of the update gave NaN or inf, and none compared a
        NaN with a number: no bad gradient was kept from the result, and no bad loss was tested for."""
        trace = self.trace
        later = (s for s in trace.steps if s.phase != "forward")
        tests = (s for s in trace.steps if s.operation in COMPARING)
        spread = any(not v.finite for s in later for v in trace.outputs_of(s))
        return not spread and not any(v.nan for s in tests for v in trace.inputs_of(s))

    def left(self, findings: Sequence[Finding]) -> tuple[str, ...]:
        """Return the further places that give NaN or inf of their own; factors of a derivative are steps."""
        return places_left(findings, on_the_way(self.trace, self._bad(), lambda step: False))

    def _bad(self) -> list[int]:
        return [*(self.outputs[self.program.judged[i]].id for i in self.bad), *self.measured]

    def findings(
        self, origins: Sequence[Origin], again: Interpreter | None
    ) -> list[tuple[Finding, Kept | None]]:
        """Return what is to be shown of the first causes, with the data of their steps.

        Args:
            origins: the first causes.
            again: a second replay, which kept the data of the operations that failing derivatives belong to.
        """
        found = []
        for origin in origins:
            kept = self.interpreter.kept.get(origin.step.index) if origin.step else None
            self._fill(origin, kept)
            self._find_axis(origin)
            if origin.step is not None and again is not None and origin.step.forward is not None and kept:
                self._fill_users(origin.step, again.kept.get(origin.step.forward), kept)
            finding = finding_of(self.trace, origin, wide_finite=_wide_finite(kept))
            finding = _called_from(callers(), self._with_shard(finding, origin, kept))
            found.append((with_optimizer(finding, sys._getframe()), kept))
        return found

    def _with_shard(self, finding: Finding, origin: Origin, kept: Kept | None) -> Finding:
        """Return the finding with the shard in which the value was born, if that is known."""
        trace, twins = self.trace, self.twins.get(id(origin), [origin])
        by_number = {n: s for s, n in self.interpreter.shards.items()}
        numbers, mesh = self._born_in(twins)
        shards, everywhere = ([by_number[n] for n in sorted(some)] for some in (numbers, mesh))
        if origin.step is None and (not mesh or numbers == mesh):
            data = next((c.data for c in self.inputs if c.id == origin.value.id), None)
            shards, everywhere = holders(data, self.spread.get(origin.value.id))
        elif not numbers and kept is not None:
            data = next((o for o in kept.outputs if any(flags_of(o))), None)
            shards, everywhere = holders(data)
        if not shards or len(everywhere) < 2:
            return finding
        devices = {d.id for s in shards for d in s.devices}
        return replace(
            finding,
            shard=described(shards, everywhere),
            rank=devices.pop() if len(devices) == 1 else None,
            spread=tuple(spread_of(trace, twins, numbers, finding.place)),
        )

    def _born_in(self, twins: Sequence[Origin]) -> tuple[frozenset[int], frozenset[int]]:
        """Return the numbers of the shards in which a value was born, and those of their mesh."""
        for mesh in self.interpreter.meshes:
            numbers = shards_of(self.trace, twins, self._bad(), mesh)
            if numbers and numbers <= mesh:
                return numbers, mesh
        return frozenset(), frozenset()

    def _find_axis(self, origin: Origin) -> None:
        """Add the axis to a part of a function over rows that JAX does not call as a whole: that of the first
        sum or maximum in the same call."""
        if origin.step is None:
            return
        trace, written = self.trace, self.interpreter.written
        step = origin.step if origin.step.forward is None else trace.steps[origin.step.forward]
        call = written[step.index].source.call
        if step.options or not call or not written[step.index].source.inner:
            return
        for how, other in zip(written, trace.steps, strict=True):
            if how.source.call == call and other.options:
                step.options = other.options
                return

    def read_by(self, origin: Origin, again: Interpreter | None) -> Read | None:
        """Return what the user's operation read; None if it was not kept."""
        step = origin.step
        if step is None:
            return None
        if step.forward is None:
            kept = self.interpreter.kept.get(step.index)
        else:
            kept = None if again is None else again.kept.get(step.forward)
        if kept is None:
            return None
        if kept.composed is not None and kept.composed.operation == step.operation:
            return Read(kept.composed.operation, kept.composed.inputs)
        return Read(kept.eqn.primitive.name, kept.inputs)

    def _fill_users(self, step: Step, users: Kept | None, kept: Kept) -> None:
        """Add the statistics of what the user's operation read, of which ``step`` is the derivative."""
        if users is None or step.forward is None:
            return
        at = next((o for o in kept.outputs if any(flags_of(o))), None)
        values = [self.trace.values[i] for i in self.trace.steps[step.forward].inputs]
        if len(values) != len(users.inputs):  # the second replay took another branch
            return
        stats = [
            stats_of(data, v.name if v.role != "constant" else "", at)
            for v, data in zip(values, users.inputs, strict=True)
            if is_floating(data)
        ]
        self.trace.of_the_user[step.index] = tuple(s for s in stats if s is not None)

    def _fill(self, origin: Origin, kept: Kept | None) -> None:
        """Add the statistics of the values that are shown."""
        values = self.trace.values
        if origin.step is None:
            data = next((c.data for c in self.inputs if c.id == origin.value.id), None)
            if data is not None:
                captured = origin.value.name.startswith("captured ")
                origin.value.stats = stats_of(data, "" if captured else origin.value.name)
        elif kept is not None:
            ids = (*origin.step.inputs, *origin.step.outputs)
            made = next((o for o in kept.outputs if any(flags_of(o))), None)
            for index, data in zip(ids, (*kept.inputs, *kept.outputs), strict=True):
                name = values[index].name if values[index].role != "constant" else ""
                values[index].stats = stats_of(data, name, made)
            self._find_outliers(origin.step, kept)

    def _find_outliers(self, step: Step, kept: Kept) -> None:
        """Look for entries far from the rest in what a step has read, and then in what the program was
        given."""
        values = self.trace.values
        for index, data in zip(step.inputs, kept.inputs, strict=True):
            values[index].outliers = outliers_of(data)
        if any(values[i].outliers for i in step.inputs):
            for cell in self.inputs:
                if values[cell.id].role == "input":
                    values[cell.id].outliers = outliers_of(cell.data)


def _called_from(outer: tuple[Place, ...], finding: Finding) -> Finding:
    """Return a finding with the frames from which the replayed function was called. A function that had been
    traced before has them."""
    if not outer or not finding.frames or outer[0] in finding.frames:
        return finding
    return replace(finding, frames=(*outer, *finding.frames))


def run_eagerly(program: Program, leaves: Sequence[Leaf], scale: float, *, wanted: Iterable[int] = ()) -> Run:
    """Run the program equation by equation, and keep the data of the steps that are wanted."""
    interpreter = Interpreter(wanted=frozenset(wanted), opens_shards=True)
    meshless = any(leaf.sharding is not None for leaf in leaves)
    with alone() if meshless else contextlib.nullcontext():
        inputs, outputs = _evaluate(
            interpreter, program, leaves, [leaf.data for leaf in leaves], jnp.float32(scale)
        )
    bad = [i for i, at in enumerate(program.judged) if not interpreter.trace.values[outputs[at].id].finite]
    measured: tuple[int, ...] = ()
    if not program.gradients:
        given = inputs[len(inputs) - len(leaves) :]
        own = frozenset(c.id for c, leaf in zip(given, leaves, strict=True) if leaf.guard)
        measured = seen_by_guards(interpreter.trace, interpreter.written, own) if own else ()
    given = inputs[len(inputs) - len(leaves) :]
    spread = {c.id: leaf.sharding for c, leaf in zip(given, leaves, strict=True) if leaf.sharding is not None}
    return Run(program, interpreter, inputs, outputs, tuple(bad), measured, spread)


def run_compiled(program: Program, leaves: Sequence[Leaf], scale: float) -> list[Any]:
    """Return the results of the program under one jit, as in training."""
    function = jit(jax.extend.core.jaxpr_as_fun(program.closed))
    first = [jnp.float32(scale)] if program.scaled else []
    return list(function(*first, *[leaf.data for leaf in leaves]))


def result_flags(program: Program, outputs: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the judged results that are not finite."""
    return tuple(i for i, at in enumerate(program.judged) if any(flags_of(outputs[at])))


def run_instrumented(program: Program, leaves: Sequence[Leaf], scale: float) -> Run:
    """Run the program under one jit, extended to return the flags of every value too."""
    interpreter = Interpreter(symbolic=True)
    cells: list[Any] = []

    def run(scale: Any, data: list[Any]) -> tuple[Any, list[Any]]:
        inputs, outputs = _evaluate(interpreter, program, leaves, data, scale)
        cells[:] = [inputs, outputs]
        flags = [f for f in interpreter.flags if f is not None]
        return jnp.stack(flags), [c.data for c in outputs]

    data = [leaf.data for leaf in leaves]
    flags, results = jit(run)(jnp.float32(scale), data)
    known = iter(np.asarray(flags).tolist())
    for value, flag in zip(interpreter.trace.values, interpreter.flags, strict=True):
        if flag is not None:
            value.nan, value.posinf, value.neginf = next(known)
    inputs, outputs = cells
    inputs = [replace(c, data=d) for c, d in zip(inputs[-len(data) :] if data else [], data, strict=True)]
    outputs = [replace(c, data=r) for c, r in zip(outputs, results, strict=True)]
    return Run(program, interpreter, inputs, outputs, result_flags(program, results))


def _evaluate(
    interpreter: Interpreter, program: Program, leaves: Sequence[Leaf], data: Sequence[Any], scale: Any
) -> tuple[list[Cell], list[Cell]]:
    inputs = [interpreter.outside(d, leaf.role, leaf.name) for leaf, d in zip(leaves, data, strict=True)]
    if program.scaled:
        inputs = [interpreter.outside(scale, "constant", "loss_scale"), *inputs]
    consts = [interpreter.constant(c) for c in program.closed.consts]
    outputs = interpreter.run(program.closed.jaxpr, consts, inputs, Context())
    return [*consts, *inputs], outputs


def _wide_finite(kept: Kept | None) -> bool | None:
    """Return whether the operation is finite in float32 with the same inputs; None if that cannot be
    tested."""
    if kept is None or not any(_is_low(x) for x in (*kept.inputs, *kept.outputs)):
        return None
    wide = {k: jnp.dtype(jnp.float32) if _names_low(k, v) else v for k, v in kept.eqn.params.items()}
    if "jaxpr" in wide or "call_jaxpr" in wide:
        return None
    inputs = [jnp.asarray(x).astype(jnp.float32) if _is_low(x) else x for x in kept.inputs]
    try:
        outputs = bind(kept.eqn, inputs, wide)
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        return None
    return not any(any(flags_of(o)) for o in outputs)


def _names_low(key: str, value: Any) -> bool:
    return key in ("new_dtype", "preferred_element_type", "dtype") and _is_low_dtype(value)


def _is_low(x: Any) -> bool:
    return is_floating(x) and _is_low_dtype(getattr(x, "dtype", None))


def _is_low_dtype(dtype: Any) -> bool:
    return dtype is not None and jnp.dtype(dtype).name in _LOW_PRECISION
