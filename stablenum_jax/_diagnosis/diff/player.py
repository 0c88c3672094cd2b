"""Play a jaxpr: evaluate it equation by equation, in float64 or as it is, with the same or other weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from stablenum.diagnosis.diff.sides.exact_constants import LARGEST_WRITTEN
from stablenum.diagnosis.diff.sides.noise import Noise
from stablenum.diagnosis.diff.sides.play import Play, ReplacedError, Result, Visit
from stablenum.diagnosis.replay.operations import EXACT, MOVING
from stablenum.diagnosis.replay.trace import Step
from stablenum_jax._diagnosis.diff.axis_roles import roles_of
from stablenum_jax._diagnosis.diff.fused_attention import formula_of
from stablenum_jax._diagnosis.diff.widening import (
    NO_FLOAT64,
    as_recorded,
    as_written,
    is_float,
    is_float_dtype,
    is_of_bits,
    solving,
    wide_dtype,
    wide_params,
    widened,
)
from stablenum_jax._diagnosis.diff.writing import code_of, code_of_part
from stablenum_jax._diagnosis.replay.cells import Cell, Context
from stablenum_jax._diagnosis.replay.flags import CLEAN, Flags
from stablenum_jax._diagnosis.replay.inputs import Leaf
from stablenum_jax._diagnosis.replay.interpreter import Interpreter
from stablenum_jax._diagnosis.replay.jax_internals import any_equation, bind, context_of
from stablenum_jax._diagnosis.replay.naming import primitive_name
from stablenum_jax._diagnosis.replay.numpy_answers import numpy_answer
from stablenum_jax._diagnosis.replay.phases import assign_phases

__all__ = ["Player", "Traced", "arguments", "numbers_of", "play", "primitive_of"]

_STILL = (*MOVING, *EXACT, "cast")


@dataclass(frozen=True, slots=True)
class Traced:
    """A jaxpr, its arguments, and the meaning of its results: kind, name and step of each."""

    closed: Any
    leaves: tuple[Leaf, ...]
    results: tuple[tuple[str, str, int], ...]


def play(
    traced: Traced,
    *,
    numbers: Collection[float],
    wide: bool,
    weights: Mapping[str, Any],
    noise: float,
    visit: Visit,
    replace: Mapping[int, Any],
    everywhere: bool = False,
    code: Collection[int] = (),
) -> Play:
    """Evaluate a jaxpr; see ``stablenum.diagnosis.diff.sides.play``."""
    player = Player(
        numbers=numbers,
        wide=wide,
        noise=Noise(noise),
        noisy_constants=everywhere,
        visit=visit,
        replacing=replace,
        writing=frozenset(code),
    )
    with jax.enable_x64(wide):
        inputs = arguments(player, traced, weights)
        consts = [player.constant(c) for c in traced.closed.consts]
        outputs = player.run(traced.closed.jaxpr, consts, inputs, Context())
    results = tuple(
        Result(kind, name, cell.id, step)
        for cell, (kind, name, step) in zip(outputs, traced.results, strict=True)
    )
    loss = [r.value for r in results if r.kind == "loss"]
    assign_phases(player.trace, player.written, loss, [c.id for c in outputs])
    _find_update(player, results)
    stops = _stops(player)
    for index in stops:
        player.trace.steps[index].operation = "stop_gradient"
    keys = {v.id: v.id for v in player.trace.values}
    return Play(player.trace, results, keys, player.code, stops)


def arguments(player: Player, traced: Traced, weights: Mapping[str, Any]) -> list[Cell]:
    """Return the arguments of a jaxpr, weights in the place of its own."""
    data = [weights.get(leaf.name, leaf.data) for leaf in traced.leaves]
    given = [
        x
        if x is leaf.data
        else np.asarray(x).reshape(leaf.data.shape).astype(leaf.data.dtype if not player.wide else None)
        for x, leaf in zip(data, traced.leaves, strict=True)
    ]
    return [player.outside(x, leaf.role, leaf.name) for x, leaf in zip(given, traced.leaves, strict=True)]


def _stops(player: Player) -> frozenset[int]:
    """Return the steps at which the user calls ``stop_gradient``, rather than a function of a library."""
    return frozenset(
        step.index
        for step, how in zip(player.trace.steps, player.written, strict=True)
        if how.primitive == "stop_gradient" and how.source.functions[:1] == ("stop_gradient",)
    )


def _find_update(player: Player, results: Sequence[Result]) -> None:
    """Set the phase of the steps between the last gradient and the last update of each training step."""
    made = player.trace.values
    for number in {r.step for r in results if r.kind == "updated"}:
        gradients = [made[r.value].producer or 0 for r in results if r[0::3] == ("gradient", number)]
        updates = [made[r.value].producer or 0 for r in results if r[0::3] == ("updated", number)]
        for step in player.trace.steps[max(gradients, default=0) + 1 : max(updates, default=0) + 1]:
            step.phase, step.forward = "update", None


@dataclass
class Player(Interpreter):
    """Evaluates a jaxpr in a width, with noise and with other values, and shows each value."""

    numbers: Collection[float] = ()
    wide: bool = True
    noise: Noise = field(default_factory=lambda: Noise(0.0))
    noisy_constants: bool = False
    visit: Visit = lambda index, data: None
    replacing: Mapping[int, Any] = field(default_factory=dict)
    moved: bool = False
    moving: set[int] = field(default_factory=set)
    writing: frozenset[int] = frozenset()
    code: dict[int, str] = field(default_factory=dict)

    # --- values ---

    def measure(self, data: Any) -> Flags:
        return CLEAN

    def outside(self, data: Any, role: str, name: str = "") -> Cell:
        cell = super().outside(self._widened(data), role, name)
        if cell.id in self.replacing:
            new = _in_place_of(cell.data, self.replacing[cell.id])
            cell = Cell(new.astype(np.asarray(cell.data).dtype), cell.id)
        self.visit(cell.id, cell.data)
        return cell

    def constant(self, data: Any) -> Cell:
        name = f"captured {getattr(data, 'dtype', type(data).__name__)}{list(np.shape(data)) or ''}"
        if self.wide and is_float(data) and np.size(data) <= LARGEST_WRITTEN:
            data = as_written(data, self.numbers)
        return self.outside(data, "constant", name)

    def _literal(self, literal: Any) -> Cell:
        known = self._literals.get(id(literal))
        if known is None:
            data = literal.val
            if self.wide and np.ndim(data) == 0 and is_float(data):
                data = as_written(data, self.numbers)
            known = self._literals[id(literal)] = (literal, self.outside(data, "constant"))
        return known[1]

    def _widened(self, data: Any) -> Any:
        if not self.wide or not is_float(data):
            return data
        return np.asarray(data).astype(np.complex128 if np.iscomplexobj(data) else np.float64)

    def made(self, outputs: Sequence[Any]) -> list[Cell]:
        cells = []
        for data in outputs:
            index = self.trace.add_value()
            data = self._noisy(data)
            if index in self.replacing:
                data = _in_place_of(data, self.replacing[index])
            cells.append(Cell(data, index))
        return cells

    # --- steps ---

    def record(
        self, eqn: Any, inputs: Sequence[Cell], outputs: Sequence[Cell], ctx: Context, operation: str = ""
    ) -> Step:
        step = super().record(eqn, inputs, outputs, ctx, operation)
        step.primitive = primitive_of(eqn, operation)
        step.roles = () if operation else roles_of(eqn)
        for cell in outputs:
            self.visit(cell.id, cell.data)
        if step.index in self.writing:
            self._write(step, eqn, inputs, outputs, operation)
        return step

    def _write(
        self, step: Step, eqn: Any, inputs: Sequence[Cell], outputs: Sequence[Cell], operation: str
    ) -> None:
        """Write a step as code if that can be done."""
        if operation:
            line = code_of_part(operation, inputs, outputs)
        else:
            params = wide_params(eqn, eqn.params) if self.wide else eqn.params
            line = code_of(eqn.primitive, dict(params), inputs, outputs)
        if line is not None:
            self.code[step.index] = line

    def _is_news(self, step: Step) -> bool:
        return False

    # --- evaluation ---

    def evaluate(self, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
        moves = any(self._depends(c) for c in inputs)
        before = len(self.trace.values)
        noisy = bool(self.noise) and (moves or self.noisy_constants)
        self.moved = noisy and primitive_name(eqn.primitive.name) not in _STILL
        try:
            return super().evaluate(eqn, inputs, ctx)
        finally:
            self.moved = False
            if moves:
                self.moving.update(range(before, len(self.trace.values)))

    def _evaluate(self, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
        if eqn.primitive.name != "custom_linear_solve":
            return super()._evaluate(eqn, inputs, ctx)
        solve, given = solving(eqn, inputs)
        with context_of(eqn):
            return self.run(
                solve.jaxpr, [self.constant(c) for c in solve.consts], given, self.inside(eqn, ctx)
            )

    def compiled(self, closed: Any, ctx: Context) -> Callable[..., Any]:
        return widened(closed, frozenset(self.numbers)) if self.wide else super().compiled(closed, ctx)

    def compute(self, eqn: Any, inputs: list[Any], params: dict[str, Any] | None = None) -> list[Any]:
        if not self.wide:
            return super().compute(eqn, inputs, params)
        given = wide_params(eqn, eqn.params if params is None else params)
        name = eqn.primitive.name
        if name == "reduce_precision":
            return [inputs[0]]
        if is_of_bits(name):
            with context_of(eqn):
                return [self._widened(o) for o in bind(eqn, as_recorded(eqn, inputs), given)]
        if name == "convert_element_type" and is_float_dtype(given["new_dtype"]):
            return [np.asarray(inputs[0]).astype(wide_dtype(eqn.params["new_dtype"]))]
        with context_of(eqn), jax.enable_x64(True):
            if "jaxpr" in given or "call_jaxpr" in given:
                return [self._widened(o) for o in super().compute(eqn, as_recorded(eqn, inputs), params)]
            if not eqn.primitive.multiple_results:
                aval = jax.core.ShapedArray(eqn.outvars[0].aval.shape, wide_dtype(eqn.outvars[0].aval.dtype))
                plain = numpy_answer(name, inputs, given, aval)
                if plain is not None:
                    return [plain]
            formula = formula_of(name, inputs, given)
            if formula is not None:  # what it raises is no sign of a kernel that lacks float64
                return [self._widened(o) for o in formula(*inputs)]
            try:
                out = bind(eqn, inputs, given)
            except NO_FLOAT64:
                out = bind(eqn, as_recorded(eqn, inputs), eqn.params if params is None else params)
            return [self._widened(o) for o in out]

    def _noisy(self, data: Any) -> Any:
        if not (self.moved and is_float(data)):
            return data
        moved = np.array(data, order="C")
        self.noise.add_to(moved)
        return moved

    def _depends(self, cell: Cell) -> bool:
        """Return whether a value depends on a parameter or an input: constants are given no noise."""
        value = self.trace.values[cell.id]
        if value.producer is None and value.role:
            return value.role != "constant"
        return cell.id in self.moving


def primitive_of(eqn: Any, operation: str = "") -> str:
    """Return the primitive of the step of an equation, or of a part of it called ``operation``."""
    return primitive_name(operation or eqn.primitive.name, eqn.params.get("y"))


def numbers_of(traced: Traced) -> frozenset[float]:
    """Return the numbers of a jaxpr: its literals and its small constants, as they were written."""
    written = [x for x in traced.closed.consts if np.size(x) <= LARGEST_WRITTEN]

    def keep(eqn: Any) -> bool:
        written.extend(x.val for x in eqn.invars if isinstance(x, Literal))
        return False

    any_equation(traced.closed.jaxpr, keep)
    arrays = [as_written(x, ()) for x in written if is_float(x) and not np.iscomplexobj(x)]
    return frozenset(float(x) for array in arrays for x in np.ravel(array))


def _in_place_of(data: Any, new: Any) -> Any:
    """Return an array in the shape of another one; indices and masks stay such."""
    if np.size(new) != np.size(data):
        raise ReplacedError(f"{np.shape(new)} does not fit {np.shape(data)}")
    new = np.asarray(new).reshape(np.shape(data))
    kept = getattr(data, "dtype", None)
    return new.astype(kept) if getattr(kept, "kind", "") in ("b", "i", "u") else new
