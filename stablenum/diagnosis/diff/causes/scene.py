"""What is known where two programs part, and what can be tried there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stablenum.diagnosis.diff.causes.remedies import REMEDIES, REMEDIES_OF_UPDATES
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import Frontier, Start
from stablenum.diagnosis.diff.places.patches import Pair, Patch, tried_with
from stablenum.diagnosis.diff.places.regions import STEPS_AHEAD
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Edit", "Scene", "cause"]


class Edit(NamedTuple):
    """A change of one side, as the values that it gives."""

    side: str
    values: Mapping[int, Any]


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known where two programs part.

    Attributes:
        comparison: the two programs.
        found: where each begins to differ.
        group: the results that differ.
        pairs: values near there that may correspond, the most likely first.
        patch: the values that make the programs agree in what follows, if there are any.
        edits: the changes of one side that were tried and made the programs agree.
    """

    comparison: Comparison
    found: Frontier
    group: Group
    pairs: tuple[Pair, ...] = ()
    patch: Patch | None = None
    edits: list[Edit] = field(default_factory=list)

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
    def goes_on_alike(self) -> bool:
        """Whether the two sides agree in what follows with the left program's value in place of the right's.

        That confirms the place. It confirms a cause only together with what makes one value the other.
        """
        return self.patch is not None

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

    def stops_at(self, pairs: Sequence[Pair]) -> bool:
        """Return whether the two sides agree in what follows with the left values of pairs in place of the
        right ones."""
        if self.patch is not None and [self.patch.right] == [p.right for p in pairs]:
            return True
        return tried_with(self.comparison, self.found, self.group, pairs) is not None

    def mends(self, side: str, values: Mapping[int, Any]) -> bool:
        """Return whether the two sides agree if values of a side are replaced: in what the line at which
        they part gives, or in the results."""
        after = self.comparison.with_values(side, values, until=self.group)
        mended = after.meets(self.found, side) or after.agrees(self.group)
        if mended:
            self.edits.append(Edit(side, values))
        return mended


def cause(
    code: str,
    sentence: str,
    evidence: str,
    *,
    confirmed: bool,
    update: bool = False,
    remedy: str | None = None,
) -> Cause:
    """Return a cause with the remedy of its code, which may be another one for an update, or its own; "" for
    none.

    Confirmed is one that was tried: one side was changed as the cause says, with what the side itself reads,
    and the two sides agreed then. That they agree with a value of the other side in its place shows where
    they part, not why.
    """
    if remedy is None:
        remedy = (REMEDIES_OF_UPDATES if update else REMEDIES)[code]
    return Cause(code=code, sentence=sentence, evidence=evidence, remedy=remedy, confirmed=confirmed)
