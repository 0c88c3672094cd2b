"""Text from outside (names of files, parameters and modules, logs, source lines, messages), made harmless.

Whatever is shown on a terminal, put on a page or written into code goes through one of these functions.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

__all__ = ["encodable", "in_code", "in_html", "in_script", "printable"]


def printable(text: str) -> str:
    r"""Return a text in one line that changes nothing on a terminal.

    Line breaks, the other control characters of C0 and C1, ESC among them, what turns the direction of
    writing, and lone surrogates are shown as Python escapes them. A tab stays.

    Example:
        >>> print(printable("w\nmodel.pt: good \x1b[2J"))
        w\nmodel.pt: good \x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)


def encodable(text: str, encoding: str | None) -> str:
    r"""Return a text in which what an encoding does not have is escaped; None is UTF-8.

    Example:
        >>> print(encodable("gu\xe9.pt: good", "ascii"))
        gu\xe9.pt: good
    """
    name = encoding or "utf-8"
    return text.encode(name, "backslashreplace").decode(name)


def in_html(text: str) -> str:
    """Return a text for the content or a quoted attribute of an element of a page. Its line breaks stay.

    Example:
        >>> in_html('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
    """
    return escape("\n".join(map(printable, text.split("\n"))))


def in_script(data: Any) -> str:
    """Return strict JSON in which nothing can end a script element or begin a comment.

    Example:
        >>> print(in_script(["</script>"]))
        ["\\u003c/script\\u003e"]
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def in_code(text: str) -> str:
    r"""Return a text for a string literal or a docstring of generated Python, whatever its quotes.

    In a comment, :func:`printable` is enough, and easier to read.

    Example:
        >>> path = 'C:\\Users\\"b'
        >>> print(in_code(path), eval(f'"{in_code(path)}"') == path)
        C:\\Users\\\"b True
    """
    return printable(text.replace("\\", "\\\\")).replace('"', '\\"').replace("'", "\\'")
