"""What a report says of a place: the line, the operation and the module."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from stablenum.diagnosis.diff.differences import Location, Off
from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.rounding import Rounding
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.notebook_cells import shown_file
from stablenum.diagnosis.replay.source_files import package_of
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = [
    "lines_of", "location_of", "location_of_optimizer", "location_of_value", "off_of", "result_name",
    "share_of",
]  # fmt: skip


def location_of(start: Start | None, side: Side, phase: str) -> Location | None:
    """Return where a side begins to differ."""
    if start is None:
        return None
    step = start.step
    place = start.place or step.place
    own = step.place is not None and step.phase == "update" and not step.library.startswith("torch.optim.")
    if phase == "update" and not own:
        site = side.program.optimizer_at
        place = start.place or (None if site is None else site.line_of(step.library))
    return Location(
        where=_where(place),
        operation=None if start.missing else _operation(step),
        module=_around(side, start) if start.missing else step.module,
        phase=phase,
        code="" if place is None else place.code,
        row=step.index,
        called_at="" if place is None else _called_at(step, place),
    )


def location_of_value(side: Side, value: int) -> Location | None:
    """Return the operation that makes a value, or that reads it first if it comes from outside."""
    producer, reads = side.trace.values[value].producer, (s for s in side.trace.steps if value in s.inputs)
    step = next(reads, None) if producer is None else side.trace.steps[producer]
    return None if step is None else location_of(Start(step), side, step.phase)


def lines_of(places: Iterable[Place]) -> tuple[str, ...]:
    """Return how lines are written, each once."""
    return tuple(dict.fromkeys(map(_where, places)))


def _called_at(step: Step, place: Place) -> str:
    """Return the innermost line of the user's own code above one of an installed package."""
    if not package_of(place.file):
        return ""
    own = [frame for frame in step.frames if not package_of(frame.file)]
    return _where(own[-1]) if own else ""


def location_of_optimizer(side: Side) -> Location | None:
    """Return where the optimizer was made, for a parameter that it leaves as it is."""
    site = side.program.optimizer_at
    if site is None:
        return None
    place = site.place
    return Location(where=_where(place), operation=None, module="", phase="update", code=place.code)


def _around(side: Side, start: Start) -> str:
    """Return the module that lacks an operation: the one whose code holds the line, since the line may call a
    module of a library; that module if it both makes and reads the value there. A parameter that is read as
    it is belongs to its module."""
    step, steps = start.step, side.trace.steps
    value = None if start.value is None else side.trace.values[start.value]
    if value is not None and value.role == "parameter":
        readers = (s.module for s in steps if value.id in s.inputs)
        return next((m for m in readers if value.name.startswith(f"{m}.")), step.module)
    producer = None if value is None else value.producer
    if producer == step.index:
        inside = _reads_on(side, step, start.value)
    else:
        inside = producer is not None and steps[producer].module == step.module
    if inside:
        return step.module
    code = _code_of(step, start.place)
    modules = {s.module for s in side.trace.steps if _code_of(s) == code}
    around = [m for m in modules if m != step.module and _lies_in(step.module, m)]
    return max(around, key=len, default=step.module)


def _reads_on(side: Side, step: Step, value: int | None) -> bool:
    """Return whether the module of a step computes with a value that it makes, as it is or rearranged."""
    read = {value}
    for later in side.trace.steps[step.index + 1 :]:
        if (later.phase, later.module) == (step.phase, step.module) and not read.isdisjoint(later.inputs):
            if not quiet(later):
                return True
            read.update(later.outputs)
    return False


def _code_of(step: Step, line: Place | None = None) -> tuple[object, ...]:
    """Return the function that holds a step's line, or the line that leads to it, with the calls that lead
    there."""
    depth = step.frames.index(line) if line in step.frames else -1
    place = step.place if depth < 0 else line
    return (step.frames[:depth], None if place is None else (place.file, place.function))


def _lies_in(module: str, other: str) -> bool:
    return not other or module.startswith((f"{other}.", f"{other}/"))


def _operation(step: Step) -> str:
    return f"{step.library}: {step.operation}" if step.library else step.operation


def _where(place: Any) -> str:
    if place is None:
        return "?"
    file = shown_file(place.file)
    short = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{file if short.startswith('..') else short}:{place.line}"


def result_name(kind: str, name: str) -> str:
    """Return how a result is called."""
    return {"gradient": f"gradient of {name}", "updated": f"{name} after the update"}.get(kind, name)


def off_of(found: Rounding, side: Side, compiled: Mapping[str, float] | None = None) -> Off:
    """Return the rounding errors of a side."""
    step = found.step
    place = None if step is None else step.place
    return Off(
        error=found.error,
        where="" if place is None else _where(place),
        operation="" if step is None else _operation(step),
        added=found.added,
        compiled=compiled,
    )


def share_of(side: Side, found: Mapping[int, Any]) -> tuple[int, int]:
    """Return how many of the telling values of a side are shared, and how many there are."""
    telling = [i for i in range(len(side.prints)) if not side.neutral(i)]
    return sum(i in found for i in telling), len(telling)
