"""The body of a ``shard_map``, evaluated for each shard, with the operations that connect the shards.

``pmap`` is a ``shard_map``, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax import jit

from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum_jax._diagnosis.replay.cells import Cell, Context
from stablenum_jax._diagnosis.replay.collectives import CASTS, axes_of, exchange_of, is_collective
from stablenum_jax._diagnosis.replay.jax_internals import any_equation, evaluated, parts_of, sub_jaxpr
from stablenum_jax._diagnosis.replay.shards import Layout, Shard, layout_of, number_of, on_host
from stablenum_jax._diagnosis.replay.shards_in_turn import Crew, Task

__all__ = ["Sharing", "in_shard", "shard_map"]


class Evaluator(Protocol):
    """The part of the interpreter that shards need."""

    trace: Trace
    shards: dict[Shard, int]
    meshes: list[frozenset[int]]

    def made(self, outputs: Sequence[Any]) -> list[Cell]:
        """Return the outputs of the step that is recorded next."""

    def record(
        self, eqn: Any, inputs: Sequence[Cell], outputs: Sequence[Cell], ctx: Context, operation: str = ""
    ) -> Step:
        """Record one step for an equation, or for a part of it called ``operation``."""

    def run(self, jaxpr: Any, consts: Sequence[Cell], args: Sequence[Cell], ctx: Context) -> list[Cell]:
        """Evaluate a jaxpr."""

    def constant(self, data: Any) -> Cell:
        """Return a captured array."""

    def inside(self, eqn: Any, ctx: Context) -> Context:
        """Return the context of the equations of a call."""


def shard_map(run: Evaluator, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell]:
    """Evaluate the body for each shard, and return the arrays that the results of the shards make up."""
    layout, outer = layout_of(eqn.params, [c.data for c in inputs]), ctx.task
    own = layout.shards()
    shards = [s.within(outer.shard) for s in own] if outer else own
    sizes = {**outer.sizes, **layout.sizes} if outer else dict(layout.sizes)
    numbers = [run.shards.setdefault(s, len(run.shards)) for s in shards]
    mesh = frozenset(numbers)
    if mesh not in run.meshes:
        run.meshes.append(mesh)
    given = _split(run, eqn, inputs, layout, own, numbers, ctx)
    jaxpr, consts = sub_jaxpr(eqn.params["jaxpr"])
    captured = [run.constant(on_host(c)) for c in consts]
    crew = outer.crew if outer else Crew()
    inner, sharing = run.inside(eqn, ctx), ctx.sharing or Sharing()
    readers = Counter(i for cells in given for i in {c.id for c in cells})
    sharing.shared.update(i for i, count in readers.items() if count > 1)

    def work(args: Sequence[Cell], task: Task) -> list[Cell]:
        return run.run(jaxpr, captured, args, inner.in_shard(task, sharing))

    tasks = [crew.add(shard, sizes, partial(work, args)) for shard, args in zip(shards, given, strict=True)]
    if outer:
        outer.inside(tasks)
    else:
        crew.run()
    return _joined(run, eqn, [t.result for t in tasks], layout, own, ctx)


def _split(
    run: Evaluator,
    eqn: Any,
    inputs: Sequence[Cell],
    layout: Layout,
    shards: Sequence[Shard],
    numbers: Sequence[int],
    ctx: Context,
) -> list[list[Cell]]:
    """Return what each shard reads of the inputs."""
    columns: list[list[Cell]] = []
    for cell, spec in zip(inputs, eqn.params["in_specs"], strict=True):
        axes = layout.axes_of(spec)
        if not axes:
            columns.append([Cell(on_host(cell.data), cell.id)] * len(shards))
            continue
        cells = {}
        for index, part in layout.parts(cell.data, spec).items():
            (cells[index],) = run.made([part])
            step = run.record(eqn, [cell], [cells[index]], ctx, operation="index")
            step.shards = tuple(n for n, s in zip(numbers, shards, strict=True) if s.along(axes) == index)
        columns.append([cells[s.along(axes)] for s in shards])
    return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in shards]


def _joined(
    run: Evaluator,
    eqn: Any,
    results: Sequence[Sequence[Cell]],
    layout: Layout,
    shards: Sequence[Shard],
    ctx: Context,
) -> list[Cell]:
    """Return the arrays that the results of the shards make up."""
    made = []
    for i, (spec, variable) in enumerate(zip(eqn.params["out_specs"], eqn.outvars, strict=True)):
        axes = layout.axes_of(spec)
        cells: dict[tuple[int, ...], Cell] = {}
        for shard, row in zip(shards, results, strict=True):
            cells.setdefault(shard.along(axes), row[i])  # of copies, the first one
        if not axes:
            made.append(cells[()])
            continue
        whole = layout.whole({k: c.data for k, c in cells.items()}, spec, variable.aval)
        if ctx.task is None:
            whole = _placed(whole, variable.aval, layout.mesh)
        (cell,) = run.made([whole])
        run.record(eqn, list(cells.values()), [cell], ctx, operation="stack")
        made.append(cell)
    return made


# --- in a shard -----------------------------------------------------------------------------------------


class Sharing:
    """What is the same in several shards, and is computed once for all of them.

    Attributes:
        shared: the values that several shards read.
    """

    def __init__(self) -> None:
        self.shared: set[int] = set()
        self._known: dict[Any, tuple[list[Cell], range]] = {}
        self._pure: dict[int, tuple[Any, bool]] = {}
        self._differing: dict[int, tuple[Any, bool]] = {}
        self._compiled: dict[int, tuple[Any, Any]] = {}

    def compiled(self, closed: Any) -> Any:
        """Return the closed jaxpr of a loop as a compiled function."""
        known = self._compiled.get(id(closed))
        if known is None:
            known = self._compiled[id(closed)] = (closed, jit(partial(evaluated, *sub_jaxpr(closed))))
        return known[1]

    def differs(self, closed: Any) -> bool:
        """Return whether a jaxpr depends on the shard, or connects it with others."""
        known = self._differing.get(id(closed))
        if known is None:
            inner = sub_jaxpr(closed)[0]
            known = self._differing[id(closed)] = (closed, any_equation(inner, _differs))
        return known[1]

    def key(self, run: Evaluator, eqn: Any, inputs: Sequence[Cell], ctx: Context) -> Any:
        """Return what an equation has in common with the same one in another shard; None if nothing."""
        values = run.trace.values
        if not all(c.id in self.shared or values[c.id].producer is None for c in inputs):
            return None
        known = self._pure.get(id(eqn))
        if known is None:
            known = self._pure[id(eqn)] = (
                eqn,
                not (_differs(eqn) or any(any_equation(p, _differs) for p in parts_of(eqn))),
            )
        return (id(eqn), ctx.where, tuple(c.id for c in inputs)) if known[1] else None

    def find(self, run: Evaluator, key: Any, ctx: Context) -> list[Cell] | None:
        """Return the outputs if another shard has evaluated the same equation."""
        known = self._known.get(key)
        if known is None:
            return None
        outputs, steps = known
        number = run.shards[ctx.task.shard]
        for step in run.trace.steps[steps.start : steps.stop]:
            if number not in step.shards:
                step.shards = (*step.shards, number)
        return list(outputs)

    def keep(self, key: Any, outputs: list[Cell], steps: range) -> None:
        """Keep the outputs of an equation, which took these steps."""
        self._known[key] = (outputs, steps)
        self.shared.update(c.id for c in outputs)


def _differs(eqn: Any) -> bool:
    name = eqn.primitive.name
    return name in ("axis_index", "shard_map") or is_collective(name)


def in_shard(run: Evaluator, eqn: Any, inputs: list[Cell], ctx: Context) -> list[Cell] | None:
    """Return the outputs of an equation that only a shard has; None for any other."""
    name, task = eqn.primitive.name, ctx.task
    task.check()
    if name in CASTS or name.endswith("_done"):
        return inputs
    if name == "axis_index":
        axes = axes_of(name, eqn.params)
        number = number_of(task.shard.along(axes), [task.sizes[a] for a in axes])
        outputs = run.made([np.int32(number)])
        run.record(eqn, inputs, outputs, ctx)
        return outputs
    if not is_collective(name):
        return None
    axes = axes_of(name, eqn.params)
    if len(inputs) != 1:
        raise NotImplementedError(f"{name} with {len(inputs)} arrays")

    def answer(group: Sequence[Task], cells: Sequence[Cell]) -> list[list[Cell]]:
        return _exchanged(run, eqn, group, cells, ctx)

    return list(task.together(eqn, axes, inputs[0], answer))


def _exchanged(
    run: Evaluator, eqn: Any, group: Sequence[Task], cells: Sequence[Cell], ctx: Context
) -> list[list[Cell]]:
    """Evaluate a collective operation, as one step for each of its different results."""
    found = exchange_of(eqn.primitive.name, [c.data for c in cells], eqn.params)
    numbers = [run.shards[t.shard] for t in group]
    made: list[Cell] = []
    for i, (result, sources) in enumerate(zip(found.results, found.sources, strict=True)):
        read = [cells[s] for s in sources]
        if found.pieces is not None:
            parts = zip(read, found.pieces[i], sources, strict=True)
            read = [_piece(run, eqn, c, p, numbers[s], ctx) for c, p, s in parts]
        (cell,) = run.made([result])
        step = run.record(eqn, read, [cell], ctx)
        step.shards = tuple(n for n, taken in zip(numbers, found.taken, strict=True) if taken == i)
        step.collective = True
        made.append(cell)
    if ctx.sharing is not None and len(made) < len(group):
        ctx.sharing.shared.update(c.id for c in made)
    return [[made[i]] for i in found.taken]


def _piece(run: Evaluator, eqn: Any, whole: Cell, data: Any, shard: int, ctx: Context) -> Cell:
    (cell,) = run.made([data])
    run.record(eqn, [whole], [cell], ctx, operation="index").shards = (shard,)
    return cell


def _placed(data: Any, aval: Any, mesh: Any) -> Any:
    """Return an array with the sharding of its type, if the mesh has explicit axes."""
    sharding = getattr(aval, "sharding", None)
    if (
        sharding is None
        or not getattr(sharding.mesh, "explicit_axes", ())
        or not isinstance(mesh, jax.sharding.Mesh)
    ):
        return data
    return jax.device_put(data, jax.sharding.NamedSharding(mesh, sharding.spec))
