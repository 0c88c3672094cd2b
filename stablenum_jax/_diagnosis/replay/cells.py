"""Values of a replayed program, and the context in which its equations are evaluated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stablenum_jax._diagnosis.replay.source_lines import NOWHERE, Source

__all__ = ["Cell", "Context"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A value of the program: its data, and its index in the trace."""

    data: Any
    id: int


@dataclass(frozen=True, slots=True)
class Context:
    """What the enclosing calls determine: the source, the name stack, the iteration."""

    source: Source = NOWHERE
    stack: str = ""
    where: str = ""

    def iteration(self, number: int, loop: str) -> Context:
        """Return the context inside one iteration of a loop."""
        where = f"iteration {number} of {loop}"
        return replace(self, where=f"{self.where}, {where}" if self.where else where)
