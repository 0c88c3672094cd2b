"""Render an audit as plain text and as a rich table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from stablenum._support.outside_text import printable
from stablenum.diagnosis.audit.risk_rules import Risk, Severity
from stablenum.diagnosis.audit.rows import Row

__all__ = ["as_rich", "as_text"]

_HEADS = (
    "parameter", "state", "risk", "RMS(dw)", "|dw|/|w|", "v=0,m!=0", "v inf", "NaN", "v<0", "sqrt v<eps",
    "g^2/v", "w+dw=w",
)  # fmt: skip
_WORDS = {Severity.POISONED: "poisoned", Severity.DANGER: "danger", Severity.WARNING: "warning"}
_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}
_STYLES = {"poisoned": "bold red", "danger": "red", "warning": "yellow"}
_MOST_RISKS = 8
_WIDTH = 100


def as_text(
    optimizer: str, rows: Sequence[Row], risks: Sequence[Risk], notes: Sequence[str], *, limit: int
) -> str:
    """Render the audit as plain text: a headline, a table, descriptions of the risks, and notes."""
    table = [_HEADS, *_table(rows, risks, limit)]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEADS))]
    lines = [_headline(optimizer, rows, risks)]
    if rows:
        lines += ["", *("  ".join(_aligned(line, widths)).rstrip() for line in table)]
    return "\n".join(map(printable, [*lines, *_below(len(rows), risks, notes, limit)]))


def as_rich(optimizer: str, rows: Sequence[Row], risks: Sequence[Risk], notes: Sequence[str]) -> Any:
    """Render the audit for a terminal, with a table from rich, which is imported only here."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    limit = 20
    lines = _table(rows, risks, limit)
    # A terminal is narrow, so a column in which no row has anything to report is left out.
    shown = [i for i in range(len(_HEADS)) if i == 0 or any(line[i] not in ("", "0", "-") for line in lines)]
    table = Table(box=box.SIMPLE, pad_edge=False)
    for i in shown:
        table.add_column(_HEADS[i], justify="left" if i < 3 else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(printable(line[i])) for i in shown), style=_STYLES.get(line[2], ""))
    below = "\n".join(map(printable, _below(len(rows), risks, notes, limit))).lstrip("\n")
    return Group(Text(printable(_headline(optimizer, rows, risks))), table, Text(below))


def _headline(optimizer: str, rows: Sequence[Row], risks: Sequence[Risk]) -> str:
    what = f"{len(rows)} parameter{'' if len(rows) == 1 else 's'}"
    if not risks:
        return f"Audit of {optimizer}, {what}: nothing at risk."
    counts = [(word, sum(r.severity is s for r in risks)) for s, word in _WORDS.items()]
    return f"Audit of {optimizer}, {what}: {', '.join(f'{n} {word}' for word, n in counts if n)}."


def _below(rows: int, risks: Sequence[Risk], notes: Sequence[str], limit: int) -> list[str]:
    lines = []
    if rows > limit:
        lines.append(f"... and {rows - limit} more parameters, none at higher risk")
    for risk in risks[:_MOST_RISKS]:
        text = f"{_WORDS[risk.severity]} ({risk.cause.value}): {risk.what}."
        lines += ["", *_wrapped(text, "", "  "), *_wrapped(f"{risk.remedy}.", "    ", "    ")]
    if len(risks) > _MOST_RISKS:
        lines += ["", f"... and {len(risks) - _MOST_RISKS} more risks (audit.risks)"]
    return lines + [line for note in notes for line in ("", f"Note: {note}.")]


def _wrapped(text: str, first: str, other: str) -> list[str]:
    return textwrap.wrap(
        printable(text), width=_WIDTH, initial_indent=first, subsequent_indent=other,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _table(rows: Sequence[Row], risks: Sequence[Risk], limit: int) -> list[tuple[str, ...]]:
    return [_cells(row, risks) for row in rows[:limit]]


def _cells(row: Row, risks: Sequence[Risk]) -> tuple[str, ...]:
    m = row.measured
    worst = max((r for r in risks if r.name == row.name), key=lambda r: r.weight, default=None)
    dtypes = dict.fromkeys(_SHORT.get(d, d) for d in row.state_dtypes.values())
    return (
        _middle(row.name),
        "/".join(dtypes) or "-",
        _WORDS[worst.severity] if worst else "",
        _number(m.update_rms),
        _number(m.update_relative),
        _percent(row.vanished),
        _count(m.second_inf),
        _count(m.moment_nan),
        _count(m.second_negative),
        _percent(row.below_eps),
        _number(m.gradient_ratio),
        _percent(row.stalled),
    )


def _aligned(line: tuple[str, ...], widths: list[int]) -> list[str]:
    cells = enumerate(zip(line, widths, strict=True))
    return [cell.ljust(width) if i < 3 else cell.rjust(width) for i, (cell, width) in cells]


def _middle(name: str, most: int = 40) -> str:
    return name if len(name) <= most else f"{name[: most // 2 - 2]}...{name[-(most // 2) + 1 :]}"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2g}"


def _count(n: int | None) -> str:
    return "-" if n is None else str(n)


def _percent(x: float | None) -> str:
    if x is None:
        return "-"
    return "0" if x == 0 else f"{x:.1%}" if x >= 0.001 else "<0.1%"
