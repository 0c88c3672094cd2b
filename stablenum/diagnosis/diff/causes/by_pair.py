"""Name the cause by comparing two values that should be equal, and try it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.causes.by_value import DROPS, Reason, Values, factor_of, reason_of
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.flow import maker, size
from stablenum.diagnosis.diff.places.patches import Pair
from stablenum.diagnosis.diff.places.regions import STEPS_AHEAD
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.sides.equality import SAME_MULTIPLE
from stablenum.diagnosis.diff.sides.kinds import kind, quiet
from stablenum.diagnosis.diff.sides.sides import MOST_ENTRIES, Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_loss", "by_pair"]

# Of the pairs of values near a difference, of which there may be 24 x 24, so many are looked at. Chosen, not
# measured.
_MOST_PAIRS = 300
_SUMS = ("sum", "mean", "reduce_sum")


def by_pair(scene: Scene) -> Iterator[Proposal]:
    """Propose what turns the first pair of values where a simple rule does into one another."""
    reasons = _reasons(scene)
    if not reasons:
        return
    pair, reason = next((r for r in reasons if r[1].sentence == DROPS), reasons[0])
    # Two values side by side, such as queries and keys, may have the same fault; so may all calls of a line.
    alike = {p.right: r.made for p, r in reasons if r.code == reason.code and r.made is not None}
    if scene.group.kind == "gradient" and reason.code in ("mask_missing", "ignored_labels"):
        reason = reason._replace(code="stopped_gradient", sentence="only one side passes this gradient on.")
    number = ""
    if reason.code == "scale":
        mean = _only_one_divides(scene, pair, _factor(pair))
        if mean:
            reason = reason._replace(code="reduction", sentence=mean)
        else:
            number = _follows_number(scene, pair, _factor(pair))
    if number:
        sentence = f"the two sides multiply by different numbers: {number}."
        yield Proposal(reason.code, sentence, measured=reason.evidence)
        return
    yield Proposal(
        reason.code,
        reason.sentence,
        None if reason.made is None else _trials(scene, pair, alike),
        "With the right value changed to this",
        reason.evidence,
        likely=True,
    )


def _trials(scene: Scene, pair: Pair, alike: Mapping[int, Any]) -> Iterator[Trial]:
    yield (Edit("right", {pair.right: alike[pair.right]}),)
    if len(alike) > 1:
        yield (Edit("right", alike),)


def _factor(pair: Pair) -> float:
    return factor_of(pair.mine, pair.theirs) or 1.0


def _reasons(scene: Scene) -> list[tuple[Pair, Reason]]:
    here, there = scene.found.left, scene.found.right
    if scene.group.kind == "updated" or here is None or there is None:
        return []
    read = scene.read()
    names = {
        s.operation for r in (scene.found.region_left, scene.found.region_right) for s in r[:STEPS_AHEAD]
    }
    names |= {here.step.operation, there.step.operation}
    moved = quiet(here.step) and quiet(there.step)
    flattened = _flattens(scene.left, here.step) and _flattens(scene.right, there.step)
    flattened |= kind(here.step) == kind(there.step) == "cat"
    found, elements, known = list[tuple[Pair, Reason]](), 0, set[int]()
    for pair in sorted(scene.pairs, key=lambda p: (p.depth, p.unlike))[:_MOST_PAIRS]:
        elements += pair.mine.size
        if elements > MOST_ENTRIES:
            break
        reason = (
            None
            if pair.right in known
            else reason_of(Values(pair.mine, pair.theirs, read, names, moved, flattened))
        )
        if reason is not None:
            known.add(pair.right)
            found.append((pair, reason))
    return found


def _flattens(side: Side, step: Step) -> bool:
    """Return whether a step puts each image of a batch in one row."""
    return [len(side.shapes[v]) for v in (*step.inputs[:1], *step.outputs[:1])] == [4, 2]


def by_loss(scene: Scene) -> Iterator[Proposal]:
    """Propose one factor that makes the loss and all gradients agree: a mean over other entries."""
    if scene.group.results != "loss":
        return
    following = next((g for g in scene.comparison.groups if _follows(g, scene.group)), None)
    if following is None:
        return
    factors = []
    for pair in (*scene.group.pairs, *following.pairs):
        mine, theirs = scene.comparison.arrays_of(pair)
        factors.append(factor_of(mine.reshape(-1), theirs.reshape(-1), fewest=1))
    known = [f for f in factors if f is not None]
    # One factor, but for rounding, which leaves little of the difference; chosen, not measured.
    most = min(1e-7, 0.01 * abs(known[0] - 1)) if known else 0.0
    if len(known) < max(2, len(factors)) or max(known) - min(known) > most * abs(known[0]):
        return
    scaled = {
        p.right.value: known[0] * scene.right.arrays[p.right.value]
        for p in (*scene.group.pairs, *following.pairs)
    }
    yield Proposal(
        "reduction",
        f"the loss on the left is {known[0]:.9g} times that on the right: another factor, or a mean over "
        "other entries.",
        [(Edit("right", scaled),)],
        "With this factor on the right",
        f"It is the same for the loss and all {len(known) - 1} gradients.",
    )


def _follows(group: Group, loss: Group) -> bool:
    return (group.kind, group.step) == ("gradient", loss.step)


# --- factors ------------------------------------------------------------------------------------------------

# A factor is compared with the ratios of so many numbers, of which there are 10 000: the more, the likelier
# one is near by accident. Chosen, not measured.
_MOST_NUMBERS = 100


def _only_one_divides(scene: Scene, pair: Pair, factor: float) -> str:
    """Return that one side takes the sum and the other the mean of the same number of entries; "" if not."""
    terms = _terms(scene.left, pair.left)
    if terms < 2 or terms != _terms(scene.right, pair.right):
        return ""
    for name, divided in (("left", 1 / terms), ("right", terms)):
        if abs(factor / divided - 1) < SAME_MULTIPLE:
            return f"only the {name} program divides the sum of {terms} entries by their number."
    return ""


def _terms(side: Side, value: int) -> int:
    """Return how many entries a value is the sum or the mean of; 0 if it is neither."""
    step = maker(side, value)
    if step is not None and kind(step) in ("mul", "div"):  # a mean in JAX is a sum that is divided
        step = maker(side, step.inputs[0])
    if step is None or kind(step) not in _SUMS:
        return 0
    return size(side, step.inputs[0]) // max(size(side, step.outputs[0]), 1)


def _follows_number(scene: Scene, pair: Pair, factor: float) -> str:
    """Return the numbers by which both sides multiply the same if they compute them otherwise: two numbers
    always have a factor. "" if they do not, and for a factor that is well known."""
    told = []
    for name, value in (("left", pair.left), ("right", pair.right)):
        side = scene.comparison.side(name)
        number = None if _well_known(scene, factor) else _number(scene, name, value)
        if number is None:
            return ""
        array = arrays_of(side, [number])[number]
        told.append(f"{float(array.reshape(-1)[0]):.6g} on the {name}")
    return " and ".join(told)


def _number(scene: Scene, name: str, value: int) -> int | None:
    """Return the number of a side's own, computed from its values, by which it multiplies to give one."""
    side, known = scene.comparison.side(name), scene.comparison.found.known(name)
    producer = side.trace.values[value].producer
    step = None if producer is None else side.trace.steps[producer]
    if step is None or kind(step) not in ("mul", "div"):
        return None
    single = (i for i in step.inputs if size(side, i) == 1 and side.depends[i] and i not in known)
    return next(single, None)


def _well_known(scene: Scene, factor: float) -> bool:
    """Return whether a factor is one that programs are written with: a power of two, or a ratio of two sizes
    or written numbers, or its root."""
    size_of = abs(factor)
    if not size_of or not math.isfinite(size_of):
        return False
    if abs(math.log2(size_of) - round(math.log2(size_of))) < SAME_MULTIPLE:
        return True
    numbers = np.array(sorted(_numbers(scene))[:_MOST_NUMBERS])
    ratios = (numbers[:, None] / numbers).reshape(-1)
    return any(bool((np.abs(ratios / f - 1) < SAME_MULTIPLE).any()) for f in (size_of, size_of**2))


def _numbers(scene: Scene) -> set[float]:
    """Return 1, the sizes of both sides, and the absolute values of the numbers that are written in them."""
    found = {1.0}
    for side in (scene.left, scene.right):
        found |= {float(n) for shape in side.shapes for n in shape if n}
        found |= {n for n in _written(side) if n and math.isfinite(n)}
    return found


def _written(side: Side) -> Iterator[float]:
    constants: Iterable[int] = (v.id for v in side.trace.values if v.role == "constant")
    yield from (float(abs(side.prints[v].total)) for v in constants if side.prints[v].entries == 1)
    yield from (float(abs(n)) for s in side.trace.steps for n in s.scalars)
