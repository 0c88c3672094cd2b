"""How commands speak: every line that they print goes through here, and no text from outside steers it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from stablenum._support.outside_text import encodable, printable

__all__ = ["Terminal", "say"]


class Terminal(Console):
    """A console that escapes the control characters in what it prints; only its own colours steer it.

    What the encoding of the output does not have is escaped, too.

    It cannot know which line breaks are from outside; ``rich_lines`` of the reports escapes these.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of what is printed."""
        encoding = (options or self.options).encoding
        for text, style, control in super().render(renderable, options):
            if control is None and not text.isprintable():
                text = "\n".join(map(printable, text.split("\n")))
            yield Segment(encodable(text, encoding), style, control)


def say(text: str, *, err: bool = False) -> None:
    """Print one line without colours."""
    encoding = (sys.stderr if err else sys.stdout).encoding
    typer.echo(encodable(printable(text), encoding), err=err)
