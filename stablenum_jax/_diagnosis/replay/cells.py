"""Values of a replayed program, and the context in which its equations are evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stablenum_jax._diagnosis.replay.source_lines import NOWHERE, Source

__all__ = ["Cell", "Composed", "Context"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A value of the program: its data, and its index in the trace."""

    data: Any
    id: int


@dataclass(frozen=True, slots=True)
class Composed:
    """A call of a function that consists of many equations, such as a standard deviation.

    Attributes:
        operation: the name by which users call it.
        inputs: the arrays that it was given.
        options: its axis and similar arguments.
    """

    operation: str
    inputs: Sequence[Any]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Context:
    """What the enclosing calls determine: the source, the name stack, the iteration, the outermost
    function of many equations; in the body of a ``shard_map``, the work of the shard and what it has in
    common with others."""

    source: Source = NOWHERE
    stack: str = ""
    where: str = ""
    composed: Composed | None = None
    task: Any = None
    sharing: Any = None

    def in_shard(self, task: Any, sharing: Any) -> Context:
        """Return the context inside one shard."""
        return replace(self, task=task, sharing=sharing)

    def iteration(self, number: int, loop: str) -> Context:
        """Return the context inside one iteration of a loop."""
        where = f"iteration {number} of {loop}"
        return replace(self, where=f"{self.where}, {where}" if self.where else where)
