"""Recordings among the two sides of a comparison: where they stand, whose weights count, what is said."""

from __future__ import annotations

from typing import NamedTuple

from stablenum.diagnosis.diff.sides.equality import SAME_ARRAY
from stablenum.diagnosis.diff.sides.fingerprints import distance, fingerprint
from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.diff.sides.recorded import RecordedProgram, is_recorded, shown_path
from stablenum.diagnosis.diff.weights.given import Weights

__all__ = ["Sides", "check_updates", "sides_of"]


class Sides(NamedTuple):
    """The sides as they are compared, with the map of the weights, and what is said of it."""

    left: Program
    right: Program
    weights: Weights
    notes: tuple[str, ...] = ()


def sides_of(left: Program, right: Program, weights: Weights) -> Sides:
    """Return the sides with a recording on the left; one whose weights are not at hand, or that is compared
    with another one, leaves both sides their own.

    Raises:
        ValueError: weights that are given by name belong to the sides as they were.
    """
    notes: tuple[str, ...] = ()
    if is_recorded(right) and not is_recorded(left):
        if not isinstance(weights, str):
            raise ValueError(
                "weights must be 'match' or 'as they are' if only the right program is a recording, which "
                "takes the left side of the report; give the recording as left."
            )
        left, right, notes = right, left, (_EXCHANGED,)
    notes += tuple(
        _MADE.format(name, shown_path(p.path), ", ".join(f"{k} {v}" for k, v in p.made.items()))
        for name, p in (("left", left), ("right", right))
        if isinstance(p, RecordedProgram)
    )
    if isinstance(left, RecordedProgram) and not left.has_weights:
        return Sides(left, right, "as they are", (*notes, _weights_note(left, right)))
    if isinstance(left, RecordedProgram) and is_recorded(right):
        return Sides(left, right, "as they are", notes)
    return Sides(left, right, weights, notes)


def _weights_note(recorded: RecordedProgram, other: Program) -> str:
    """Return what is known of the weights of a program that keeps its own."""
    marks = {name: fingerprint(x) for name, x in other.parameters().items()}
    apart = [n for n, p in recorded.kept.items() if n in marks and distance(p.print, marks[n]) > SAME_ARRAY]
    unknown = [n for n in recorded.kept if n not in marks]
    file = f"{shown_path(recorded.path)}.*.weights"
    if not apart and not unknown:
        return _SAME_WEIGHTS.format(file)
    return _OTHER_WEIGHTS.format(file, (apart or unknown)[0])


def check_updates(left: Program, right: Program) -> None:
    """Refuse to compare a recording of updates with a program that makes none: no change of them is seen."""
    recorded = isinstance(left, RecordedProgram) and any(r.kind == "updated" for r in left.results)
    if recorded and not is_recorded(right) and getattr(right, "has_optimizer", True) is False:
        raise ValueError(
            "the recording has the updates of an optimizer, and the program has no optimizer: give it with "
            "program(..., optimizer=...), or record without one."
        )


_MADE = "The {} side is the recording {}, made with {}."
_EXCHANGED = "The recording was given on the right; as the reference, it is the left side here."
_SAME_WEIGHTS = (
    "{} is not there, so that the program keeps its own weights. They have the fingerprints of the recorded "
    "ones."
)
_OTHER_WEIGHTS = (
    "{} is not there, so that the program keeps its own weights, and these are other numbers than the "
    "recorded ones, first in {}: put the file beside the recording, or begin with the same weights."
)
