"""Small parts of what complaints say."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stablenum.diagnosis.replay.source_files import lines_with
from stablenum.diagnosis.replay.values import Place

__all__ = ["joined", "lines_assigning", "lines_naming", "places_of"]

# Format -> how scripts name it.
_FORMATS = {"bfloat16": r"bfloat16|bf16", "float16": r"\bfloat16|\bhalf\b|fp16"}


# A sentence names so many parameters, and counts the rest. Chosen, not measured.
_MOST_NAMED = 3


def joined(names: Sequence[str], most: int = _MOST_NAMED) -> str:
    """Return the first names, and how many more there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


def places_of(*places: Place | None) -> tuple[Place, ...]:
    """Return the lines that are known."""
    return tuple(p for p in dict.fromkeys(places) if p is not None)


def lines_naming(dtype: str, place: Place | None) -> tuple[Place, ...]:
    """Return the first lines of a place's file that name a 16-bit format; none for another format."""
    return lines_with(place, _FORMATS[dtype]) if dtype in _FORMATS else ()


def lines_assigning(name: str, place: Place | None) -> tuple[Place, ...]:
    """Return the first lines of a place's file that assign to the outermost part of a name, be it an
    attribute, a variable or the key of a dict."""
    part = re.escape(next((p for p in name.split(".") if not p.isdigit()), name))
    return lines_with(place, rf"\b{part}\s*=[^=]|['\"]{part}['\"]\s*:|\b{part}\s*:\s*\w")
