"""A report of a comparison as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from stablenum._support.outside_text import printable
from stablenum.diagnosis.diff.differences import Difference, Location, Off, Row
from stablenum.diagnosis.edits.fix import Fix

__all__ = ["Shown", "amount", "as_rich", "as_text", "headline", "several", "title", "weights_title", "within"]

# The style of lines of code, which are not wrapped; rich knows it as none.
_CODE = "none"
# The terminal shows so many weights of the map, and says where all of them are. Chosen, not measured.
_MOST_WEIGHTS = 8
_MOST_LINES = 6  # of a side that a sentence names; chosen, not measured


class Shown(Protocol):
    """What the renderings show."""

    @property
    def verdict(self) -> str:
        """The verdict."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Where the programs part."""

    @property
    def weights(self) -> Mapping[str, str]:
        """Where each parameter comes from."""

    @property
    def carried_over(self) -> bool:
        """Whether the right side was given them."""

    @property
    def left_rows(self) -> tuple[Row, ...]:
        """The operations of the left program."""

    @property
    def right_rows(self) -> tuple[Row, ...]:
        """The operations of the right program."""

    @property
    def left_off(self) -> Off | None:
        """The rounding of the left side."""

    @property
    def right_off(self) -> Off | None:
        """The rounding of the right side."""

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """Changes of a side's source."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be compared."""


def as_text(report: Shown) -> str:
    """Return the report as plain text."""
    return "\n".join(printable(text) for text, _ in _lines(report))


def as_rich(report: Shown, width: int | None = None) -> Iterator[Any]:
    """Return the report as lines for a terminal; with ``width``, sentences are wrapped under their beginning,
    and lines of code are left as they are."""
    from stablenum.diagnosis.report.rich_lines import line

    for text, style in _lines(report):
        for part in [text] if width is None or style == _CODE else _wrapped(text, width):
            yield line(part, style=style)


def _wrapped(text: str, width: int) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    found = textwrap.wrap(
        text, width, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )
    return found or [text]


def _lines(report: Shown) -> Iterator[tuple[str, str]]:
    yield headline(report), "bold green" if (not report.differences) else "bold red"
    yield from ((note, "yellow") for note in report.notes)
    for side, off in (("left", report.left_off), ("right", report.right_off)):
        if off is not None:
            yield _off(side, off), ""
            if off.compiled is not None:
                yield _compiled(off.compiled), ""
    for number, difference in enumerate(report.differences, 1):
        yield "", ""
        yield f"{title(number, difference, with_step=several(report))}:", "bold"
        for side, location in (("left", difference.left), ("right", difference.right)):
            yield from _side(side, location)
        several_heal = sum(c.confirmed for c in difference.causes) > 1
        for cause in difference.causes:
            tried = ("confirmed, either of" if several_heal else "confirmed") if cause.confirmed else "likely"
            yield f"  why ({tried}, {cause.code}): {cause.sentence}", ""
            if cause.evidence:
                yield f"    {cause.evidence}", "dim"
            if cause.remedy:
                yield f"    {cause.remedy}", ""
        if within(difference):
            yield within(difference), ""
        for left, right in difference.also:
            yield f"  also at {_where(left)} and {_where(right)}", ""
    yield from _fixes(report.fixes)
    yield "", ""
    yield from ((line, "dim") for line in _facts(report))


def _fixes(fixes: Sequence[Fix]) -> Iterator[tuple[str, str]]:
    """Yield the changes that are proven, and apart from them those that are not."""
    for proven, heading, style in (
        (True, "Mended, proven", "bold green"),
        (False, "Not proven", "bold yellow"),
    ):
        for fix in (f for f in fixes if f.proven is proven):
            yield "", ""
            yield f"{heading}: {fix.explanation}", style
            yield f"  {fix.evidence}", "dim"
            yield from ((line, _CODE) for line in fix.patch.splitlines())


def within(difference: Difference) -> str:
    """Return the lines that what differs passes through, where no cause is confirmed and they are several;
    else ""."""
    told = any(c.confirmed for c in difference.causes) or max(map(len, difference.within)) < 2
    if told:
        return ""
    places = zip(("left", "right"), difference.within, strict=True)
    sides = [f"{_some(lines)} on the {name}" for name, lines in places if lines]
    return f"  What differs lies within {' and '.join(sides)}."


def _some(lines: Sequence[str]) -> str:
    more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return ", ".join(lines[:_MOST_LINES]) + more


def _where(location: Location | None) -> str:
    return "no line" if location is None else location.where


def headline(report: Shown) -> str:
    """Return the verdict in a sentence."""
    if not report.differences:
        return f"The two programs are {report.verdict}."
    return f"The two programs differ: {amount(report.differences[0])}."


def amount(difference: Difference) -> str:
    """Return which result differs, and by how much."""
    at = f" of step {difference.step}" if difference.step > 1 else ""
    if difference.of_rounding:
        return (
            f"in float64 they agree, but the right one rounds by {difference.error:.2g} of a value's size, "
            f"where rounding explains {difference.allowed:.1g} on any machine"
        )
    return (
        f"{difference.result}{at}, by {difference.error:.2g} of its size in float64, where rounding explains "
        f"{difference.allowed:.1g}"
    )


def title(number: int, difference: Difference, *, with_step: bool) -> str:
    """Return the heading of a difference, with the training step where there are several."""
    related = "independent of those before" if difference.causes else "which may follow from those before"
    name = "First difference" if number == 1 else f"Difference {number}, {related}"
    name = f"{name}, step {difference.step}" if with_step else name
    place = difference.left or difference.right
    return f"{name}, {place.phase}" if place is not None else name


def several(report: Shown) -> bool:
    """Return whether several training steps were compared."""
    steps = [row.step for row in (*report.left_rows, *report.right_rows)]
    return max([*steps, *(d.step for d in report.differences)], default=1) > 1


def _side(name: str, location: Location | None) -> Iterator[tuple[str, str]]:
    if location is None:
        yield f"  {name:<6} nothing leads to it", ""
        return
    what = location.operation or "no such operation here"
    module = f" in {location.module}" if location.module else ""
    called = f", called at {location.called_at}" if location.called_at else ""
    yield f"  {name:<6} {location.where}  {what}{module}{called}", ""
    if location.code:
        yield f"           {location.code}", _CODE


def _off(side: str, off: Off) -> str:
    shown = f"  {side:<6} off its float64 twin by {off.error:.1e}"
    if off.where:
        shown += f"; {off.operation} ({off.where}) rounds most, by {off.added:.1e}"
    return shown


def _compiled(errors: Mapping[str, float]) -> str:
    shown = ", ".join(f"{kind} by {error:.1e}" for kind, error in errors.items())
    return f"         compiled: off by at most this much: {shown}"


def _facts(report: Shown) -> Iterator[str]:
    shown = list(report.weights.items())
    if shown or not report.carried_over:
        yield weights_title(report)
    for name, origin in shown[:_MOST_WEIGHTS]:
        yield f"  {name} <- {origin}"
    if len(shown) > _MOST_WEIGHTS:
        yield f"  and {len(shown) - _MOST_WEIGHTS} more (all of them: --json, --html, report.weights)"


def weights_title(report: Shown) -> str:
    """Return what stands above the map of the weights."""
    count = f"{len(report.weights):,}"
    if report.carried_over:
        return f"Weights of the right program, {count}:"
    own = "Both sides keep their own weights."
    return f"{own} Gradients are compared between these, {count}:" if report.weights else own
