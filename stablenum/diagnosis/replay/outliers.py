"""Entries of an array that are far from the rest, such as those of one bad record in a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["MOST_ENTRIES", "Outliers", "outliers_in"]

# Larger arrays are not looked at: a median takes its time.
MOST_ENTRIES = 10_000_000
# An entry is far from the rest if it is so many times as large as the median of those that are not 0.
_FAR = 100.0
_FEWEST_ROWS = 8
# More rows than this part of all are no outliers.
_PART = 0.1
_MOST_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Outliers:
    """Entries that are far larger than the rest.

    Attributes:
        rows: their indices along the first axis, in ascending order.
        of: the length of that axis.
        largest: the largest magnitude.
        usual: the median of the magnitudes that are not 0.

    Example:
        >>> print(Outliers(rows=(37,), of=64, largest=15200.0, usual=0.681))
        row 37 of 64 (from 0) reaches 1.52e+04, where half of all entries are below 0.681
    """

    rows: tuple[int, ...]
    of: int
    largest: float
    usual: float

    def __str__(self) -> str:
        more = f" and {len(self.rows) - _MOST_SHOWN} more" if len(self.rows) > _MOST_SHOWN else ""
        named = ", ".join(map(str, self.rows[:_MOST_SHOWN])) + more
        subject, verb = ("row", "reaches") if len(self.rows) == 1 else ("rows", "reach")
        size = f"{self.largest:.3g}, where half of all entries are below {self.usual:.3g}"
        return f"{subject} {named} of {self.of} (from 0) {verb} {size}"


def outliers_in(sizes: Any, median: Callable[[Any], Any]) -> Outliers | None:
    """Return the entries that are far from the rest, if they lie in a few rows; None if there are none.

    Args:
        sizes: the magnitudes, an array of NumPy or PyTorch, with 0 for those that are not finite.
        median: returns that of an array with one axis.
    """
    entries = sizes.reshape(-1)
    entries = entries[entries > 0]
    if len(sizes.shape) == 0 or sizes.shape[0] < _FEWEST_ROWS or not 0 < len(entries) <= MOST_ENTRIES:
        return None
    usual = float(median(entries))
    far = (sizes > _FAR * usual).reshape(sizes.shape[0], -1).any(1).tolist()
    rows = tuple(i for i, one in enumerate(far) if one)
    if not 0 < len(rows) <= max(1, int(_PART * len(far))):
        return None
    return Outliers(rows=rows, of=len(far), largest=float(entries.max()), usual=usual)
