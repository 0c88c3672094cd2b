"""Show the values of a jaxpr once more, from one of them on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.extend import core

from stablenum.diagnosis.diff.sides.play import ReplacedError, Visit
from stablenum.diagnosis.diff.sides.resume_points import Given, Stand, Stands
from stablenum.diagnosis.replay.trace import Step, Value
from stablenum_jax._diagnosis.diff.player import Player, Traced, arguments, primitive_of
from stablenum_jax._diagnosis.replay.cells import Cell, Composed, Context
from stablenum_jax._diagnosis.replay.interpreter import last_uses

__all__ = ["Showing"]


class _State(NamedTuple):
    """What an evaluation goes on with.

    Attributes:
        equation: the number of the next equation of the outermost jaxpr.
        cells: what that one and later ones read, by variable.
        literals: the constants that were met.
        values: all values so far.
    """

    equation: int
    cells: dict[Any, Cell]
    literals: dict[int, tuple[Any, Cell]]
    values: list[Value]

    def copy(self) -> _State:
        """Return what stays as it is when the evaluation goes on. No array is changed in place."""
        return _State(self.equation, dict(self.cells), dict(self.literals), list(self.values))

    def sizes(self) -> Mapping[int, int]:
        """Return the bytes of each array."""
        return {id(c.data): getattr(c.data, "nbytes", 0) for c in self.cells.values()}


@dataclass
class Showing:
    """Shows the values of a jaxpr in float64, and keeps how far an evaluation has come.

    Attributes:
        traced: the jaxpr.
        numbers: those that the other program computes with.
        makers: the primitive that makes each value, as it was recorded; None if that is not known.
    """

    traced: Traced
    numbers: Collection[float]
    makers: Sequence[str] | None = None
    _stands: Stands[_State] = field(default_factory=Stands)

    def show(self, visit: Visit, given: Given, *, since: int, keep: bool) -> None:
        """Show the values; see ``show`` of ``stablenum.diagnosis.diff.sides.play.Program``."""
        stand = self._stands.before(since, given)
        if keep:
            self._stands.only(given)
        shower = _Shower(numbers=self.numbers, visit=visit, replacing=given.replaced)
        shower.makers = self.makers if given.replaced else None
        with jax.enable_x64(True):
            begin = shower.begun(self.traced, given) if stand is None else stand.state.copy()
            for state in shower.states(self.traced, begin, self._last_uses):
                count = len(state.values)
                if keep and self._stands.wants(count):
                    self._stands.add(Stand(count, given.before(count), state.copy(), state.sizes()))

    @cached_property
    def _last_uses(self) -> Mapping[int, list[Any]]:
        return last_uses(self.traced.closed.jaxpr)


@dataclass
class _Shower(Player):
    """A player that records no steps."""

    makers: Sequence[str] | None = None

    def begun(self, traced: Traced, given: Given) -> _State:
        """Return the state before the first equation."""
        inputs = arguments(self, traced, given.weights or {})
        consts = [self.constant(c) for c in traced.closed.consts]
        variables = (*traced.closed.jaxpr.constvars, *traced.closed.jaxpr.invars)
        cells = dict(zip(variables, (*consts, *inputs), strict=True))
        return _State(0, cells, self._literals, self.trace.values)

    def states(self, traced: Traced, state: _State, last: Mapping[int, list[Any]]) -> Iterator[_State]:
        """Evaluate the equations from a state on, and yield the state before each of them."""
        first, cells, self._literals, self.trace.values = state
        jaxpr = traced.closed.jaxpr

        def read(atom: Any) -> Cell:
            return self._literal(atom) if isinstance(atom, core.Literal) else cells[atom]

        for index, eqn in enumerate(jaxpr.eqns[first:], first):
            yield state._replace(equation=index)
            outputs = self.evaluate(eqn, [read(v) for v in eqn.invars], _NOWHERE)
            cells.update(zip(eqn.outvars, outputs, strict=True))
            for variable in last.get(index, ()):
                cells.pop(variable, None)
        for v in jaxpr.outvars:
            read(v)

    def evaluate(self, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
        return self._evaluate(eqn, inputs, ctx)

    def inside(self, eqn: Any, ctx: Context) -> Context:
        return ctx

    def record(
        self, eqn: Any, inputs: Sequence[Cell], outputs: Sequence[Cell], ctx: Context, operation: str = ""
    ) -> Step:
        name = "" if self.makers is None else primitive_of(eqn, operation)
        for cell in outputs:
            if self.makers is not None and self.makers[cell.id : cell.id + 1] != [name]:
                raise ReplacedError(f"{name}: a branch or loop takes another course with the values replaced")
            self.visit(cell.id, cell.data)
        return _NO_STEP


# All equations stand inside a function of many equations, so that for none its arguments are noted.
_NOWHERE = Context(composed=Composed("", ()))
_NO_STEP = Step(index=0, operation="")
