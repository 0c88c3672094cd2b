"""Which batch each of the last steps used, so that reports can name the data of a spike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from stablenum.guard.recorder import CAPACITY
from stablenum.recovery.positions import Place

__all__ = ["Identifiers"]

_HELD = 8 * CAPACITY  # steps whose identifiers are known
_BATCHES = 2 * CAPACITY  # steps whose batches are held, if they are


class Identifiers:
    """The identifiers of the batches of the last steps.

    Args:
        identify: returns a batch's identifier; its place in the data by default.
        keep_batches: whether the batches themselves are held too.
    """

    def __init__(self, identify: Callable[[Any], Any] | None, *, keep_batches: bool) -> None:
        self._identify = identify
        self._known: dict[int, Any] = {}
        self._batches: deque[tuple[int, Any]] = deque(maxlen=_BATCHES if keep_batches else 0)

    def note(self, step: int, place: Place, batch: Any) -> None:
        """Note the batch of a step; a step that is made again after a rewind replaces the one before."""
        self._known[step] = self.identified(place, batch)
        self._known.pop(step - _HELD, None)
        self._batches.append((step, batch))

    def identified(self, place: Place, batch: Any) -> Any:
        """Return the identifier of a batch."""
        return place._asdict() if self._identify is None else self._identify(batch)

    def of(self, step: int) -> Any:
        """Return the identifier of a step's batch; None if it is not known."""
        return self._known.get(step)

    def range(self, first: int, last: int) -> tuple[Any, ...]:
        """Return the known identifiers of the steps from ``first`` to ``last``."""
        return tuple(self._known[step] for step in range(first, last + 1) if step in self._known)

    def batch_of(self, step: int) -> tuple[Any] | None:
        """Return the batch of a step, in a tuple; None if it is not held."""
        return next(((batch,) for at, batch in reversed(self._batches) if at == step), None)
