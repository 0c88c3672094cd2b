"""Find a place that ends the flow of gradients at a value that the other side never computes.

What such a place leaves out is measured: the part of the loss's slope that would pass there, by finite
differences, is what the gradients of the two sides differ by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
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
    in its gradients; None if there is no such place.

    That is a line whose stop reads what the other side never computes, or one at which a whole part without
    gradients, such as the forward pass of another model, hands on what it has computed.
    """
    along = direction_of(comparison, group)
    if along is None:
        return None
    gap = along.given("left") - along.given("right")
    sides = [
        (name, lacking, Flow(comparison, name, group), Flow(comparison, OTHER[name], group))
        for name, lacking in (("right", gap), ("left", -gap))
    ]
    for places in (_stops, _ends):
        for name, lacking, flow, other in sides:
            for place in islice(places(flow, other), _MOST_PLACES):
                passing = along.through(name, place.values)
                if passing and abs(passing - lacking) <= _CLOSE * abs(lacking):
                    return Hidden(name, place.stop, place.passes)
    return None


class _Place(NamedTuple):
    """Values of a side through which gradients may lack, the step that ends the flow, and that of the other
    side at which it passes."""

    values: list[int]
    stop: Step
    passes: Start | None


def _stops(flow: Flow, other: Flow) -> Iterator[_Place]:
    """Yield the lines that end the flow at values that the other side never computes."""
    stops = [flow.trace.steps[i] for i in sorted(flow.stops) if i in flow.steps]
    unknown = [s for s in stops if any(flow.side.trained[i] and not flow.equals(i) for i in s.inputs)]
    for place in dict.fromkeys(s.place for s in unknown):
        here = [s for s in unknown if s.place == place]
        yield _Place([o for s in here for o in s.outputs], here[-1], _passing(flow, other, here))


def _ends(flow: Flow, other: Flow) -> Iterator[_Place]:
    """Yield the last steps of the parts without gradients, whose values are read where gradients flow."""
    found: dict[int, list[int]] = {}
    for step in (flow.trace.steps[i] for i in sorted(flow.steps)):
        if flow.fed.isdisjoint(step.outputs):
            continue
        for value in step.inputs:
            made_by = maker(flow, value)
            if made_by is not None and flow.side.trained[value] and value not in flow.fed:
                found.setdefault(made_by.index, []).append(value)
    for index, values in found.items():
        same = min((j for v in values for j in flow.equals(v)), default=None)
        made_by = None if same is None else maker(other, same)
        passes = None if made_by is None else Start(made_by, missing=True, value=same)
        yield _Place(list(dict.fromkeys(values)), flow.trace.steps[index], passes)


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
