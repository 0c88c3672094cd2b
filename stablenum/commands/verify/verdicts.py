"""The verdict on a checkpoint, as data and as strict JSON."""

from __future__ import annotations

import cmath
from dataclasses import asdict, dataclass
from typing import Any

from stablenum.diagnosis.audit import Risk

__all__ = ["Outcome", "Poison", "Verdict"]

GOOD, POISONED, NOT_CHECKED = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """An entry that is wrong for good.

    Attributes:
        name: the entry's name.
        kind: what it is, in words.
        dtype, shape: those of the array; None and () for a plain number.
        size: the number of elements; a complex one counts as two.
        nan, inf, negative: how many are NaN, inf or -inf, and below 0 where that is wrong.
        first: the position of the first of them.
    """

    name: str
    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    size: int = 1
    nan: int = 0
    inf: int = 0
    negative: int = 0
    first: tuple[int, ...] | None = None

    @classmethod
    def of_number(cls, name: str, kind: str, value: float | complex) -> Poison:
        """Return what is to be said of a plain number that is not finite."""
        nan = int(cmath.isnan(value))
        return cls(name=name, kind=kind, nan=nan, inf=1 - nan)

    def __str__(self) -> str:
        counts = (("NaN", self.nan), ("inf", self.inf), ("< 0", self.negative))
        listed = ", ".join(f"{n} {word}" for word, n in counts if n)
        return f"{self.name} ({listed} of {self.size})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said of a checkpoint that could be read.

    Attributes:
        format: what it is.
        entries: the number of arrays.
        elements: the number of floating-point numbers in arrays that were judged.
        numbers: how many plain ones were judged.
        poison: what is wrong for good.
        suspicious: what the audit of the optimizer's state finds beyond that, the worst first.
        notes: what is not finite on purpose, what would not fit a narrower format, what was not read.
    """

    format: str
    entries: int
    elements: int
    numbers: int = 0
    poison: tuple[Poison, ...] = ()
    suspicious: tuple[Risk, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One file or folder: the verdict, or why there is none.

    Attributes:
        path: the file or folder, as the user named it.
        verdict: None if it could not be checked.
        word: "good", "poisoned", "unreadable", "corrupt" or "unknown".
        why: why it could not be checked.
    """

    path: str
    word: str
    verdict: Verdict | None = None
    why: str = ""

    @property
    def exit_code(self) -> int:
        if self.verdict is None:
            return NOT_CHECKED
        return POISONED if self.verdict.poison else GOOD

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = self.verdict
        return {
            "path": self.path,
            "outcome": self.word,
            "exit_code": self.exit_code,
            "why": self.why,
            "format": found.format if found else None,
            "entries": found.entries if found else None,
            "elements": found.elements if found else None,
            "numbers": found.numbers if found else None,
            "poison": [_plain(p) for p in found.poison] if found else [],
            "suspicious": [risk.to_dict() for risk in found.suspicious] if found else [],
            "notes": list(found.notes) if found else [],
        }


def _plain(poison: Poison) -> dict[str, Any]:
    first = None if poison.first is None else list(poison.first)
    return {**asdict(poison), "shape": list(poison.shape), "first": first}
