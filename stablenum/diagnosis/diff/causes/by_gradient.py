"""Name the cause of gradients that differ although the losses agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Slope
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.flow import OTHER
from stablenum.diagnosis.diff.places.patches import Pair
from stablenum.diagnosis.diff.places.slopes import direction_of
from stablenum.diagnosis.diff.sides.equality import SAME_ENTRIES

__all__ = ["by_gradient", "by_hand", "by_rows"]

# Of values that may correspond, so many pairs are compared row by row. Chosen, not measured.
_MOST_PAIRS = 8


def by_rows(scene: Scene) -> Iterator[Proposal]:
    """Propose the sum of the gradients of each row of a table, where one side keeps one of them."""
    if scene.group.kind != "gradient":
        return
    for pair in scene.pairs[:_MOST_PAIRS]:
        found = _overwritten(scene, pair) if pair.theirs.ndim == 2 else None
        if found is not None:
            yield found
            return


def _overwritten(scene: Scene, pair: Pair) -> Proposal | None:
    mine, theirs = pair.mine, pair.theirs
    differing = [r for r in range(len(mine)) if not _equal(mine[r], theirs[r])]
    for name, array, whole in (("right", theirs, mine), ("left", mine, theirs)):
        for given in _given(scene, mine.shape[1]):
            if _equal(whole.sum(0), given.sum(0)) and all(
                array[r].any() and any(_equal(array[r], row) for row in given) for r in differing
            ):
                sums = {pair.right: whole} if name == "right" else {pair.left: whole.reshape(mine.shape)}
                return Proposal(
                    "accumulation",
                    f"where an index occurs several times, the {name} program keeps one gradient instead "
                    "of their sum.",
                    [(Edit(name, sums),)],
                    f"With the other side's rows on the {name}",
                    f"{len(mine) - len(differing)} of {len(mine)} rows agree; each of the others is the "
                    f"gradient of one occurrence on the {name}.",
                )
    return None


def _given(scene: Scene, width: int) -> Iterator[Any]:
    """Yield the gradients with a width that the first operation of the right side reads, as rows."""
    for array in scene.read():
        if array.ndim > 1 and array.shape[-1] == width:
            yield array.reshape(-1, width)


def _equal(a: Any, b: Any) -> bool:
    size = max(float(np.abs(a).max(initial=0.0)), float(np.abs(b).max(initial=0.0)))
    return float(np.abs(a - b).max(initial=0.0)) <= SAME_ENTRIES * size


def by_hand(scene: Scene) -> Iterator[Proposal]:
    """Return the cause where one side defines a derivative by hand that is not the derivative of its loss."""
    if scene.group.kind != "gradient":
        return
    written = [name for name in ("right", "left") if _by_hand(scene, name)]
    if len(written) != 1:
        return
    along = direction_of(scene.comparison, scene.group)
    name, other = written[0], OTHER[written[0]]
    yield Proposal(
        "other_function",
        f"the {name} program defines this derivative by hand, and the {other} one has a different one.",
        None if along is None else [Slope(along.measured(name), along.given(other), along.given(name))],
        f"Finite differences agree with the gradients of the {other} program, not with the {name} one's",
        likely=True,
    )


def _by_hand(scene: Scene, name: str) -> bool:
    """Return whether the line at which a side begins to differ runs in its backward pass only."""
    start, side = getattr(scene.found, name), scene.comparison.side(name)
    if start is None or start.step.phase != "backward" or start.step.place is None:
        return False
    return all(s.place != start.step.place for s in side.trace.steps if s.phase == "forward")


def by_gradient(scene: Scene) -> Iterator[Proposal]:
    """Return the cause where one side has no gradient, or only a part of it."""
    if scene.group.kind != "gradient":
        return
    pairs = scene.group.differing
    zero = {"left": 0, "right": 0}
    for pair in pairs:
        for name, side, result in (("left", scene.left, pair.left), ("right", scene.right, pair.right)):
            zero[name] += not np.any(side.arrays[result.value])
    who = next((n for n, count in zero.items() if count), None)
    said = (
        f"the {who} program gives no gradient at all for {zero[who]} of them."
        if who
        else "a part of the gradient is missing or added on one side."
    )
    yield Proposal(
        "stopped_gradient",
        f"the losses agree, and {len(pairs)} gradients do not: {said}",
        measured="The same loss with different gradients: something is detached, a derivative is defined by "
        "hand, or the loss has a kink there.",
    )
