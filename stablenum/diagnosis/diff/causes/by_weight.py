"""Name the cause where a line reads a parameter that the other side lacks, or holds with other numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.arrangement import chain_of
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.frontier import same_line

__all__ = ["by_absence", "by_weight", "held_otherwise"]

# Each trial evaluates the right side once more. Chosen, not measured.
_MOST_TRIALS = 4
# Parameters hold the same numbers if they differ by less, relative to the largest: float32, in which most are
# kept, rounds by 6e-8, and they may have been computed in it.
_SAME = 1e-6
_OTHER = "Give both programs the same numbers there."
_ORDER = "Lay the axes out as the report's map of the weights says."


def held_otherwise(comparison: Comparison) -> list[str]:
    """Return the right parameters that hold other numbers than their counterparts on the left."""
    mine, theirs = comparison.left.program.parameters(), comparison.right.program.parameters()
    return [
        name
        for name, origin in comparison.weights.origins.items()
        if name in theirs
        and all(n in mine for n in origin.names)
        and not _close(np.ravel(origin.of(mine)), np.ravel(theirs[name]))
    ]


def _close(x: Any, y: Any) -> bool:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return x.size == y.size and bool(np.abs(x - y).max(initial=0.0) <= _SAME * np.abs(y).max(initial=0.0))


def by_weight(scene: Scene) -> Iterator[Proposal]:
    """Give the right program's line the left one's parameters, where each side keeps its own."""
    for value, name in _read(scene):
        origin = scene.comparison.weights.origins[name]
        own = np.asarray(scene.right.program.parameters()[name])
        array = np.reshape(origin.of(scene.left.program.parameters()), own.shape)
        ordered = _close(np.sort(np.ravel(own)), np.sort(np.ravel(array)))
        yield Proposal(
            "transposed_weight" if ordered else "other_input",
            f"{name} holds the numbers of {' and '.join(origin.names)} in another order."
            if ordered
            else f"{name} holds other numbers than {' and '.join(origin.names)}.",
            [(Edit("right", {value: array}),)],
            f"With {origin} in its place",
            remedy=_ORDER if ordered else _OTHER,
        )


def _read(scene: Scene) -> Iterator[tuple[int, str]]:
    """Yield the parameters that the right line reads and that hold other numbers than the left ones."""
    begun = next((s for s in scene.forward_starts() if s[0] == "right"), None)
    if scene.comparison.weights.carried or begun is None:
        return
    _, side, start, region = begun
    values, other = side.trace.values, set(held_otherwise(scene.comparison))
    read = dict.fromkeys(i for step in same_line(start, region) for i in step.inputs)
    found = [v for v in read if values[v].role == "parameter" and values[v].name in other]
    yield from ((v, values[v].name) for v in found[:_MOST_TRIALS])


# --- parameters without a counterpart -----------------------------------------------------------------------

# Without a bias, and without a scale.
_NEUTRAL = (0.0, 1.0)
# Each parameter takes an evaluation with either. Chosen, not measured.
_MOST_ALONE = 4


def by_absence(scene: Scene) -> Iterator[Proposal]:
    """Propose that only one side has a bias, a scale or the like: the sides agree if the parameter changes
    nothing."""
    for name, value, parameter in _alone(scene):
        shape, other = scene.comparison.side(name).shapes[value], "right" if name == "left" else "left"
        proposal = Proposal(
            "missing_operation" if name == "left" else "extra_operation",
            f"the {name} program reads {parameter} here, and nothing in the {other} one stands for it.",
            remedy=f"Give both programs the parameter {parameter}, or neither.",
        )
        for number in _NEUTRAL:
            trial = (Edit(name, {value: np.full(shape, number)}),)
            told = f"With {number:g} in its place"
            yield replace(proposal, trials=[trial], change=told)
        yield proposal


def _alone(scene: Scene) -> Iterator[tuple[str, int, str]]:
    """Yield the side, value and name of each parameter that a line reads and that has no counterpart."""
    origins = scene.comparison.weights.origins
    mapped = {"left": {n for o in origins.values() for n in o.names}, "right": set(origins)}
    found = 0
    for name, side, start, region in scene.forward_starts():
        read = (i for s in same_line(start, region) for i in s.inputs)
        for value in dict.fromkeys(chain_of(side.trace, i)[-1] for i in read):
            known = side.trace.values[value]
            if known.role == "parameter" and known.name not in mapped[name] and found < _MOST_ALONE:
                found += 1
                yield name, value, known.name
