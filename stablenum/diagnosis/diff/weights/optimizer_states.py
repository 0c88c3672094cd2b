"""Let the right optimizer go on from where the left one stands: its moments are carried over like weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.diff.weights.weights import WeightMap

__all__ = ["continued"]

_MOST_NAMED = 3  # entries that are lost: those of one parameter of Adam, and one more; chosen, not measured


@dataclass(slots=True)
class _Moments:
    """What the left optimizer keeps, for the right program to ask for.

    Attributes:
        kept: parameter and role -> array, of the left side.
        mapped: where the right parameters come from.
        used: what was asked for and is there.
    """

    kept: Mapping[tuple[str, str], Any]
    mapped: WeightMap
    used: set[tuple[str, str]] = field(default_factory=set)

    def __call__(self, name: str, role: str) -> Any:
        """Return the array of a right parameter; None if the left side has none."""
        origin = self.mapped.origins.get(name)
        if origin is None or not origin.invertible:
            return None
        wanted = [(part, role) for part in origin.names]
        if any(key not in self.kept for key in wanted):
            return None
        self.used.update(wanted)
        if self.kept[wanted[0]].ndim == 0:  # a count, or another number that belongs to no single element
            return self.kept[wanted[0]]
        return origin.of({part: self.kept[part, role] for part, _ in wanted})


def continued(
    left: Program, right: Program, mapped: WeightMap, record: Callable[[Program], None]
) -> tuple[Program, tuple[str, ...]]:
    """Return the right program with the left optimizer's state, and notes on that for the report.

    Args:
        left, right: the programs; ``right`` is returned as it is if neither optimizer has taken a step.
        mapped: where the right parameters come from.
        record: records the program that is returned.
    """
    kept = left.optimizer_state()
    if not kept and not right.optimizer_state():
        return right, ()
    moments = _Moments(kept, mapped)
    program = right.with_optimizer_state(moments if kept else None)
    record(program)
    return program, _notes(kept, moments.used)


def _notes(kept: Mapping[tuple[str, str], Any], used: set[tuple[str, str]]) -> tuple[str, ...]:
    if not kept:
        return (_FRESH,)
    roles = sorted({role for _, role in used})
    lost = sorted({f"{role} of {name}" for name, role in kept if (name, role) not in used})
    some = f"{', '.join(lost[:_MOST_NAMED])}{' and others' if len(lost) > _MOST_NAMED else ''}"
    return (
        *((_CARRIED.format(", ".join(roles)),) if roles else ()),
        *((_LOST.format(some),) if lost else ()),
    )


_FRESH = (
    "The right optimizer had taken steps before and the left one had not: both were compared from the start."
)
_CARRIED = "The left optimizer had taken steps before: the right one goes on from its state ({})."
_LOST = "What the left optimizer keeps has no place in the right one: {}."
