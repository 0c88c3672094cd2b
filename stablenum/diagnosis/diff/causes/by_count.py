"""Name the cause of a difference between two updates by counting the steps of one side from another start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.sides.kinds import kind
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_count"]

# An optimizer counts its steps in each of its parts, such as moments and schedule, and each count takes two
# evaluations. Chosen, not measured.
_MOST_COUNTS = 4


def by_count(scene: Scene) -> Iterator[Proposal]:
    """Count the steps of one side one lower or higher."""
    for name in ("right", "left"):
        side = scene.comparison.side(name)
        counts = _counts(side)
        arrays = arrays_of(side, list(counts)[:_MOST_COUNTS])
        for value, array in arrays.items():
            code, what = (
                ("bias_correction", "count of moments") if "adam" in counts[value].library else _SCHEDULE
            )
            for shift, said, other in ((-1, "ahead", "lowered"), (1, "behind", "raised")):
                yield Proposal(
                    code,
                    f"the {what} of the {name} program is one step {said}.",
                    [(Edit(name, {value: array + shift}),)],
                    f"With its count {other} by one",
                )


_SCHEDULE = ("schedule_offset", "schedule")


def _counts(side: Side) -> Mapping[int, Step]:
    """Return the whole numbers to which an update adds one, each with the first step that reads it."""
    steps = [s for s in side.trace.steps if s.phase == "update"]
    found: dict[int, Step] = {}
    for step in (s for s in steps if kind(s) == "add" and all(_whole(side, i) for i in s.inputs)):
        for value, other in permutations(step.inputs, 2):
            if side.trace.values[value].producer is None and side.prints[other].total == 1:
                found[value] = next(s for s in steps if value in s.inputs)
    return found


def _whole(side: Side, value: int) -> bool:
    return not side.prints[value].floating and side.shapes[value] == ()
