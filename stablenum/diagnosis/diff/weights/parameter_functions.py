"""Values that are computed from parameters alone, entry by entry: a moving average, a normalised weight."""

from __future__ import annotations

from functools import cached_property

from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step

__all__ = ["ENTRY_BY_ENTRY", "ParameterFunctions"]

ENTRY_BY_ENTRY = frozenset({"add", "sub", "mul", "div", "cast", "to", "copy", "clone", "neg", "lerp"})


class ParameterFunctions:
    """Tells the steps of a program that change a parameter entry by entry."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def has(self, step: Step, value: int) -> bool:
        """Return whether a step computes each entry from that of a value, and from parameters or numbers."""
        if not ENTRY_BY_ENTRY.intersection((step.operation.rstrip("_"), step.primitive, *_plain(step))):
            return False
        side, others = self._side, [i for i in step.inputs if i != value]
        return (
            len(step.outputs) == 1
            and side.shapes[step.outputs[0]] == side.shapes[value]
            and not any(self._of_data[i] for i in others)
            and all(side.trained[i] or not any(side.shapes[i]) for i in others)
        )

    @cached_property
    def _of_data(self) -> list[bool]:
        """Whether each value depends on an argument."""
        trace = self._side.trace
        found = [v.producer is None and v.role == "input" for v in trace.values]
        for step in trace.steps:
            for output in step.outputs:
                found[output] = any(found[i] for i in step.inputs)
        return found


def _plain(step: Step) -> list[str]:
    """Return the name of an operation of aten without its overload."""
    return step.primitive.split(".")[1:2] if step.primitive.startswith("aten.") else []
