"""Evaluate a jaxpr equation by equation, and record each equation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from jax import jit
from jax.extend import core

from stablenum.diagnosis.replay.constants import is_constant
from stablenum.diagnosis.replay.operations import ANSWERING
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.watch.frames import raised_by_a_signal
from stablenum_jax._diagnosis.module_scopes import module_of
from stablenum_jax._diagnosis.replay import control_flow
from stablenum_jax._diagnosis.replay.cells import Cell, Composed, Context
from stablenum_jax._diagnosis.replay.composed import axis_of, composed_by, reduces
from stablenum_jax._diagnosis.replay.flags import CLEAN, Flags, flags_in, flags_of, stats_of
from stablenum_jax._diagnosis.replay.jax_internals import (
    bind,
    called_jaxpr,
    context_of,
    differentiated_jaxpr,
)
from stablenum_jax._diagnosis.replay.naming import answering_name, function_name, operation_name
from stablenum_jax._diagnosis.replay.numpy_answers import numpy_answer
from stablenum_jax._diagnosis.replay.shard_map import in_shard, shard_map
from stablenum_jax._diagnosis.replay.shards import Shard
from stablenum_jax._diagnosis.replay.source_lines import Source, source_of
from stablenum_jax._trees.leaves import is_floating

__all__ = ["Interpreter", "Kept", "Written", "last_uses"]

_CONTROL = {"cond": control_flow.cond, "scan": control_flow.scan, "while": control_flow.while_loop}
# Prints and checks, which return nothing and would print again.
_SILENT = frozenset({"debug_callback", "debug_print", "check"})


@dataclass(frozen=True, slots=True)
class Written:
    """Where the equation of a step comes from."""

    source: Source
    stack: str
    primitive: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The data of a step whose outputs contain a NaN or inf that its inputs do not."""

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    composed: Composed | None = None


@dataclass
class Interpreter:
    """Evaluates equations, and records each as a step.

    Attributes:
        symbolic: whether the interpreter runs under jit, where loops are single steps.
        trace: the record.
        written: how each step appears in the source, one entry per step of the trace.
        kept: index of a step -> its data.
        flags: if symbolic, one traced vector of flags per value; None for a value that is not floating-point.
        skipped: names of primitives that were left out.
        wanted: indices of further steps whose data is kept.
        opens_shards: whether the body of a ``shard_map`` is evaluated shard by shard; otherwise it is one
            step.
        shards: the number of each shard in the trace.
        meshes: the numbers of the shards of each mesh.
        closed: why a ``shard_map`` could not be opened.
    """

    symbolic: bool = False
    opens_shards: bool = False
    trace: Trace = field(default_factory=Trace)
    written: list[Written] = field(default_factory=list)
    kept: dict[int, Kept] = field(default_factory=dict)
    flags: list[Any] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    wanted: frozenset[int] = frozenset()
    shards: dict[Shard, int] = field(default_factory=dict)
    meshes: list[frozenset[int]] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)
    _literals: dict[int, tuple[Any, Cell]] = field(default_factory=dict)
    _sources: dict[int, tuple[Any, Source]] = field(default_factory=dict)

    # --- values ---

    def measure(self, data: Any) -> Flags:
        """Return the flags of a value; if symbolic, they are traced and are read later."""
        if self.symbolic:
            self.flags.append(flags_in(data) if is_floating(data) else None)
            return CLEAN
        return flags_of(data)

    def outside(self, data: Any, role: str, name: str = "") -> Cell:
        """Record a value that is not the output of a step."""
        return Cell(data, self.trace.add_value(flags=self.measure(data), role=role, name=name))

    def constant(self, data: Any) -> Cell:
        """Record a captured array. If it has NaN it must be data; an infinity may be a mask or a bound."""
        flags = CLEAN if self.symbolic else flags_of(data)
        name = f"captured {getattr(data, 'dtype', type(data).__name__)}{list(np.shape(data)) or ''}"
        return self._with_stats(
            self.outside(data, "input" if flags[0] and np.ndim(data) else "constant", name)
        )

    def made(self, outputs: Sequence[Any]) -> list[Cell]:
        """Return the outputs of the step that is recorded next."""
        return [Cell(o, self.trace.add_value(flags=self.measure(o))) for o in outputs]

    def _literal(self, literal: Any) -> Cell:
        # The object is kept with its cell, because an id is unique only as long as its object lives.
        known = self._literals.get(id(literal))
        if known is None:
            cell = self._with_stats(self.outside(literal.val, "constant"))
            known = self._literals[id(literal)] = (literal, cell)
        return known[1]

    def _with_stats(self, cell: Cell) -> Cell:
        """Keep the statistics of a single number that is infinite."""
        value = self.trace.values[cell.id]
        if value.inf and np.size(cell.data) == 1:
            value.stats = stats_of(cell.data)
        return cell

    # --- steps ---

    def record(
        self, eqn: Any, inputs: Sequence[Cell], outputs: Sequence[Cell], ctx: Context, operation: str = ""
    ) -> Step:
        """Record one step for an equation, or for a part of it called ``operation``."""
        source = self.source(eqn, ctx)
        stack = _joined(ctx.stack, eqn)
        primitive = operation or eqn.primitive.name
        reduced = not operation and reduces(eqn)
        options = {"axis": axis_of(eqn, stack)} if reduced and ctx.composed is None else {}
        step = self.trace.add_step(
            operation or self._named(eqn, source, inputs),
            primitive=primitive,
            inputs=[c.id for c in inputs],
            outputs=[c.id for c in outputs],
            scalars=() if operation else _scalars(eqn),
            module=_module(stack),
            place=source.place,
            frames=source.frames,
            where=ctx.where,
            library=source.library,
            options=ctx.composed.options if ctx.composed else options,
            shards=() if ctx.task is None else (self.shards[ctx.task.shard],),
        )
        self.written.append(Written(source, stack, primitive))
        if not self.symbolic and (step.index in self.wanted or self._is_news(step)):
            self.kept[step.index] = Kept(
                eqn, tuple(c.data for c in inputs), tuple(c.data for c in outputs), ctx.composed
            )
        return step

    def _named(self, eqn: Any, source: Source, inputs: Sequence[Cell]) -> str:
        """Return the name of an equation. A constant that a function of a distribution selects, such as the
        -inf of a log-density outside the support, is the function's own answer; so is a NaN that a function
        fills in."""
        name = operation_name(source.functions, eqn.primitive.name, eqn.params.get("y"))
        if name == "broadcast" and any(self.trace.values[c.id].nan for c in inputs):
            filled_by = function_name(source.functions)
            return filled_by if filled_by in ANSWERING else name
        read = [self.trace.values[c.id] for c in inputs] if name == "where" else []
        answers = any(is_constant(self.trace, v) for v in read if not v.finite)
        return (answers and answering_name(source.functions)) or name

    def _is_news(self, step: Step) -> bool:
        before, after = self.trace.inputs_of(step), self.trace.outputs_of(step)
        nan, inf = any(v.nan for v in before), any(v.inf for v in before)
        return any((v.nan and not nan) or (v.inf and not inf) for v in after)

    def source(self, eqn: Any, ctx: Context) -> Source:
        """Find where an equation was written; inside a library's jitted function, where that function was
        called."""
        known = self._sources.get(id(eqn))
        if known is None:
            known = self._sources[id(eqn)] = (eqn, source_of(eqn.source_info.traceback))
        own = known[1]
        # Equations of a library's jitted function were traced once, and may have no frame of the user's.
        if own.place is not None:
            return own
        return own.within(ctx.source)

    # --- evaluation ---

    def run(self, jaxpr: Any, consts: Sequence[Cell], args: Sequence[Cell], ctx: Context) -> list[Cell]:
        """Evaluate all equations of a jaxpr; values are dropped after they are read for the last time."""
        env: dict[Any, Cell] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        last = last_uses(jaxpr)

        def read(atom: Any) -> Cell:
            return self._literal(atom) if isinstance(atom, core.Literal) else env[atom]

        for index, eqn in enumerate(jaxpr.eqns):
            outputs = self.evaluate(eqn, [read(v) for v in eqn.invars], ctx)
            env.update(zip(eqn.outvars, outputs, strict=True))
            for variable in last.get(index, ()):
                env.pop(variable, None)
        return [read(v) for v in jaxpr.outvars]

    def evaluate(self, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
        """Evaluate one equation: a call, branch or loop is opened; any other is one step."""
        if ctx.task is None:
            return self._evaluate(eqn, inputs, ctx)
        key = ctx.sharing.key(self, eqn, inputs, ctx)
        known = None if key is None else ctx.sharing.find(self, key, ctx)
        if known is not None:
            return list(known)
        before = len(self.trace.steps)
        done = in_shard(self, eqn, inputs, ctx)
        outputs = self._evaluate(eqn, inputs, ctx) if done is None else done
        if key is not None:
            ctx.sharing.keep(key, outputs, range(before, len(self.trace.steps)))
        return outputs

    def _evaluate(self, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
        name = eqn.primitive.name
        if name in _SILENT:
            self.skipped.add(name)
            return []
        called = called_jaxpr(eqn) or differentiated_jaxpr(eqn)
        if called is not None:
            jaxpr, consts = called
            with context_of(eqn):
                inner = self.inside(eqn, ctx)
                if inner.composed is None and not self.symbolic:
                    inner = replace(
                        inner, composed=composed_by(eqn, jaxpr, [c.data for c in inputs], inner.stack)
                    )
                return self.run(jaxpr, [self.constant(c) for c in consts], inputs, inner)
        if name in _CONTROL and not self.symbolic:
            return _CONTROL[name](self, eqn, inputs, ctx)
        if name == "shard_map" and self.opens_shards:
            return self._opened(eqn, inputs, ctx)
        outputs = self.made(self.compute(eqn, [c.data for c in inputs]))
        self.record(eqn, inputs, outputs, ctx)
        return outputs

    def _opened(self, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
        """Evaluate a ``shard_map`` shard by shard, or as one step if that fails."""
        if ctx.task is not None:
            return shard_map(self, eqn, inputs, ctx)
        trace, before = self.trace, (len(self.trace.values), len(self.trace.steps))
        try:
            return shard_map(self, eqn, inputs, ctx)
        except Exception as error:  # as one step, it is evaluated by JAX
            if raised_by_a_signal(error):
                raise
            del trace.values[before[0] :], trace.steps[before[1] :], self.written[before[1] :]
            self.kept = {k: v for k, v in self.kept.items() if k < before[1]}
            self._literals = {k: v for k, v in self._literals.items() if v[1].id < before[0]}
            self.closed.add(f"{type(error).__name__}: {error}")
        outputs = self.made(self.compute(eqn, [c.data for c in inputs]))
        self.record(eqn, inputs, outputs, ctx)
        return outputs

    def inside(self, eqn: Any, ctx: Context) -> Context:
        """Return the context of the equations of a call."""
        source = self.source(eqn, ctx)
        name = eqn.params.get("name")
        if isinstance(name, str) and name:
            source = replace(source, functions=(*source.functions, name))
        return replace(ctx, source=source, stack=_joined(ctx.stack, eqn))

    def compiled(self, closed: Any, ctx: Context) -> Callable[..., Any]:
        """Return a closed jaxpr as a compiled function, such as the body of a long loop."""
        return control_flow.compiled(closed, ctx)

    def compute(self, eqn: Any, inputs: list[Any], params: dict[str, Any] | None = None) -> list[Any]:
        """Return the equation's outputs."""
        with context_of(eqn):
            if self.symbolic:
                return bind(eqn, inputs, params)
            if "jaxpr" in eqn.params or "call_jaxpr" in eqn.params:
                # Calls that are not opened (shard_map, kernels) can all be compiled, but not all of them can
                # be evaluated eagerly.
                return list(jit(lambda *xs: bind(eqn, list(xs), params))(*inputs))
            if params is None and not eqn.primitive.multiple_results:
                plain = numpy_answer(eqn.primitive.name, inputs, eqn.params, eqn.outvars[0].aval)
                if plain is not None:
                    return [plain]
            return bind(eqn, inputs, params)


def _scalars(eqn: Any) -> list[float]:
    """Return the plain numbers among the arguments, with the exponent of a power."""
    found = [float(v.val) for v in eqn.invars if isinstance(v, core.Literal) and _is_number(v.val)]
    exponent = 2 if eqn.primitive.name == "square" else eqn.params.get("y")
    return [*found, float(exponent)] if isinstance(exponent, (int, float)) else found


def _is_number(value: Any) -> bool:
    return is_floating(value) and np.ndim(value) == 0 and np.asarray(value).dtype.kind == "f"


def last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """Return, for each equation, the variables that are not read after it."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        for v in [*eqn.invars, *eqn.outvars]:
            if not isinstance(v, core.Literal):
                last[v] = index
    for v in jaxpr.outvars:
        if not isinstance(v, core.Literal):
            last.pop(v, None)
    uses: dict[int, list[Any]] = {}
    for v, index in last.items():
        uses.setdefault(index, []).append(v)
    return uses


def _joined(stack: str, eqn: Any) -> str:
    own = str(eqn.source_info.name_stack)
    return f"{stack}/{own}" if stack and own else stack or own


_TRANSFORMATIONS = re.compile(r"\b(transpose|jvp|vmap|checkpoint|remat|linearize)\(|\)")


@lru_cache(maxsize=4096)
def _module(stack: str) -> str:
    """Return the module of a name stack without transformations: a path, or named scopes and flax modules."""
    parts = _TRANSFORMATIONS.sub("", stack).split("/")
    return module_of(tuple(p for p in parts if p and p not in ("rematted_computation", "checkpoint")))
