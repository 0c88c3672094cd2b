"""Branches and loops of a replay.

A short loop is opened, that is, evaluated equation by equation. The iterations of a long loop run compiled;
only the first one is opened, which shows what the loop consists of, and those in which a NaN or inf first
appears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit

from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum_jax._diagnosis.replay.cells import Cell, Context
from stablenum_jax._diagnosis.replay.flags import flags_of
from stablenum_jax._diagnosis.replay.jax_internals import (
    context_of,
    evaluated,
    is_alone,
    scan_counts,
    sub_jaxpr,
)

__all__ = ["Evaluator", "compiled", "cond", "scan", "while_loop"]

# The largest number of equations of a loop, over all iterations, that are evaluated one by one.
OPENED_EQUATIONS = 2000
# The largest number of iterations of a long loop that are opened for an inf, which may be intended.
_OPENED_FOR_INF = 8


class Evaluator(Protocol):
    """The part of the interpreter that branches and loops need."""

    trace: Trace

    def constant(self, data: Any) -> Cell:
        """Return a captured array."""

    def made(self, outputs: Sequence[Any]) -> list[Cell]:
        """Return the outputs of the step that is recorded next."""

    def record(
        self, eqn: Any, inputs: Sequence[Cell], outputs: Sequence[Cell], ctx: Context, operation: str = ""
    ) -> Step:
        """Record one step for an equation, or for a part of it called ``operation``."""

    def run(self, jaxpr: Any, consts: Sequence[Cell], args: Sequence[Cell], ctx: Context) -> list[Cell]:
        """Evaluate a jaxpr."""

    def inside(self, eqn: Any, ctx: Context) -> Context:
        """Return the context of the equations of a call."""

    def compiled(self, closed: Any, ctx: Context) -> Callable[..., Any]:
        """Return a closed jaxpr as a compiled function."""


def cond(run: Evaluator, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
    """Evaluate the branch that is taken."""
    index, *operands = inputs
    branches = eqn.params["branches"]
    taken = min(max(int(np.asarray(index.data)), 0), len(branches) - 1)
    jaxpr, consts = sub_jaxpr(branches[taken])
    with context_of(eqn):
        return run.run(jaxpr, [run.constant(c) for c in consts], operands, run.inside(eqn, ctx))


def scan(run: Evaluator, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
    """Evaluate a scan iteration by iteration, numbered by position in the inputs even in a reverse scan."""
    p = eqn.params
    length = p["length"]
    n_consts, n_carry = scan_counts(p, len(inputs))
    consts, carry, xs = inputs[:n_consts], inputs[n_consts : n_consts + n_carry], inputs[n_consts + n_carry :]
    body = _Body(run, eqn, p["jaxpr"], "scan", ctx, known=length)
    unstacked = [_unstacked(x.data) for x in xs]
    rows: list[list[Cell]] = [[] for _ in range(length)]
    for i in reversed(range(length)) if p["reverse"] else range(length):
        out = body(i, consts, carry, [(x, row(i)) for x, row in zip(xs, unstacked, strict=True)])
        carry, rows[i] = out[:n_carry], out[n_carry:]
    avals = [v.aval for v in eqn.outvars[n_carry:]]
    ys = [_stacked(run, eqn, [r[j] for r in rows], aval, ctx) for j, aval in enumerate(avals)]
    return [*carry, *ys]


def while_loop(run: Evaluator, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
    """Evaluate a while loop iteration by iteration, until its condition is false."""
    p = eqn.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    cond_consts, consts = inputs[:n_cond], inputs[n_cond : n_cond + n_body]
    carry = inputs[n_cond + n_body :]
    goes_on = _Condition(run, eqn, p["cond_jaxpr"], ctx)
    body = _Body(run, eqn, p["body_jaxpr"], "while", ctx)
    number = 0
    while goes_on([*cond_consts, *carry]):
        carry = body(number, consts, carry, [])
        number += 1
    return list(carry)


class _Condition:
    """Whether a while loop goes on."""

    def __init__(self, run: Evaluator, eqn: Any, jaxpr: Any, ctx: Context) -> None:
        self._run, self._eqn, self._jaxpr, self._ctx = run, eqn, jaxpr, ctx
        self._compiled = None if _connects(jaxpr, ctx) else run.compiled(jaxpr, ctx)

    def __call__(self, given: Sequence[Cell]) -> bool:
        if self._compiled is not None:
            with context_of(self._eqn):
                (result,) = self._compiled(*[c.data for c in given])
        else:  # it needs the other shards
            jaxpr, consts = sub_jaxpr(self._jaxpr)
            cells = [self._run.constant(c) for c in consts]
            (cell,) = self._run.run(jaxpr, cells, given, self._run.inside(self._eqn, self._ctx))
            result = cell.data
        return bool(np.asarray(result).any())


def compiled(closed: Any, ctx: Context) -> Callable[..., Any]:
    """Return a closed jaxpr as a compiled function; in a ``shard_map``, all shards have the same."""
    if ctx.task is not None:
        return ctx.sharing.compiled(closed)
    if is_alone():
        return jit(partial(evaluated, *sub_jaxpr(closed)))
    return jit(jax.extend.core.jaxpr_as_fun(closed))


def _connects(closed: Any, ctx: Context) -> bool:
    """Return whether a jaxpr in a shard needs the other shards or depends on its place among them."""
    return ctx.task is not None and ctx.sharing.differs(closed)


@dataclass(slots=True)
class _Body:
    """One iteration of a loop, opened or compiled."""

    run: Evaluator
    eqn: Any
    jaxpr: Any
    loop: str
    ctx: Context
    known: int | None = None
    compiled: Callable[..., Any] | None = None
    constants: Sequence[Cell] | None = None
    size: int = 0
    spent: int = 0
    opened_for_inf: int = 0

    def __call__(
        self, number: int, consts: Sequence[Cell], carry: Sequence[Cell], xs: Sequence[tuple[Cell, Any]]
    ) -> list[Cell]:
        """Evaluate one iteration; ``xs`` holds, for each scanned array, its cell and its row."""
        size = self.size = self.size or max(_equations(self.jaxpr), 1)
        whole = self.known is None or self.known * size <= OPENED_EQUATIONS
        given = [*consts, *carry]
        # The first iteration is always opened, the others while the budget lasts. Shards that exchange values
        # in a loop have to open it together.
        if (
            self.spent == 0
            or _connects(self.jaxpr, self.ctx)
            or (whole and self.spent + size <= OPENED_EQUATIONS)
        ):
            self.spent += size
            return self._open(number, given, xs)
        return self._compiled(number, given, carry, xs)

    def _open(self, number: int, given: list[Cell], xs: Sequence[tuple[Cell, Any]]) -> list[Cell]:
        jaxpr, consts = sub_jaxpr(self.jaxpr)
        if self.constants is None:
            self.constants = [self.run.constant(c) for c in consts]
        rows = [_row(self.run, self.eqn, x, row, self.ctx) for x, row in xs]
        inner = self.run.inside(self.eqn, self.ctx).iteration(number, self.loop)
        with context_of(self.eqn):
            return self.run.run(jaxpr, self.constants, [*given, *rows], inner)

    def _compiled(
        self, number: int, given: list[Cell], carry: Sequence[Cell], xs: Sequence[tuple[Cell, Any]]
    ) -> list[Cell]:
        if self.compiled is None:
            self.compiled = self.run.compiled(self.jaxpr, self.ctx)
        with context_of(self.eqn):
            data = self.compiled(*[c.data for c in given], *[row for _, row in xs])
        outputs = self.run.made(list(data))
        values = self.run.trace.values
        made = [values[c.id] for c in outputs]
        if any(not v.finite for v in made):
            # Only arrays that are not finite are searched row by row.
            bad_rows = [flags_of(row) for x, row in xs if not values[x.id].finite]
            # A NaN first appears here if nothing that went into the iteration has one.
            begins = any(v.nan for v in made) and not (
                any(values[c.id].nan for c in given) or any(f[0] for f in bad_rows)
            )
            infinite = any(v.inf for v in made) and not any(values[c.id].inf for c in carry)
            if infinite and self.opened_for_inf < _OPENED_FOR_INF:
                self.opened_for_inf += 1
                begins = True
            if begins:
                return self._open(number, given, xs)
        rows = [x if values[x.id].finite else _row(self.run, self.eqn, x, row, self.ctx) for x, row in xs]
        ctx = self.ctx.iteration(number, self.loop)
        self.run.record(self.eqn, [*given, *rows], outputs, ctx, operation=self.loop)
        return outputs


def _equations(jaxpr: Any) -> int:
    """Estimate how many equations one iteration evaluates; those of inner scans count once per
    iteration."""
    inner, _ = sub_jaxpr(jaxpr)
    total = 0
    for eqn in inner.eqns:
        parts = [v for p in eqn.params.values() for v in (p if isinstance(p, (tuple, list)) else (p,))]
        subs = [v for v in parts if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        total += times * sum(_equations(s) for s in subs) if subs else 1
    return total


def _unstacked(data: Any) -> Callable[[int], Any]:
    if jnp.issubdtype(data.dtype, jax.dtypes.extended):
        return lambda i: data[i]
    host = np.asarray(data)
    return lambda i: host[i, ...]


def _row(run: Evaluator, eqn: Any, whole: Cell, data: Any, ctx: Context) -> Cell:
    (cell,) = run.made([data])
    run.record(eqn, [whole], [cell], ctx, operation="index")
    return cell


def _stacked(run: Evaluator, eqn: Any, rows: list[Cell], aval: Any, ctx: Context) -> Cell:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        data = jnp.stack([r.data for r in rows]) if rows else jnp.empty(aval.shape, aval.dtype)
    else:
        data = np.stack([np.asarray(r.data) for r in rows]) if rows else np.zeros(aval.shape, aval.dtype)
    (cell,) = run.made([data])
    run.record(eqn, rows, [cell], ctx, operation="stack")
    return cell
