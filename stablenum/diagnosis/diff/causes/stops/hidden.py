"""Find a place that ends the flow of gradients at a value that the other side never computes.

What such a place leaves out is measured: the part of the loss's slope that would pass there, by finite
differences, is what the gradients of the two sides differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from stablenum.diagnosis.diff.causes.judge import Slope
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.flow import OTHER, Flow, Read, maker
from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.places.slopes import direction_of
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Hidden", "goes_on", "hidden_stop", "part_without_gradients"]

# So many lines are tried, each with several evaluations. It was 6 until stops were looked for also at values
# that both sides have. Chosen, not measured.
_MOST_PLACES = 8


class Hidden(NamedTuple):
    """A place that ends the flow on one side.

    Attributes:
        side: that side.
        stop: the step that ends it.
        passes: the step of the other side that gives what follows from it; None if no such value is shared.
        slope: what would pass there, and what its gradients lack.
        reads: what the other side reads there.
    """

    side: str
    stop: Step
    passes: Start | None
    slope: Slope
    reads: tuple[Read, ...] = ()


def hidden_stop(comparison: Comparison, group: Group) -> Hidden | None:
    """Return the line that ends the flow of one side so that exactly what would pass there is missing in its
    gradients; None if there is no such line. First come lines that end it at a value that the other side
    never computes."""
    return _found(comparison, group, _unknown_stops) or _found(comparison, group, _stops)


def part_without_gradients(comparison: Comparison, group: Group) -> Hidden | None:
    """Return the step at which a part of one side without gradients, such as the forward pass of another
    model, hands on what it has computed, so that exactly what would pass there is missing in its gradients;
    None if there is no such part, or the other side has no such value."""
    part = _found(comparison, group, _ends)
    return part if part is not None and part.reads else None


def goes_on(comparison: Comparison, group: Group, side: str, stop: Step) -> bool:
    """Return whether a side computes further without gradients after a step that ends the flow."""
    flow, other = Flow(comparison, side, group), Flow(comparison, OTHER[side], group)
    return all(place.stop.index != stop.index for place in _ends(flow, other))


def _found(
    comparison: Comparison, group: Group, places: Callable[[Flow, Flow], Iterator[_Place]]
) -> Hidden | None:
    along = direction_of(comparison, group)
    if along is None:
        return None
    gap = along.given("left") - along.given("right")
    for name, lacking in (("right", gap), ("left", -gap)):
        flow, other = Flow(comparison, name, group), Flow(comparison, OTHER[name], group)
        some = list(islice(places(flow, other), _MOST_PLACES))
        values = [place.values for place in some]
        held = {o for step in _ending(flow) for o in step.outputs}
        slopes = chain(along.through(name, values), along.through_alone(name, values, held))
        for place, passing in zip(chain(some, some), slopes, strict=True):
            slope = Slope(passing, lacking, 0.0)
            if passing and slope.heals:
                return Hidden(name, place.stop, place.passes, slope, place.reads)
    return None


class _Place(NamedTuple):
    """Values of a side through which no gradient may pass, the step that ends the flow, and the step of the
    other side at which it passes, or what it reads there."""

    values: list[int]
    stop: Step
    passes: Start | None = None
    reads: tuple[Read, ...] = ()


def _unknown_stops(flow: Flow, other: Flow) -> Iterator[_Place]:
    """Yield the lines that end the flow at values that the other side never computes."""
    unknown = [s for s in _ending(flow) if any(flow.side.trained[i] and not flow.equals(i) for i in s.inputs)]
    return _by_line(flow, other, unknown)


def _stops(flow: Flow, other: Flow) -> Iterator[_Place]:
    """Yield the lines that end the flow."""
    return _by_line(flow, other, _ending(flow))


def _ending(flow: Flow) -> list[Step]:
    """Return the steps that end the flow at values that parameters have a say in."""
    stops = (flow.trace.steps[i] for i in sorted(flow.stops) if i in flow.steps)
    return [s for s in stops if any(flow.side.trained[i] for i in s.inputs)]


def _by_line(flow: Flow, other: Flow, ending: Sequence[Step]) -> Iterator[_Place]:
    for place in dict.fromkeys(s.place for s in ending):
        here = [s for s in ending if s.place == place]
        yield _Place([o for s in here for o in s.outputs], here[-1], _passing(flow, other, here))


def _ends(flow: Flow, other: Flow) -> Iterator[_Place]:
    """Yield the last steps of the parts without gradients, whose values are read where gradients flow."""
    found: dict[int, list[int]] = {}
    for step in (flow.trace.steps[i] for i in sorted(flow.steps)):
        if flow.fed.isdisjoint(step.outputs):
            continue
        for value in step.inputs:
            made_by = _handing_on(flow, value)
            if made_by is not None and flow.side.trained[value] and value not in flow.fed:
                found.setdefault(made_by.index, []).append(value)
    for index, values in found.items():
        same = min((j for v in values for j in flow.equals(v)), default=None)
        reads = () if same is None else other.read_by([same])
        yield _Place(list(dict.fromkeys(values)), flow.trace.steps[index], reads=tuple(reads))


def _handing_on(flow: Flow, value: int) -> Step | None:
    """Return the step that computed a value, past those that only moved it, but not past one that ends the
    flow. Of values that were put together, that is the first one that parameters have a say in."""
    made_by = flow.trace.values[value].producer
    while made_by is not None:
        step = flow.trace.steps[made_by]
        if step.index in flow.stops or not quiet(step) or not step.inputs:
            return step
        moved = next((i for i in step.inputs if flow.side.trained[i]), step.inputs[0])
        made_by = flow.trace.values[moved].producer
    return None


def _passing(flow: Flow, other: Flow, stops: Iterable[Step]) -> Start | None:
    """Return the step of the other side that reads a parameter at which some steps end the flow, or that
    gives the first common value after them."""
    ended = (i for s in stops for i in s.inputs if flow.trace.values[i].role == "parameter")
    reads = other.read_by(j for i in ended for j in flow.equals(i))
    if reads:
        return Start(reads[0].step, missing=True, value=reads[0].value)
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
