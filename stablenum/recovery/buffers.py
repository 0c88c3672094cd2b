"""Buffers, such as running statistics, that jump in one step although they are finite.

A normalization divides the scale of a batch out again, so that a batch on another scale leaves no trace in
loss and gradients. Its running statistics keep the batch: with a momentum of a, one whose values are c times
as large makes the mean square that they keep 1 - a + a * c**2 times as large.

Each buffer is measured after each step and compared with itself: in a step that is a symptom it more than
doubles, against the largest size that it lately had, and changes by many times its largest change lately.
What is let through leaves a running standard deviation less than twice as large as it lately was.
"Lately" fades: what was seen counts for a tenth after ``window`` steps, so that the first steps, in which
statistics leave the values that they were made with, do not hide what follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Any, NamedTuple

__all__ = ["BufferWatch", "Noted", "Part", "is_judged", "sizes"]

_DOUBLED = 2.0
_FADED = 0.1
# Statistics with PyTorch's momentum of 0.1 keep 12 % of their first values after 20 steps.
_ENOUGH_CHANGES = 20
# As for losses: at least 1 % of the first values. A branch that gave 0 at first may begin at any time.
_LEAST = 0.01
# Elements: the channels of normalizations are far fewer, copies of weights and caches far more.
_LARGEST = 2**16


class Part(Enum):
    """What a buffer is: one of the running statistics of a layer, which are judged together, or a whole."""

    MEAN = "mean"
    VARIANCE = "variance"
    WHOLE = "whole"


def is_judged(shape: Sequence[int], part: Part) -> bool:
    """Return whether a buffer of floating-point numbers is judged.

    Single numbers are counters, rates and metrics, which are set on purpose. Large buffers would cost time.
    """
    least = 1 if part is Part.WHOLE else 0
    return least < math.prod(shape) <= _LARGEST


def sizes(norms: Iterable[tuple[str, Part, int, float]]) -> dict[str, float]:
    """Return the sizes of buffers, and of the running statistics of layers, by name.

    Args:
        norms: of each buffer, its name or that of its layer, what it is, how many elements it has, and its
            Euclidean norm.
    """
    squares: dict[str, float] = {}
    for name, part, elements, norm in norms:
        whole = part is Part.WHOLE
        key = name if whole else f"running statistics of {name}"
        square = norm if part is Part.VARIANCE else norm * norm / (elements if whole else 1)
        squares[key] = squares.get(key, 0.0) + square
    return {name: math.sqrt(square) for name, square in squares.items()}


class Noted(NamedTuple):
    """What was measured after a step.

    Attributes:
        step: how many steps the run had made.
        sizes: by name, the root mean square of each buffer; of running statistics the root of
            norm(mean)**2 + norm(variance). Not finite if a buffer is not.
    """

    step: int
    sizes: Mapping[str, float]


@dataclass(slots=True)
class _Course:
    """How a buffer went so far: its newest size, changes, and the largest of both lately."""

    size: float
    smallest_at_first: float
    largest: float
    largest_change: float = 0.0
    changes: int = 0

    def jumps_to(self, size: float, threshold: float) -> bool:
        return (
            self.changes >= _ENOUGH_CHANGES
            and size > _DOUBLED * max(self.largest, _LEAST * self.smallest_at_first)
            and size - self.size > threshold * self.largest_change
        )

    def add(self, size: float, kept: float) -> None:
        change = abs(size - self.size)
        self.changes += change > 0.0
        if self.changes < _ENOUGH_CHANGES:
            self.smallest_at_first = min(self.smallest_at_first, size)
        self.size, self.largest = size, max(size, kept * self.largest)
        self.largest_change = max(change, kept * self.largest_change)


class BufferWatch:
    """Compares the sizes of buffers with what they were before.

    Args:
        threshold: how many times its largest change a buffer must change by.
        window: after how many steps a size or a change counts for a tenth.
    """

    def __init__(self, threshold: float, window: int) -> None:
        self._threshold, self._kept = threshold, _FADED ** (1 / window)
        self._courses: dict[str, _Course] = {}

    def look(self, noted: Iterable[Noted]) -> tuple[int, list[str]] | None:
        """Take in what was measured after each of some steps.

        Returns:
            The first step in which buffers jumped, and their names; None if there is none. What follows such
            a step is not taken in.
        """
        for step, sizes in noted:
            jumped = [name for name, size in sizes.items() if self._jumps(name, size)]
            if jumped:
                return step, jumped
            for name, size in sizes.items():
                self._add(name, size)
        return None

    def _jumps(self, name: str, size: float) -> bool:
        course = self._courses.get(name)
        return course is not None and course.jumps_to(size, self._threshold)

    def _add(self, name: str, size: float) -> None:
        if not math.isfinite(size):  # a mask of -inf; what else is not finite is a symptom of its own
            return
        course = self._courses.get(name)
        if course is None:
            self._courses[name] = _Course(size, smallest_at_first=size, largest=size)
        else:
            course.add(size, self._kept)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which :meth:`load_state_dict` takes."""
        return {name: list(astuple(course)) for name, course in self._courses.items()}

    def load_state_dict(self, plain: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._courses = {name: _Course(*course) for name, course in plain.items()}
