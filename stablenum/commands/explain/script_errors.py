"""What an exception that ends a script says about numbers that are not finite."""

from __future__ import annotations

import re

__all__ = ["is_about_numbers"]

_ABOUT_NUMBERS = re.compile(
    r"\b(nan|inf|infinite|infinity|is_?nan|is_?inf|is_?finite)\b|non-?finite|not finite", re.IGNORECASE
)


def is_about_numbers(text: str) -> bool:
    """Return whether a message or a line of code is about NaN or inf."""
    return bool(_ABOUT_NUMBERS.search(text))
