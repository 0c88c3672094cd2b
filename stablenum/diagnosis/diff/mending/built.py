"""A program that is made once more, from changed sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stablenum.diagnosis.diff.sides.play import Program

__all__ = ["Built"]


class Built(NamedTuple):
    """A program made from changed sources, and what the names of its module mean."""

    program: Program
    namespace: Mapping[str, Any]
