"""What a loop computes in its iterations, put together: one program may compute it at once.

A loop over micro-batches, rows, heads or times holds in parts what the other program holds as a whole. The
numbers of a fingerprint are sums and extremes, so that those of the whole follow from those of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.sides import MOST_NOISE, Side

__all__ = ["Whole", "put_together", "wholes_of"]

# A line of a loop computes at most so many values of one kind in an iteration, and a loop has at most so many
# values to be put together: two ways for each number of values in an iteration. Chosen, not measured.
_MOST_IN_ONE, _MOST_PARTS = 16, 4096


class Whole(NamedTuple):
    """Values of the iterations of a loop.

    Attributes:
        parts: the values.
        mark: the fingerprint of all of them together.
        tolerance: how far it may move by rounding.
    """

    parts: tuple[int, ...]
    mark: Fingerprint
    tolerance: float


def wholes_of(side: Side) -> list[Whole]:
    """Return what may belong together: the values that the same operation of the same line gives again and
    again. If a line computes several in an iteration, they are told apart by their order. What is only moved
    or picked is left out: several slices of one value are no loop."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for step in (s for s in side.trace.steps if not (quiet(s) or "index" in kind(s))):
        for number, value in enumerate(step.outputs):
            if side.prints[value].floating:
                key = (
                    step.frames or step.place, step.primitive, step.operation, step.module, step.phase,
                    number, side.shapes[value],
                )  # fmt: skip
                alike.setdefault(key, []).append(value)
    groups = (parts for values in alike.values() for parts in _parts(values))
    wholes = (_whole(side, parts) for parts in groups if any(not side.neutral(i) for i in parts))
    return [whole for whole in wholes if whole.tolerance <= MOST_NOISE]


def _parts(values: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the values of the iterations of a loop, for each number of values that an iteration may give: in
    turn, or one after the other if the loop runs again."""
    count = len(values)
    if not 2 <= count <= _MOST_PARTS:
        return
    for each in range(1, min(_MOST_IN_ONE, count // 2) + 1):
        if count % each:
            continue
        for i in range(each):
            yield tuple(values[i::each])
            if each > 1:
                yield tuple(values[i * count // each : (i + 1) * count // each])


def _whole(side: Side, parts: tuple[int, ...]) -> Whole:
    """Return values put together. Each moves the whole as far as it has a share in it."""
    marks = [side.prints[i] for i in parts]
    mark = put_together(marks)
    moved = [side.tolerance[i] for i in parts]
    first = sum(t * m.absolute for t, m in zip(moved, marks, strict=True))
    second = sum(t * m.squares for t, m in zip(moved, marks, strict=True))
    return Whole(parts, mark, max(first / (mark.absolute or 1.0), second / (mark.squares or 1.0)))


def put_together(marks: Sequence[Fingerprint]) -> Fingerprint:
    """Return the fingerprint of several arrays put together.

    Example:
        >>> from stablenum.diagnosis.diff.sides.fingerprints import fingerprint
        >>> put_together([fingerprint([1.0, -2.0]), fingerprint([3.0])]) == fingerprint([1.0, -2.0, 3.0])
        True
    """
    return Fingerprint(
        sum(m.entries for m in marks),
        sum(m.total for m in marks),
        sum(m.absolute for m in marks),
        sum(m.squares for m in marks),
        sum(m.signed for m in marks),
        min(m.least for m in marks),
        max(m.greatest for m in marks),
        all(m.floating for m in marks),
        any(m.bad for m in marks),
    )
