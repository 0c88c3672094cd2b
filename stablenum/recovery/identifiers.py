"""Which batch each of the last steps used, so that reports can name the data of a spike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from stablenum.guard.recorder import CAPACITY
from stablenum.recovery.positions import Place

__all__ = ["Identifiers", "shown", "shown_range"]

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


def shown(identifier: Any) -> str:
    """Return a batch's identifier as messages show it after the word "batch".

    Example:
        >>> shown({"epoch": 1, "batch": 12}), shown("shard-3, row 4096")
        ('12 of epoch 1', 'shard-3, row 4096')
    """
    if _is_place(identifier):
        return f"{identifier['batch']} of epoch {identifier['epoch']}"
    if isinstance(identifier, Mapping):
        return " ".join(f"{key} {value}" for key, value in identifier.items())
    return str(identifier)


def shown_range(first: Any, last: Any) -> str:
    """Return the batches between two identifiers, which are left out; of steps long ago none may be known.

    Example:
        >>> shown_range({"epoch": 0, "batch": 450}, {"epoch": 0, "batch": 539})
        'batches 450 to 539 of epoch 0'
        >>> shown_range({"epoch": 0, "batch": 450}, {"epoch": 1, "batch": 12})
        'batch 450 of epoch 0 to batch 12 of epoch 1'
    """
    if first is None:
        return "batches" if last is None else f"batches up to {shown(last)}"
    if not (_is_place(first) and _is_place(last)):
        return f"batches {shown(first)} to {shown(last)}"
    if first["epoch"] == last["epoch"]:
        return f"batches {first['batch']} to {shown(last)}"
    return f"batch {shown(first)} to batch {shown(last)}"


def _is_place(identifier: Any) -> bool:
    return isinstance(identifier, Mapping) and set(identifier) == set(Place._fields)
