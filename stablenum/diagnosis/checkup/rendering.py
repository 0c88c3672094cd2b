"""A checkup as plain text, for terminals, and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from stablenum._support.outside_text import in_html, printable
from stablenum.diagnosis.checkup.symptoms import Complaint, Level
from stablenum.diagnosis.replay.source_files import lines_around
from stablenum.diagnosis.report.html import page
from stablenum.diagnosis.report.text import numbered, wrapped

__all__ = ["as_html", "as_rich", "as_text"]

# So many complaints are shown in full, and the others in a line each. Chosen, not measured.
MOST = 4


class Shown(Protocol):
    """What the renderings show."""

    @property
    def complaints(self) -> tuple[Complaint, ...]:
        """What is wrong."""

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""

    @property
    def measured(self) -> int:
        """The number of these that were measured."""

    @property
    def losses(self) -> tuple[float, float] | None:
        """The first and the last loss."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be measured."""


def as_text(c: Shown) -> str:
    """Render a checkup as plain text of at most 92 columns, without colours."""
    parts = [wrapped(_summary(c)), *(_complaint(one) for one in c.complaints[:MOST]), _rest(c), _notes(c)]
    return "\n\n".join("\n".join(map(printable, part)) for part in parts if part)


def _summary(c: Shown) -> str:
    loss = "" if c.losses is None else f" The loss {_course(*c.losses, c.steps)}."
    found = [one for one in c.complaints if one.level > Level.NOTE]
    said = f"{len(found)} finding{'' if len(found) == 1 else 's'}" if found else "Nothing found"
    return f"{said} in {_watched(c.steps, c.measured)}.{loss}"


def _watched(steps: int, measured: int) -> str:
    if not steps and measured:
        return "one forward and backward pass"
    whole = f"{steps} optimizer step{'' if steps == 1 else 's'}"
    return f"{whole}, of which {measured} {'was' if measured == 1 else 'were'} measured in full"


def _course(first: float, last: float, steps: int) -> str:
    return f"went from {first:.4g} to {last:.4g}" if steps else f"is {last:.4g}"


def title(one: Complaint) -> str:
    """Return the first line of a complaint."""
    where = f"{one.place}: " if one.place is not None else ""
    module = f" in {one.module}" if one.module else ""
    return f"{where}{one.symptom.value}{module}, since step {one.since} ({one.level.name.lower()})"


def _complaint(one: Complaint) -> list[str]:
    lines = [title(one), *source(one)]
    lines += wrapped(_sentence(one))
    lines += [w for e in one.evidence for w in wrapped(e, "  - ")]
    lines += [w for text in _others(one) for w in wrapped(text)]
    lines += wrapped(f"Cure: {_cure(one)}.")
    lines += wrapped(_outcome(one), "    ")
    if one.consequences:
        lines += wrapped("Follows from it: " + "; ".join(brief(x) for x in one.consequences))
    return lines


def _cure(one: Complaint) -> str:
    return one.cure or "none is known; the usual one was tried"


def _outcome(one: Complaint) -> str:
    """Return what a trial of the cure has shown, or what it should change."""
    if one.tried:
        return f"tried: {one.tried}"
    return f"not tried; expect: {one.expects}" if one.expects else "not tried"


def _sentence(one: Complaint) -> str:
    return f"{one.what[:1].upper()}{one.what[1:]}."


def _others(one: Complaint) -> list[str]:
    others = [str(place) for place in dict.fromkeys(one.places) if place != one.place]
    return [f"See also: {', '.join(others)}"] if others else []


def source(one: Complaint) -> list[str]:
    """Return the line of the place among its neighbours."""
    if one.place is None or not one.place.code:
        return []
    return numbered(one.place, lines_around(one.place))


def brief(one: Complaint) -> str:
    """Return a consequence in a few words."""
    return f"{one.symptom.value} ({one.evidence[0]})" if one.evidence else one.symptom.value


def _rest(c: Shown) -> list[str]:
    return [f"Also: {brief(one)}" for one in c.complaints[MOST:]]


def _notes(c: Shown) -> list[str]:
    return [w for note in c.notes for w in wrapped(f"Note: {note}")]


def as_rich(c: Shown) -> Iterator[Any]:
    """Return the parts to print on a terminal, in order."""
    from rich.padding import Padding
    from rich.syntax import Syntax

    from stablenum.diagnosis.report.rich_lines import line

    bad = any(one.level > Level.NOTE for one in c.complaints)
    yield line(_summary(c), style="bold" if bad else "bold green")
    for one in c.complaints[:MOST]:
        yield line()
        yield line(title(one), style="bold cyan" if one.level is Level.NOTE else "bold red")
        if one.place is not None and (around := lines_around(one.place)):
            code = "\n".join(printable(text) for _, text in around)
            yield Padding(
                Syntax(
                    code,
                    "python",
                    line_numbers=True,
                    start_line=around[0][0],
                    highlight_lines={one.place.line},
                    background_color="default",
                ),
                (0, 2),
            )
        yield line(_sentence(one))
        yield from (line(f"  - {e}", style="dim") for e in one.evidence)
        yield from (line(text, style="dim") for text in _others(one))
        yield line(("Cure: ", "bold green"), f"{_cure(one)}.")
        yield line(f"    {_outcome(one)}", style="green" if one.tried else "dim")
        if one.consequences:
            yield line("Follows from it: " + "; ".join(map(brief, one.consequences)), style="dim")
    yield from (line(text, style="dim") for text in (*_rest(c), *_notes(c)))


def as_html(c: Shown) -> str:
    """Return the whole page; everything that comes from the user's code is escaped."""
    parts = [f"<h1>{in_html(_summary(c))}</h1>"]
    for one in c.complaints:
        parts += _html(one)
    parts += _listed("Notes", c.notes)
    return page("Checkup", parts)


def _html(one: Complaint) -> list[str]:
    lines = "\n".join(source(one))
    module = f" in {one.module}" if one.module else ""
    return [
        f"<h2>{in_html(one.level.name.lower())}</h2>",
        (
            f'<p><span class="cause">{in_html(one.symptom.value)}</span> '
            f'<span class="place">{in_html(str(one.place or ""))}</span>{in_html(module)}, '
            f"since step {one.since}</p>"
        ),
        f'<pre class="bad">{in_html(lines)}</pre>' if lines else "",
        f"<p>{in_html(_sentence(one))}</p>",
        *_listed("", one.evidence),
        *(f'<p class="soft">{in_html(text)}</p>' for text in _others(one)),
        f"<p><b>Cure:</b> {in_html(_cure(one))}.</p>",
        f'<p class="soft">{in_html(_outcome(one))}</p>',
        *_listed("Follows from it", [brief(x) for x in one.consequences]),
    ]


def _listed(title: str, texts: Sequence[str]) -> list[str]:
    if not texts:
        return []
    items = "".join(f"<li>{in_html(text)}</li>" for text in texts)
    return [f"<h2>{in_html(title)}</h2>" if title else "", f"<ul>{items}</ul>"]
