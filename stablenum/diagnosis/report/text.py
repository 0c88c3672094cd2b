"""A report as plain text. The first ``file.py:LINE`` in it is the line of the first cause."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from stablenum._support.outside_text import printable
from stablenum.diagnosis.replay.values import Place
from stablenum.diagnosis.report.sections import Sections

__all__ = ["as_text", "numbered", "source_lines", "wrapped"]

WIDTH = 92
# Less than this of a line of code says nothing.
LEAST_CODE = 12


def as_text(s: Sections, *, ok: bool) -> str:
    """Render a report as plain text of at most about 40 lines and 92 columns, without colours."""
    if ok:
        return "\n".join([f"Nothing wrong: {s.what[:1].lower()}{s.what[1:]}", *_notes(s)])
    parts = [_first(s), _cause(s), _remedy(s), _frames(s), _others(s), _notes(s)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _first(s: Sections) -> list[str]:
    lines = [s.title] if s.title else []
    lines += source_lines(s)
    return lines + _aligned([(r.which, r.what, r.within, r.counts) for r in s.rows])


def source_lines(s: Sections) -> list[str]:
    """Return the line of the place among its neighbours, or alone if the file is not at hand."""
    if s.place is None or not s.place.code:
        return []
    return numbered(s.place, s.source)


def numbered(place: Place, source: Sequence[tuple[int, str]]) -> list[str]:
    """Return a line of code among its neighbours with their numbers, or alone if these are not known."""
    if not source:
        return [f"    {place.code}"]
    width = len(str(source[-1][0]))
    return [f"  {'>' if n == place.line else ' '} {n:>{width}}  {line}" for n, line in source]


def _cause(s: Sections) -> list[str]:
    return [*wrapped(f"Cause: {s.cause}. {s.what}"), *(w for f in s.facts for w in wrapped(f, "  - "))]


def _remedy(s: Sections) -> list[str]:
    code = [f"    {line}" for line in s.code]
    return [*wrapped(f"Remedy: {s.remedy}"), *code, *wrapped(s.tried, "    ")]


def _frames(s: Sections) -> list[str]:
    if not s.frames:
        return []
    places = _aligned([(str(f), f.function) for f in s.frames])
    width = max(map(len, places))
    lines = [_with_code(place, f.code, width) for place, f in zip(places, s.frames, strict=True)]
    return ["Called from", *lines]


def _with_code(place: str, code: str, width: int) -> str:
    """Return a place and its function, which are never cut, with as much of the code as fits beside them."""
    room = WIDTH - width - 2
    if not code or room < LEAST_CODE:
        return place
    return f"{place:<{width}}  {code if len(code) <= room else f'{code[: room - 3]}...'}"


def _others(s: Sections) -> list[str]:
    return [w for other in s.others for w in wrapped(f"Later: {other}")]


def _notes(s: Sections) -> list[str]:
    return [w for note in s.notes for w in wrapped(f"Note: {note}")]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the cells in aligned columns, without empty ones."""
    columns = [i for i in range(len(rows[0]) if rows else 0) if any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in rows) for i in columns}
    return ["  " + "  ".join(f"{row[i]:<{widths[i]}}" for i in columns).rstrip() for row in rows]


def wrapped(text: str, mark: str = "") -> list[str]:
    """Return lines of at most ``WIDTH`` columns. A path that is longer is not broken."""
    return textwrap.wrap(
        printable(text),
        WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * max(len(mark), 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
