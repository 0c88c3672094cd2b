"""Find a place that ends the flow of gradients at a value that the other side never computes.

What such a place leaves out is measured: the part of the loss's slope that would pass there, by finite
differences, is what the gradients of the two sides differ by.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stablenum.diagnosis.diff.comparison import Comparison
from stablenum.diagnosis.diff.flow import OTHER, Flow, maker
from stablenum.diagnosis.diff.frontier import Start
from stablenum.diagnosis.diff.results import Group
from stablenum.diagnosis.diff.slopes import direction_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Hidden", "hidden_stop"]

_CLOSE = 1e-5
_MOST_PLACES = 6


class Hidden(NamedTuple):
    """A place that ends the flow on one side.

    Attributes:
        side: that side.
        stop: the step that ends it.
        passes: the step of the other side that gives what follows from it; None if no such value is shared.
    """

    side: str
    stop: Step
    passes: Start | None


def hidden_stop(comparison: Comparison, group: Group) -> Hidden | None:
    """Return the place at which only one side ends the flow, so that exactly what would pass there is missing
    in its gradients; None if there is no such place."""
    along = direction_of(comparison, group)
    if along is None:
        return None
    gap = along.given("left") - along.given("right")
    for name, lacking in (("right", gap), ("left", -gap)):
        flow = Flow(comparison, name, group)
        stops = [flow.trace.steps[i] for i in sorted(flow.stops) if i in flow.steps]
        unknown = [s for s in stops if any(flow.side.trained[i] and not flow.equals(i) for i in s.inputs)]
        for place in list(dict.fromkeys(s.place for s in unknown))[:_MOST_PLACES]:
            here = [s for s in unknown if s.place == place]
            passing = along.through(name, [o for s in here for o in s.outputs])
            if passing and abs(passing - lacking) <= _CLOSE * abs(lacking):
                return Hidden(name, here[-1], _passing(flow, Flow(comparison, OTHER[name], group), here))
    return None


def _passing(flow: Flow, other: Flow, stops: Iterable[Step]) -> Start | None:
    """Return the step of the other side that gives the first common value after some steps."""
    todo, seen = [o for s in stops for o in s.outputs], set[int]()
    while todo:
        for step in flow.readers.get(todo.pop(0), ()):
            if step.index in seen:
                continue
            seen.add(step.index)
            same = [j for o in step.outputs if not flow.side.neutral(o) for j in flow.equals(o)]
            made_by = maker(other, min(same)) if same else None
            if made_by is not None:
                return Start(made_by, missing=True, value=min(same))
            todo += step.outputs
    return None
