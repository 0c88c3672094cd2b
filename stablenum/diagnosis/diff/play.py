"""What an adapter gives: a program that can be evaluated operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from stablenum.diagnosis.replay.trace import Trace
from stablenum.diagnosis.replay.values import Place

__all__ = ["Play", "Program", "Visit"]

# Called with every value's index and array, as soon as the value exists.
Visit: TypeAlias = Callable[[int, Any], None]


@dataclass(frozen=True, slots=True)
class Play:
    """One evaluation.

    Attributes:
        trace: the operations; the same in every play of a program.
        results: kind ("loss", "output", "gradient", "updated"), name, and index of the value.
    """

    trace: Trace
    results: tuple[tuple[str, str, int], ...]


class Program(Protocol):
    """A recorded program of one framework.

    Attributes:
        framework: "torch" or "jax".
        optimizer_at: the line that made the optimizer, for operations of the update that no line of the
            user's called.
    """

    framework: str
    optimizer_at: Place | None

    def parameters(self) -> Mapping[str, Any]:
        """Return the parameters and buffers by name, as arrays of NumPy."""

    def play(
        self,
        visit: Visit,
        *,
        wide: bool = True,
        weights: Mapping[str, Any] | None = None,
        noise: float = 0.0,
        replace: Mapping[int, Any] | None = None,
    ) -> Play:
        """Evaluate the program once.

        Args:
            visit: called with every value.
            wide: whether all formats are widened to float64.
            weights: arrays that take the place of parameters and buffers.
            noise: the relative size of the noise that is put on the result of every computation.
            replace: arrays that take the place of values, by index.
        """
