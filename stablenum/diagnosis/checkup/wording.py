"""Small parts of what complaints say."""

from __future__ import annotations

from collections.abc import Sequence

from stablenum.diagnosis.replay.values import Place

__all__ = ["joined", "places_of"]


def joined(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left} more" if left > 0 else "")


def places_of(*places: Place | None) -> tuple[Place, ...]:
    """Return the lines that are known."""
    return tuple(p for p in dict.fromkeys(places) if p is not None)
