"""Which way the values of a program go to its loss, and where their gradients end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.kinds import quiet
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.replay.trace import Step
from stablenum.diagnosis.replay.values import Place

__all__ = ["OTHER", "Flow", "Read", "line_between", "maker", "size"]

OTHER = {"left": "right", "right": "left"}


class Read(NamedTuple):
    """A value, and a step that computes with it."""

    value: int
    step: Step


class Flow:
    """The forward pass of a side up to the loss, and where it ends the flow of gradients."""

    def __init__(self, comparison: Comparison, name: str, group: Group) -> None:
        own: Side = comparison.side(name)
        self.side, self.trace, self.stops = own, own.trace, own.play.stops
        self.equal = comparison.found.known(name)
        losses = [r.value for r in own.play.results if (r.kind, r.step) == ("loss", group.step)]
        self.steps, live = set[int](), set[int]()
        _reached(own, losses, self.steps, frozenset())
        _reached(own, losses, live, self.stops)
        self.live, self.fed = live, _fed(own)
        self.readers: dict[int, list[Step]] = {}
        for index in sorted(self.steps):
            for value in own.trace.steps[index].inputs:
                self.readers.setdefault(value, []).append(own.trace.steps[index])

    def read_by(self, values: Iterable[int]) -> list[Read]:
        """Return what computes with values, past the steps that only move them."""
        todo, found, seen = [(v, v) for v in values], list[Read](), set[int]()
        while todo:
            first, value = todo.pop(0)
            for step in self.readers.get(value, ()):
                if step.index in seen or step.index in self.stops:
                    continue
                seen.add(step.index)
                if quiet(step):
                    todo += [(first, o) for o in step.outputs]
                else:
                    found.append(Read(first, step))
        return found

    def equals(self, value: int) -> list[int]:
        """Return the values of the other side's forward pass that are equal to one of this side."""
        return list(self.equal.get(value, ()))

    def stopped_values(self) -> set[int]:
        """Return the values at which the flow ends."""
        return {i for s in self.stops if s in self.steps for i in self.trace.steps[s].inputs}


def _fed(side: Side) -> set[int]:
    """Return the values through which gradients reach a parameter that has one."""
    trained = {r.name for r in side.play.results if r.kind == "gradient"}
    found = {v.id for v in side.trace.values if v.role == "parameter" and v.name in trained}
    for step in side.trace.steps:
        if step.index not in side.play.stops and found.intersection(step.inputs):
            found.update(step.outputs)
    return found


def _reached(side: Side, values: Iterable[int], steps: set[int], without: frozenset[int]) -> None:
    """Add the steps from which values are computed, without going past some."""
    todo = list(values)
    while todo:
        producer = side.trace.values[todo.pop()].producer
        if producer is None or producer in steps or producer in without:
            continue
        steps.add(producer)
        todo += side.trace.steps[producer].inputs


def maker(side: Flow | Side, value: int) -> Step | None:
    """Return the step that computed a value, past those that only moved it if there is one."""
    producer, first = side.trace.values[value].producer, None
    while producer is not None:
        step = side.trace.steps[producer]
        first = first or step
        if not quiet(step) or not step.inputs:
            return step
        producer = side.trace.values[step.inputs[0]].producer
    return first


def line_between(side: Side, read: Read) -> Place | None:
    """Return the line of the function in which a value is both made and handed on to what reads it, if the
    step that reads it lies in a function that is called there; None if it lies there itself."""
    producer = side.trace.values[read.value].producer
    if producer is None:
        return None
    frames = read.step.frames
    pairs = zip(frames, side.trace.steps[producer].frames, strict=False)
    depth = next((k for k, (mine, theirs) in enumerate(pairs) if mine != theirs), len(frames))
    if depth >= len(frames) - 1:
        return None
    mine, theirs = frames[depth], side.trace.steps[producer].frames[depth]
    together = (mine.file, mine.function) == (theirs.file, theirs.function)
    return mine if together else frames[depth - 1] if depth else None


def size(side: Side, value: int) -> int:
    """Return how many entries a value has."""
    return int(np.prod(side.shapes[value], dtype=int))
