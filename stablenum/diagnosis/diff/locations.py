"""What a report says of a place: the line, the operation and the module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stablenum.diagnosis.diff.differences import Location, Off
from stablenum.diagnosis.diff.frontier import Start
from stablenum.diagnosis.diff.rounding import Rounding
from stablenum.diagnosis.diff.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["location_of", "off_of", "result_name", "share_of"]


def location_of(start: Start | None, side: Side, phase: str) -> Location | None:
    """Return where a side begins to differ."""
    if start is None:
        return None
    step = start.step
    place = step.place
    own = place is not None and step.phase == "update" and not step.library.startswith("torch.optim.")
    if phase == "update" and not own:
        place = side.program.optimizer_at
    return Location(
        where=_where(place),
        operation=None if start.missing else _operation(step),
        module=step.module,
        phase=phase,
        code="" if place is None else place.code,
    )


def _operation(step: Step) -> str:
    return f"{step.library}: {step.operation}" if step.library else step.operation


def _where(place: Any) -> str:
    if place is None:
        return "?"
    short = os.path.relpath(place.file) if os.path.isabs(place.file) else place.file
    return f"{place.file if short.startswith('..') else short}:{place.line}"


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
