"""Lines for a terminal, with rich. This module is imported only when rich prints."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from stablenum._support.outside_text import printable

__all__ = ["line"]


def line(*parts: str | tuple[str, str], style: str = "", **options: Any) -> Text:
    """Return parts, each alone or with its style, as literal text in one line.

    Example:
        >>> line("model\\x1b[2J", (" [good]", "bold")).plain
        'model\\\\x1b[2J [good]'
    """
    each = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text), own) for text, own in each), style=style, **options)
