"""Programs that several shards of a mesh, or several ranks, run each on its own part of the data.

A step of the trace that each of them runs for itself has the numbers of those that ran it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.replay.values import Place
from stablenum.diagnosis.replay.walk import Origin

__all__ = ["alike", "shards_of", "spread_of"]

# So many operations are named through which a bad value reached other shards.
_MOST_NAMED = 3


def alike(origins: Sequence[Origin]) -> list[list[Origin]]:
    """Return the origins in groups: those of one operation that went wrong in several shards are together.

    Example:
        >>> t = Trace()
        >>> made = [t.add_value(flags=(True, False, False)) for _ in range(2)]
        >>> steps = [t.add_step("log", inputs=[], outputs=[m], shards=[i]) for i, m in enumerate(made)]
        >>> origins = [Origin(step=s, value=t.values[m], kind="nan") for s, m in zip(steps, made)]
        >>> [len(group) for group in alike(origins)]
        [2]
    """
    groups: dict[object, list[Origin]] = {}
    for origin in origins:
        s = origin.step
        same = (s.place, s.operation, s.primitive, s.phase, s.where, origin.kind) if s and s.shards else None
        groups.setdefault(same or id(origin), []).append(origin)
    return list(groups.values())


def shards_of(trace: Trace, origins: Iterable[Origin], bad: Iterable[int], mesh: Set[int]) -> frozenset[int]:
    """Return the numbers of the shards in which a bad value was born.

    A value from outside, or a mask or a constant that all shards have, belongs to those that let it into a
    result.

    Args:
        trace: the replay.
        origins: where the value was born.
        bad: indices of the results that are not finite.
        mesh: the numbers of all shards.
    """
    found: set[int] = set()
    for origin in origins:
        own = frozenset(origin.step.shards if origin.step is not None else ())
        common = origin.step is None or (own == mesh and _is_placed(trace, origin))
        found |= (_letting_in(trace, origin.value.id, bad, mesh) or own) if common else own
    return frozenset(found)


def _is_placed(trace: Trace, origin: Origin) -> bool:
    """Return whether a value was put there by a mask, or computed from constants alone."""
    read = [] if origin.step is None else trace.inputs_of(origin.step)
    return origin.placed or all(v.producer is None and v.role == "constant" for v in read)


def _letting_in(trace: Trace, value: int, bad: Iterable[int], mesh: Set[int]) -> frozenset[int]:
    """Return the shards through which a value that all of them read came into the bad results."""
    way = _way(trace, bad)
    reached: set[int] = {value}
    found: set[int] = set()
    for step in trace.steps:
        if step.index not in way or reached.isdisjoint(step.inputs):
            continue
        if step.shards and not step.collective and mesh != set(step.shards):
            found.update(step.shards)
        else:
            reached.update(step.outputs)
    return frozenset(found)


def _way(trace: Trace, bad: Iterable[int]) -> set[int]:
    """Return the steps through which bad values came into the results."""
    todo: list[int] = list(bad)
    steps: set[int] = set()
    while todo:
        producer = trace.values[todo.pop()].producer
        if producer is not None and producer not in steps:
            steps.add(producer)
            todo += [v.id for v in trace.inputs_of(trace.steps[producer]) if not v.finite]
    return steps


def spread_of(
    trace: Trace, origins: Sequence[Origin], shards: Iterable[int], place: Place | None
) -> list[str]:
    """Name the operations through which a bad value first reached other shards, in order.

    Args:
        trace: the replay.
        origins: where it was born, in several shards perhaps.
        shards: the numbers of these shards.
        place: the line that is known already; another line of its file is given by its number.
    """
    reached, there, found = {o.value.id for o in origins}, set(shards), dict[str, None]()
    for step in trace.steps:
        if reached.isdisjoint(step.inputs):
            continue
        reached.update(v.id for v in trace.outputs_of(step) if not v.finite)
        if step.collective and not there.issuperset(step.shards) and not reached.isdisjoint(step.outputs):
            there.update(step.shards)
            found[_named(step, place)] = None
    return list(found)[:_MOST_NAMED]


def _named(step: Step, place: Place | None) -> str:
    name = step.primitive.removesuffix("_invariant")
    if step.place is None:
        return name
    same = place is not None and place.file == step.place.file
    return f"{name} ({f'line {step.place.line}' if same else step.place})"
