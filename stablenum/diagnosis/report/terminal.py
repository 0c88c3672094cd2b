"""A report for terminals, with rich. This module is imported only when rich prints a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from stablenum.diagnosis.report.sections import Sections

__all__ = ["as_rich"]


def as_rich(s: Sections, *, ok: bool) -> Iterator[RenderableType]:
    """Return the parts to print, in order. All text is literal, so brackets in the user's code are not read
    as markup."""
    if ok:
        yield Text.assemble(("Nothing wrong: ", "bold green"), f"{s.what[:1].lower()}{s.what[1:]}")
    else:
        yield from _what(s)
        yield Text.assemble(("Cause: ", "bold"), (s.cause, "bold red"), f". {s.what}")
        yield from (Text(f"  - {fact}", style="dim") for fact in s.facts)
        yield Text()
        yield Text.assemble(("Remedy: ", "bold green"), s.remedy)
        if s.code:
            yield Padding(_python("\n".join(s.code)), (0, 4))
        if s.tried:
            yield Padding(Text(s.tried, style="green" if s.tried.startswith("tried") else "dim"), (0, 4))
        yield from _after(s)
    yield from (Text.assemble(("Note: ", "bold"), note) for note in s.notes)


def _what(s: Sections) -> Iterator[RenderableType]:
    if s.title:
        at, rest = (f"{s.place}", s.title.removeprefix(f"{s.place}")) if s.place else ("", s.title)
        yield Text.assemble((at, "bold cyan"), (rest, "bold"))
    if s.place is not None and s.source:
        first, here = s.source[0][0], s.place.line
        lines = "\n".join(line for _, line in s.source)
        yield Padding(_python(lines, line_numbers=True, start_line=first, highlight_lines={here}), (0, 2))
    elif s.place is not None and s.place.code:
        yield Padding(_python(s.place.code), (0, 4))
    if s.rows:
        table = Table.grid(padding=(0, 2, 0, 0))
        for row in s.rows:
            bad = any(kind in row.counts for kind in ("NaN", "inf"))
            table.add_row(
                Text(row.which, style="dim"),
                Text(row.what),
                Text(row.within),
                Text(row.counts, style="red" if bad else "dim"),
            )
        yield Padding(table, (0, 2))
    if s.title or s.rows:
        yield Text()


def _after(s: Sections) -> Iterator[RenderableType]:
    if s.frames:
        yield Text()
        yield Text("Called from", style="bold")
        places = max(len(str(frame)) for frame in s.frames)
        functions = max(len(frame.function) for frame in s.frames)
        for frame in s.frames:  # not a table, whose columns are cut where the terminal is narrow
            place = (f"{frame!s:<{places}}  ", "cyan")
            function = (f"{frame.function:<{functions}}  ", "dim")
            yield Padding(Text.assemble(place, function, frame.code, overflow="fold"), (0, 2))
    if s.others or s.notes:
        yield Text()
    yield from (Text.assemble(("Later: ", "bold"), other) for other in s.others)


def _python(code: str, **options: Any) -> Syntax:
    return Syntax(code, "python", theme="ansi_dark", background_color="default", word_wrap=True, **options)
