"""Run a jaxpr operation by operation, and note the values that leave a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.extend.core import Literal

from stablenum_jax._diagnosis.module_scopes import Scope, scope_of
from stablenum_jax._diagnosis.replay.jax_internals import bind, called_jaxpr, context_of

__all__ = ["Leaving", "Walk"]

Array: TypeAlias = Any


@dataclass(slots=True, eq=False)
class _Value:
    array: Array
    scope: Scope
    number: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """A value that left modules: the modules' paths, the innermost first, and the value."""

    modules: tuple[str, ...]
    array: Array


class Walk:
    """One run of a jaxpr.

    The outputs of a module are the values computed inside it and read outside. Calls, checkpoints and the
    taken branch of a ``cond`` are opened; other operations with a jaxpr inside (loops that were not unrolled
    while tracing, functions with a derivative of their own) run as one operation.

    Args:
        roots: names of outermost linen modules.
        added: number of a value -> an array that is added to the value. Derivatives with respect to the array
            are derivatives with respect to the value.

    Attributes:
        leaving: number of a value -> the value and its modules. Runs that take the same branches give
            values the same numbers.
        closed: names of operations that ran as one although they contain named modules.
    """

    def __init__(self, roots: frozenset[str], added: dict[int, Array] | None = None) -> None:
        self.leaving: dict[int, Leaving] = {}
        self.closed: list[str] = []
        self._roots, self._added = roots, added or {}
        self._count = 0

    def run(self, jaxpr: Any, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
        """Return the outputs."""
        values = [_Value(x, (), -1) for x in args]
        return [self._read(out, ()) for out in self._run(jaxpr, consts, values, ())]

    def _run(
        self, jaxpr: Any, consts: Sequence[Array], args: Sequence[Any], outer: tuple[str, ...]
    ) -> list[Any]:
        env: dict[Any, Any] = {}
        env.update(zip(jaxpr.constvars, (_Value(x, (), -1) for x in consts)))
        env.update(zip(jaxpr.invars, args))

        def look(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            names = outer + _names(eqn.source_info.name_stack)
            held = [look(atom) for atom in eqn.invars]
            outs = self._apply(eqn, held, names)
            env.update(zip(eqn.outvars, outs))
        return [look(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: Any, held: list[Any], names: tuple[str, ...]) -> list[Any]:
        kind = eqn.primitive.name
        scope = scope_of(names, self._roots)
        called = called_jaxpr(eqn)
        if called is not None:
            return self._run(*called, held, names)
        if kind == "cond":
            index = int(self._read(held[0], scope))
            branch = eqn.params["branches"][max(0, min(index, len(eqn.params["branches"]) - 1))]
            return self._run(branch.jaxpr, branch.consts, held[1:], names)
        if any(_has_names(inner) for inner in _inner(eqn)) and kind not in self.closed:
            self.closed.append(kind)
        arrays = [self._read(x, scope) for x in held]
        with context_of(eqn):
            outputs = bind(eqn, arrays)
        return [self._made(x, scope) for x in outputs]

    def _made(self, array: Array, scope: Scope) -> _Value:
        number, self._count = self._count, self._count + 1
        if number in self._added:  # zeros, for the derivative with respect to this value
            array = array + self._added[number]
        return _Value(array, scope, number)

    def _read(self, held: Any, reader: Scope) -> Array:
        if not isinstance(held, _Value):
            return held
        if not held.left and held.scope != reader[: len(held.scope)]:
            # A value may be read again further out, and has then left more modules.
            shared = _shared(held.scope, reader)
            if jnp.issubdtype(jnp.result_type(held.array), jnp.floating):
                before = self.leaving.get(held.number)
                modules = tuple(path for path, _ in held.scope[shared:][::-1])
                if before is None or len(modules) > len(before.modules):
                    self.leaving[held.number] = Leaving(modules, held.array)
            held.left = shared == 0  # it can leave no further module
        return held.array


def _shared(a: Scope, b: Scope) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _names(stack: Any) -> tuple[str, ...]:
    """Return the scopes of a stack, without the transformations (``vmap``, ``jit``) among them."""
    return tuple(part.name for part in stack.stack if type(part).__name__ == "Scope")


def _inner(eqn: Any) -> list[Any]:
    found = []
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                found.append(one)
    return found


def _has_names(jaxpr: Any) -> bool:
    return any(
        _names(eqn.source_info.name_stack) or any(_has_names(inner) for inner in _inner(eqn))
        for eqn in jaxpr.eqns
    )
