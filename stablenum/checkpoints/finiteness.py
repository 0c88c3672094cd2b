"""Which non-finite values of a state are poison, and which are there on purpose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Kind", "NonFinite", "is_meant", "listed"]

Kind: TypeAlias = Literal["array", "buffer", "guard", "number"]

_SHOWN = 5


class NonFinite(NamedTuple):
    """An entry of a state that is not finite.

    Attributes:
        name: its path, such as ``"optimizer.state.3.exp_avg_sq"``.
        kind: ``"number"`` for one number, plain or in an array, that is neither a parameter nor what an
            optimizer multiplies with; ``"buffer"`` for an array that may be a mask, as it is not trained;
            ``"guard"`` for what a guard's state holds; ``"array"`` for anything else.
        nan: the number of NaNs.
        plus_inf: the number of elements that are inf.
        minus_inf: the number of elements that are -inf.
        size: the number of elements.
        dimensions: the number of dimensions; 0 for a number.
        others_zero: whether the finite elements are all 0.
    """

    name: str
    kind: Kind
    nan: int
    plus_inf: int
    minus_inf: int
    size: int
    dimensions: int = 0
    others_zero: bool = False

    def __str__(self) -> str:
        counts = (("NaN", self.nan), ("inf", self.plus_inf), ("-inf", self.minus_inf))
        if self.size == 1:
            return f"{self.name} ({next(word for word, count in counts if count)})"
        found = ", ".join(f"{count} {word}" for word, count in counts if count)
        return f"{self.name} ({found} of {self.size})"


def is_meant(entry: NonFinite, allow: Sequence[str] = ()) -> bool:
    """Return whether an entry may be not finite: the one rule of what saves, loads and checks.

    It may if a pattern of ``allow`` matches its name. So may, without being named:

    - inf and -inf in one number, as the best value so far is inf at first. Nothing is NaN at first, and
      neither a running mean nor a best value ever leaves it;
    - whatever a guard's state holds, whose windows are inf where they are not filled yet;
    - a mask: a buffer with two or more dimensions that holds nothing but 0 and -inf.

    Example:
        >>> is_meant(NonFinite("scheduler.best", "number", 0, 1, 0, 1))
        True
        >>> is_meant(NonFinite("model.weight", "array", 0, 1, 0, 12, dimensions=2))
        False
        >>> is_meant(NonFinite("model.bias", "buffer", 0, 0, 6, 12), allow=("*.bias",))
        True
    """
    if any(fnmatchcase(entry.name, pattern) for pattern in allow):
        return True
    if entry.kind in ("guard", "number"):
        return entry.kind == "guard" or not entry.nan
    only_minus_inf = not (entry.nan or entry.plus_inf) and entry.others_zero
    return entry.kind == "buffer" and entry.dimensions >= 2 and only_minus_inf


def listed(entries: Iterable[object]) -> str:
    """Return the first entries as messages show them, and how many more there are."""
    shown = [str(entry) for entry in entries]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
