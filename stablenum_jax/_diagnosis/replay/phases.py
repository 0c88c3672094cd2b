"""Find which steps are forward, backward or update, and which forward step a derivative belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from stablenum.diagnosis.replay.operations import MOVING
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum_jax._diagnosis.replay.interpreter import Written
from stablenum_jax._diagnosis.replay.naming import function_name

__all__ = ["COMPARING", "assign_phases"]

# What a loop does with its rows, which is not a derivative of anything.
_LOOP_PARTS = ("index", "stack")
# Operations that return truth values, which have no derivative.
COMPARING = ("eq", "ge", "gt", "is_finite", "le", "lt", "ne")
_WITHOUT_DERIVATIVE = (*COMPARING, "and", "not", "or", "xor")
# Iteration and shard (None for any) -> function -> its last step.
_Last: TypeAlias = dict[tuple[str, int | None] | None, dict[str, Step]]
_Table: TypeAlias = dict[Any, _Last]


def assign_phases(trace: Trace, written: list[Written], loss: Iterable[int], outputs: Iterable[int]) -> None:
    """Set each step's ``phase`` and, for derivatives, ``operation`` and ``forward``.

    Steps from which the loss is computed are forward. Of the others, those that differentiation created are
    backward, including factors computed during the forward pass (1 / (2 sqrt x) next to sqrt x). Without a
    loss, steps are forward unless they are transposed or used only by transposed steps; the optimizer's
    arithmetic is the update, even where it reads no gradient (an unused parameter's is a constant 0).

    Args:
        trace: the replay; its steps are changed.
        written: how each step appears in the source, one entry per step.
        loss: the loss, if the program has one.
        outputs: all results.
    """
    transposed = [("transpose(" in w.stack) for w in written]
    roots = list(loss)
    reached = _reaching(trace, roots) if roots else _without_loss(trace, transposed, outputs)
    later: set[int] = set()  # values that derive from a gradient
    for step, how in zip(trace.steps, written, strict=True):
        differentiated = "jvp(" in how.stack
        if transposed[step.index] or (differentiated and step.index not in reached):
            step.phase = "backward"
        elif not differentiated and later.intersection(step.inputs):
            step.phase = "backward" if roots else "update"
        elif not (roots or differentiated) and any(
            f.endswith("update_fn") for f in how.source.functions
        ):  # optax's
            step.phase = "update"
        else:
            continue  # forward
        later.update(step.outputs)
    # In forward mode alone, nothing is transposed, and function and derivative are results alike.
    _within_derivatives(trace, written, levels=2 if roots or any(transposed) else 1)
    _find_forward(trace, written)


def _reaching(trace: Trace, values: Iterable[int], through: Any = None) -> set[int]:
    """Return steps from which ``values`` are computed, without going past a step i with ``through[i]``
    False."""
    todo, steps = list(values), set()
    while todo:
        producer = trace.values[todo.pop()].producer
        if producer is None or producer in steps or (through is not None and not through[producer]):
            continue
        steps.add(producer)
        todo += trace.steps[producer].inputs
    return steps


def _without_loss(trace: Trace, transposed: list[bool], outputs: Iterable[int]) -> set[int]:
    """Return the forward pass of a whole training step: results that do not come from a transposed step, and
    values that are never read (a loss that is not returned)."""
    read = {i for s in trace.steps for i in s.inputs}
    unread = [o for s in trace.steps for o in s.outputs if o not in read]
    return _reaching(trace, [*outputs, *unread], through=[not t for t in transposed])


def _within_derivatives(trace: Trace, written: list[Written], *, levels: int) -> None:
    """Mark the factors of the inner derivative as backward, if the loss itself contains gradients.

    ``levels`` is how often a step is differentiated that belongs to an inner derivative.
    """
    first: dict[Any, Step] = {}
    for step, how in zip(trace.steps, written, strict=True):
        if step.phase != "forward" or how.stack.count("jvp(") < levels or not how.source.call:
            continue
        # Steps with one source are the function and then its derivative: the first that computes something
        # names the function, and those with another operation are factors of the derivative.
        key = (how.source.call, how.source.inner, step.where, step.shards)
        began = first.setdefault(key, step)
        if began.operation in MOVING:
            first[key] = step
        elif step.operation != began.operation:
            step.phase = "backward"


def _find_forward(trace: Trace, written: list[Written]) -> None:
    tables: tuple[_Table, ...] = ({}, {}, {}, {})
    for step, how in zip(trace.steps, written, strict=True):
        if step.phase == "forward":
            for table, key in zip(tables, _keys(how), strict=True):
                if key is not None and step.operation not in _WITHOUT_DERIVATIVE:
                    # The last step of each function, in its iteration on its shard and overall.
                    for where in (*_at(step), None):
                        table.setdefault(key, {}).setdefault(where, {})[step.operation] = step
    for step, how in zip(trace.steps, written, strict=True):
        if step.phase != "backward" or how.primitive in _LOOP_PARTS:
            continue
        for table, key in zip(tables, _keys(how), strict=True):  # the most exact key that is known
            if key in table:
                forward = _best(step, how, table[key])
                step.forward, step.operation = forward.index, forward.operation
                break


def _keys(how: Written) -> tuple[Any, Any, Any, Any]:
    """Return keys from the most exact to the least: the whole stack of calls, instruction of the library and
    call, call, line."""
    source, place = how.source, how.source.place
    call = source.call
    return (
        (call, source.inner, source.frames) if call else None,
        (call, source.inner) if call else None,
        call,
        (place.file, place.line) if place else None,
    )


def _best(step: Step, how: Written, last: _Last) -> Step:
    """Return the last step of the same iteration, shard and function that computes rather than moves
    values."""
    name = function_name(how.source.functions)
    here = set(_at(step))

    def rank(c: Step) -> tuple[bool, bool, bool, bool, int]:
        named = bool(name) and c.operation == name
        here_too = not here.isdisjoint(_at(c))
        return (c.operation not in MOVING, c.where == step.where, here_too, named, c.index)

    known = [c for at in here for c in last.get(at, {}).values()]
    return max([*known, *last[None].values()], key=rank)


def _at(step: Step) -> list[tuple[str, int | None]]:
    """Return the iteration of a step with each shard that runs it."""
    return [(step.where, s) for s in step.shards or (None,)]
