"""What an exception that ends a script says, and whether that is about numbers that are not finite."""

from __future__ import annotations

import re
import traceback

__all__ = ["is_about_numbers", "last_line"]

_ABOUT_NUMBERS = re.compile(
    r"\b(nan|inf|infinite|infinity|is_?nan|is_?inf|is_?finite)\b|non-?finite|not finite", re.IGNORECASE
)


def is_about_numbers(text: str) -> bool:
    """Return whether a message or a line of code is about NaN or inf."""
    return bool(_ABOUT_NUMBERS.search(text))


def last_line(error: BaseException) -> str:
    """Return the line in which Python shows the class and the message of an exception.

    Notes, which Python shows after that line, are left out: JAX adds one about the frames of its traceback.

    Example:
        >>> error = ValueError("broken")
        >>> error.add_note("in the second epoch")
        >>> last_line(error)
        'ValueError: broken'
    """
    shown = traceback.TracebackException(type(error), error, None)
    shown.__notes__ = None
    return list(shown.format_exception_only())[-1].strip()
