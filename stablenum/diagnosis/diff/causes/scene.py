"""What is known where two programs part, and what can be tried there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Frontier, Start
from stablenum.diagnosis.diff.places.patches import Pair, Patch
from stablenum.diagnosis.diff.places.regions import STEPS_AHEAD
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Scene"]


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known where two programs part.

    Attributes:
        comparison: the two programs.
        found: where each begins to differ.
        group: the results that differ.
        pairs: values near there that may correspond, the most likely first.
        patch: the values that make the programs agree in what follows, if there are any.
        tried: how many changes of each kind were tried.
        healed: the changes that made the programs agree.
    """

    comparison: Comparison
    found: Frontier
    group: Group
    pairs: tuple[Pair, ...] = ()
    patch: Patch | None = None
    tried: Counter[str] = field(default_factory=Counter)
    healed: list[Any] = field(default_factory=list)

    @property
    def left(self) -> Side:
        """The left side."""
        return self.comparison.left

    @property
    def right(self) -> Side:
        """The right side."""
        return self.comparison.right

    @property
    def shared(self) -> Mapping[int, Iterable[int]]:
        """Value of the right side -> values of the left side that are equal to it."""
        return self.comparison.found.right

    @property
    def agrees(self) -> bool:
        """Whether also the results agree then."""
        return self.patch is not None and self.patch.agrees

    def forward_starts(self) -> Iterator[tuple[str, Side, Start, tuple[Step, ...]]]:
        """Yield the sides that have an operation where the programs part in the forward pass, right first."""
        for name in ("right", "left"):
            start = getattr(self.found, name)
            if start is not None and not start.missing and self.group.kind in ("loss", "output"):
                yield name, self.comparison.side(name), start, getattr(self.found, f"region_{name}")

    def arrays(self, wanted: Iterable[int]) -> Mapping[int, Any]:
        """Return the arrays of some values of the right side."""
        return arrays_of(self.right, wanted)

    def read(self) -> list[Any]:
        """Return the arrays that both sides have and that the right one reads near there."""
        start = self.found.right
        if start is None:
            return []
        later = [s for s in self.found.region_right if s.index >= start.step.index][:STEPS_AHEAD]
        wanted = {i for s in later for i in s.inputs if i in self.shared and self.right.prints[i].floating}
        wanted.update(() if start.value is None else (start.value,))
        return list(self.arrays(wanted).values())

    @property
    def alone_heals(self) -> bool:
        """Whether one value of the left side in place of the right one's makes all results agree."""
        return self.patch is not None and self.patch.agrees and len(self.patch.values) == 1

    def region(self, side: str) -> tuple[Step, ...]:
        """Return the steps of a side that lead from where it begins to differ to what differs."""
        return tuple(getattr(self.found, f"region_{side}"))
