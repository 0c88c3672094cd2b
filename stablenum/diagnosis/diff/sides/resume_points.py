"""Where an evaluation can be taken up again, so that what comes before is not computed once more."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

__all__ = ["Given", "Stand", "Stands"]

State = TypeVar("State")

# Two stands lie at least so many values apart; more, if all together take more than so many bytes (256 MiB),
# or if there are too many: each copies what is known of the whole program, so that their number must not grow
# with it. Fewer stands save memory, and more save time: the values in between are computed once more. Chosen,
# not measured.
_EVERY, _MOST_BYTES, _MOST_STANDS = 64, 2**28, 64


@dataclass(frozen=True, slots=True)
class Given:
    """The arrays with which a program is evaluated.

    Attributes:
        weights: those that take the place of its parameters; None for its own.
        replaced: those that take the place of values, by index.
    """

    weights: Mapping[str, Any] | None
    replaced: Mapping[int, Any]

    def before(self, count: int) -> Given:
        """Return the arrays that matter to so many first values."""
        return Given(self.weights, {i: x for i, x in self.replaced.items() if i < count})

    def same(self, other: Given) -> bool:
        """Return whether two evaluations are given the same arrays."""
        mine, theirs = self.replaced, other.replaced
        alike = mine.keys() == theirs.keys() and all(x is theirs[i] for i, x in mine.items())
        return alike and self.weights is other.weights


@dataclass(frozen=True, slots=True)
class Stand(Generic[State]):
    """How far an evaluation has come.

    Attributes:
        count: how many values there are so far.
        given: the arrays that matter to them.
        state: what the evaluation goes on with.
        sizes: the bytes of each array in it, by the array's id.
    """

    count: int
    given: Given
    state: State
    sizes: Mapping[int, int]


@dataclass(slots=True)
class Stands(Generic[State]):
    """The stands of a program."""

    _kept: list[Stand[State]] = field(default_factory=list)  # in order
    _every: int = _EVERY

    def before(self, value: int, given: Given) -> Stand[State] | None:
        """Return the last stand before a value by which an evaluation with these arrays comes."""
        near = (s for s in reversed(self._kept) if s.count <= value and s.given.same(given.before(s.count)))
        return next(near, None)

    def only(self, given: Given) -> None:
        """Forget all stands by which an evaluation with these arrays does not come."""
        self._kept = [s for s in self._kept if s.given.same(given.before(s.count))]

    def wants(self, count: int) -> bool:
        """Return whether a stand after so many values is not near another one."""
        at = bisect.bisect_left(self._kept, count, key=_count)
        return all(abs(s.count - count) >= self._every for s in self._kept[max(at - 1, 0) : at + 1])

    def add(self, stand: Stand[State]) -> None:
        """Keep a stand. If all together are too large, every other one is forgotten."""
        bisect.insort(self._kept, stand, key=_count)
        while len(self._kept) > 1 and (len(self._kept) > _MOST_STANDS or _size(self._kept) > _MOST_BYTES):
            self._kept, self._every = self._kept[::2], 2 * self._every


def _count(stand: Stand[Any]) -> int:
    return stand.count


def _size(stands: Iterable[Stand[Any]]) -> int:
    return sum({array: size for s in stands for array, size in s.sizes.items()}.values())
