"""Show the outcomes on a terminal: one checkpoint in full, many of them in one line each."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stablenum._support.outside_text import printable
from stablenum.commands.verify.verdicts import Outcome, Poison, Verdict
from stablenum.diagnosis.audit import Severity
from stablenum.diagnosis.report.rich_lines import line

__all__ = ["shown"]

_STYLES = {"good": "green", "poisoned": "bold red"}
_MOST_ENTRIES, _MOST_RISKS, _MOST_NOTES, _WIDTH = 20, 8, 12, 100
_HEADS = ("entry", "what it is", "format", "numbers", "NaN", "inf", "< 0", "first at")
_NUMBERS = ("numbers", "NaN", "inf", "< 0")
_WORDS = {Severity.POISONED: "danger", Severity.DANGER: "danger", Severity.WARNING: "warning"}


def shown(outcomes: Sequence[Outcome], notes: Sequence[str]) -> RenderableType:
    """Return what is printed; ``notes`` are on what was passed over."""
    if len(outcomes) == 1:
        return Group(*_one(outcomes[0]), *_bullets("note", notes))
    return Group(_many(outcomes), line(_sum(outcomes)), *_bullets("note", notes))


# --- one -------------------------------------------------------------------------------------


def _one(outcome: Outcome) -> Iterator[RenderableType]:
    yield _headline(outcome)
    if outcome.verdict is None:
        return
    if outcome.verdict.poison:
        yield _table(outcome.verdict.poison)
    risks = outcome.verdict.suspicious
    for risk in risks[:_MOST_RISKS]:
        yield from _bullets(
            _WORDS[risk.severity], [f"{risk.what}. {risk.remedy[:1].upper()}{risk.remedy[1:]}"]
        )
    yield from _more(len(risks) - _MOST_RISKS, "risks")
    yield from _bullets("note", outcome.verdict.notes[:_MOST_NOTES])
    yield from _more(len(outcome.verdict.notes) - _MOST_NOTES, "notes")


def _headline(outcome: Outcome) -> Text:
    after = f" ({_about(outcome.verdict)})" if outcome.verdict else f": {outcome.why}"
    return line(f"{outcome.path}: ", _word(outcome), after)


def _word(outcome: Outcome) -> tuple[str, str]:
    return outcome.word, _STYLES.get(outcome.word, "bold yellow")


def _about(verdict: Verdict) -> str:
    arrays = f"{verdict.entries:,} array" + ("" if verdict.entries == 1 else "s")
    plain = f" and {verdict.numbers:,} in plain values" if verdict.numbers else ""
    return f"{verdict.format}, {arrays}, {verdict.elements:,} floating-point numbers{plain}"


def _table(poison: Sequence[Poison]) -> RenderableType:
    rows = [_cells(p) for p in poison[:_MOST_ENTRIES]]
    table = Table(box=box.SIMPLE, pad_edge=False)
    shown = [i for i in range(len(_HEADS)) if any(row[i] for row in rows)]
    for i in shown:
        table.add_column(_HEADS[i], justify="right" if _HEADS[i] in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*(line(row[i]) for i in shown))
    return Group(table, *_more(len(poison) - _MOST_ENTRIES, "entries"))


def _cells(p: Poison) -> tuple[str, ...]:
    at = "" if not p.first else "[" + ", ".join(map(str, p.first)) + "]"
    counts = (f"{n:,}" if n else "" for n in (p.nan, p.inf, p.negative))
    return (p.name, p.kind, p.dtype or "number", f"{p.size:,}", *counts, at)


def _bullets(word: str, sentences: Sequence[str]) -> Iterator[Text]:
    for sentence in sentences:
        lines = textwrap.wrap(
            printable(f"{word}: {sentence}."),
            width=_WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield from map(line, lines)


def _more(number: int, of: str) -> Iterator[Text]:
    if number > 0:
        yield line(f"... and {number} more {of} (--json has all)")


# --- many ------------------------------------------------------------------------------------


def _many(outcomes: Sequence[Outcome]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for head in ("checkpoint", "", "format", "what was found"):
        table.add_column(head, overflow="fold")
    within = os.path.commonpath([Path(outcome.path).absolute().parent for outcome in outcomes])
    for outcome in outcomes:
        shown = os.path.relpath(outcome.path, within)
        form = outcome.verdict.format if outcome.verdict else ""
        table.add_row(line(shown), line(_word(outcome)), line(form), line(_found(outcome)))
    return table


def _found(outcome: Outcome) -> str:
    verdict = outcome.verdict
    if verdict is None:
        return outcome.why
    if verdict.poison:
        more = len(verdict.poison) - 1
        return f"{verdict.poison[0]}" + (f" and {more} more" if more else "")
    grave = [risk.what for risk in verdict.suspicious if risk.severity > Severity.WARNING]
    return f"suspicious: {grave[0]}" if grave else ""


def _sum(outcomes: Sequence[Outcome]) -> str:
    words = dict.fromkeys(outcome.word for outcome in outcomes)
    counts = ", ".join(f"{sum(o.word == word for o in outcomes)} {word}" for word in words)
    return f"{len(outcomes)} checkpoints: {counts}."
