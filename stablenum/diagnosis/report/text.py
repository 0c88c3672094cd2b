"""A report as plain text. The first ``file.py:LINE`` in it is the line of the first cause."""

from __future__ import annotations

import textwrap

from stablenum.diagnosis.report.sections import Sections

__all__ = ["as_text"]

WIDTH = 92


def as_text(s: Sections, *, ok: bool) -> str:
    """Render a report as plain text of at most about 40 lines and 92 columns, without colours."""
    if ok:
        return "\n".join([f"Nothing wrong: {s.what[:1].lower()}{s.what[1:]}", *_notes(s)])
    parts = [_first(s), _cause(s), _remedy(s), _frames(s), _others(s), _notes(s)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _first(s: Sections) -> list[str]:
    lines = [s.title] if s.title else []
    if s.place is not None and s.place.code:
        lines.append(f"    {s.place.code}")
    return lines + _aligned([(r.which, r.what, r.within, r.counts) for r in s.rows])


def _cause(s: Sections) -> list[str]:
    return [*_wrapped(f"Cause: {s.cause}. {s.what}"), *(w for f in s.facts for w in _wrapped(f, "  - "))]


def _remedy(s: Sections) -> list[str]:
    return [*_wrapped(f"Remedy: {s.remedy}"), *([f"    {s.code}"] if s.code else [])]


def _frames(s: Sections) -> list[str]:
    if not s.frames:
        return []
    lines = _aligned([(str(f), f.function, f.code) for f in s.frames])
    return ["Called from", *(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines)]


def _others(s: Sections) -> list[str]:
    return [w for other in s.others for w in _wrapped(f"Later: {other}")]


def _notes(s: Sections) -> list[str]:
    return [w for note in s.notes for w in _wrapped(f"Note: {note}")]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the cells in aligned columns, without empty ones."""
    columns = [i for i in range(len(rows[0]) if rows else 0) if any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in rows) for i in columns}
    return ["  " + "  ".join(f"{row[i]:<{widths[i]}}" for i in columns).rstrip() for row in rows]


def _wrapped(text: str, mark: str = "") -> list[str]:
    """Return lines of at most ``WIDTH`` columns. A path that is longer is not broken."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * max(len(mark), 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
