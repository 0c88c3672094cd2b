"""The operations of a comparison as JSON, which the script of the page reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stablenum._support.outside_text import in_script
from stablenum.diagnosis.diff.differences import Difference, Location, Row
from stablenum.diagnosis.diff.report.alignment import aligned

__all__ = ["payload"]

TEXTS = ("operation", "where", "code", "module", "phase", "state")
NUMBERS = ("step", "partner", "error", "allowed", "off")


def payload(left: Sequence[Row], right: Sequence[Row], first: Difference | None) -> str:
    """Return strict JSON that can stand in a script element: columns of rows, whose texts are indices into
    ``strings``; the lines in which they stand; and the rows at which the programs begin to differ."""
    strings = _Strings()
    start = [None, None] if first is None else [_at(left, first.left, first), _at(right, first.right, first)]
    i, j = start
    lines = aligned(left, right, [] if i is None or j is None else [(i, j)])
    data = {
        "left": _columns(left, strings),
        "right": _columns(right, strings),
        "lines": {
            "left": [line.left for line in lines],
            "right": [line.right for line in lines],
            "module": [strings.index(line.module) for line in lines],
        },
        "first": start,
        "strings": strings.texts,
    }
    return in_script(data)


class _Strings:
    """Texts, each of them once."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}

    @property
    def texts(self) -> list[str]:
        return list(self._indices)

    def index(self, text: str) -> int:
        return self._indices.setdefault(text, len(self._indices))


def _columns(rows: Sequence[Row], strings: _Strings) -> dict[str, list[Any]]:
    texts = {name: [strings.index(getattr(row, name)) for row in rows] for name in TEXTS}
    return texts | {name: [_number(getattr(row, name)) for row in rows] for name in NUMBERS}


def _number(x: float | None) -> float | str | None:
    """Return four digits of a float, and "nan" or "inf" as a text."""
    if x is None or isinstance(x, int):
        return x
    return float(f"{x:.4g}") if math.isfinite(x) else str(float(x))


def _at(rows: Sequence[Row], location: Location | None, difference: Difference) -> int | None:
    """Return the row of a location; for one of another line, the first row of the line, of the same phase,
    step, operation and module if there is one."""
    if location is None:
        return None

    def fits(i: int) -> tuple[bool, ...]:
        row = rows[i]
        return (
            i == location.row,
            row.phase == location.phase,
            row.step == difference.step,
            row.operation == location.operation,
            row.module == location.module,
        )

    return max((i for i, row in enumerate(rows) if row.where == location.where), key=fits, default=None)
