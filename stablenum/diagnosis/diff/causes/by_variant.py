"""Name the cause by evaluating known functions on what the operation reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from stablenum.diagnosis.diff.causes.formulas.variants import (
    Variant,
    code_of,
    elementwise_of,
    numbers_of,
    variants_of,
)
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, Trial, calls_like, in_all_of
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.places.frontier import Start
from stablenum.diagnosis.diff.places.patches import laid_out_like
from stablenum.diagnosis.diff.sides.equality import SAME_FORMULA
from stablenum.diagnosis.diff.sides.fingerprints import Fingerprint, distance, fingerprint
from stablenum.diagnosis.diff.sides.sides import Side, arrays_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["by_variant"]

# Of the difference of two values, that of their formulas leaves no more. Chosen, not measured.
_MOST_LEFT = 0.01
# Formulas that are nearer than this to a value are as near as can be told.
_ROUNDING = 1e-13
# Hundreds of variants are computed of an array, each of 1 MiB at most. It was 2^20 at first. Chosen, not
# measured.
_MOST_ELEMENTS = 2**17
# The operations of a function that are compared with the variants. Chosen, not measured.
_MOST_STEPS = 40


def by_variant(scene: Scene) -> Iterator[Proposal]:
    """Propose the left side's function for the right side's line: two variants of what the right one reads,
    one of which gives its value and one the left one's."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None or scene.group.kind not in ("loss", "output"):
        return
    mine = _prints(scene.left, scene.found.region_left, here)
    theirs = _prints(scene.right, scene.found.region_right, there)
    read = [i for i in there.step.inputs if not scene.right.neutral(i) and i in scene.shared]
    read += [j for i in here.step.inputs for j in scene.comparison.found.left.get(i, ())[:1] if j not in read]
    if there.missing:
        read = [] if there.value is None else [there.value]
    for value, array in scene.arrays(read).items():
        if array.size > _MOST_ELEMENTS or np.iscomplexobj(array):
            continue
        # Hundreds of variants: only their fingerprints are kept.
        tried = [(v._replace(values=None), fingerprint(v.values)) for v in variants_of(array)]
        plain = _Recognised(*tried[0], value, tried[0][1])
        a = _named_first(_recognised(tried, mine), here.step) + [plain] * here.missing
        b = _named_first(_recognised(tried, theirs), there.step) + [plain] * there.missing
        pair = _unlike(a, b)
        if pair is not None:
            products = "matmul" in (here.step.operation, there.step.operation)
            families = {r.variant.family for r in pair}
            sums = products and families == {"reduction"}  # no statistic begins with a product
            yield _proposal(scene, "reduction" if sums else "", *pair, array)
            return
    pair = None if read or here.missing or there.missing else _unlike_in_parts(scene, here, there)
    if pair is not None:
        yield _proposal(scene, "", *pair, None)


def _proposal(scene: Scene, code: str, left: _Recognised, right: _Recognised, read: Any) -> Proposal:
    """Propose the left formula for the right side's value, of what the right side reads; as formulas of its
    parts, where it computes in parts."""
    return Proposal(
        code or code_of(left.variant, right.variant),
        f"the left program computes {left.variant}, the right one {right.variant}.",
        _trials(scene, left, right, read),
        "With the left one's on the right",
        "Both formulas were evaluated on what the operation reads; each gives its side's value.",
        likely=True,
        numbers=numbers_of(left.variant, right.variant),
    )


def _trials(scene: Scene, left: _Recognised, right: _Recognised, read: Any) -> Iterator[Trial]:
    """Yield the change of the one value, and the same change in all calls of its line."""
    side, value = scene.right, right.at
    producer = side.trace.values[value].producer
    step = None if producer is None else side.trace.steps[producer]
    if read is None and step is not None:
        read = next(iter(arrays_of(side, step.inputs[:1]).values()))
    new = None if read is None else _instead(left, right, read, arrays_of(side, [value])[value])
    if new is None:
        return
    yield (Edit("right", {value: new}),)
    if step is not None and step.place is not None:
        calls, number = calls_like(scene, "right", step), step.outputs.index(value)
        yield from in_all_of(scene, "right", calls, partial(_of_call, number, left, right))


def _of_call(number: int, left: _Recognised, right: _Recognised, side: Side, call: Step) -> dict[int, Any]:
    """Return what another call of the line gives with the left formula, if the right one gives its value of
    one that it reads."""
    value = call.outputs[number]
    arrays = arrays_of(side, {value, *(i for i in call.inputs if side.prints[i].floating)})
    for i in call.inputs:
        if i in arrays and arrays[i].size <= _MOST_ELEMENTS:
            new = _instead(left, right, arrays[i], arrays[value])
            if new is not None:
                return {value: new}
    return {}


def _instead(left: _Recognised, right: _Recognised, read: Any, own: Any) -> Any:
    """Return what the left formula gives, laid out as the side's own value; None if the right formula does
    not give that."""
    wanted = {left.variant[:2], right.variant[:2]}
    made = {v[:2]: v.values for v in variants_of(read) if v[:2] in wanted}
    if len(made) < len(wanted):
        return None
    mine, theirs = made[left.variant[:2]], made[right.variant[:2]]
    if distance(fingerprint(theirs), fingerprint(own)) >= SAME_FORMULA:
        return None
    return laid_out_like(mine, theirs, own)


def _unlike_in_parts(scene: Scene, here: Start, there: Start) -> tuple[_Recognised, _Recognised] | None:
    """Return a function of elements of each side, of values that one side computes at once and the other one
    in parts."""
    parts = scene.comparison.found.known("right")
    for j in there.step.inputs:
        for i in set(here.step.inputs).intersection(parts.get(j, ())):
            found = []
            for name, start, value in (("left", here, i), ("right", there, j)):
                side = scene.comparison.side(name)
                wanted = _prints(side, scene.region(name), start)
                tried = [(v, fingerprint(v.values)) for v in elementwise_of(arrays_of(side, [value])[value])]
                found.append(_recognised(tried, wanted))
            pair = _unlike(*found)
            if pair is not None:
                return pair
    return None


def _prints(side: Side, region: Iterable[Step], start: Start) -> dict[int, Fingerprint]:
    """Return the values of the function that a step belongs to, with their fingerprints."""
    at = start.step
    own = at.place, at.module
    near = [s for s in region if (s.place, s.module) == own or s.operation == at.operation][:_MOST_STEPS]
    return {o: side.prints[o] for s in near for o in s.outputs if side.prints[o].entries}


class _Recognised(NamedTuple):
    """A variant, its fingerprint, and the value that it gives, with that one's."""

    variant: Variant
    formula: Fingerprint
    at: int
    value: Fingerprint


def _recognised(
    tried: list[tuple[Variant, Fingerprint]], wanted: dict[int, Fingerprint]
) -> list[_Recognised]:
    """Return the variants that give one of the values, the last value first, and the nearest of each first:
    only the last digits may tell a small epsilon from none."""
    found = list[_Recognised]()
    for at, mark in reversed(wanted.items()):
        gaps = [
            (_Recognised(v, own, at, mark), distance(own, mark))
            for v, own in tried[1:]
            if own.entries and not own.simple
        ]
        near = sorted(((v, max(gap, _ROUNDING)) for v, gap in gaps if gap < SAME_FORMULA), key=itemgetter(1))
        found += [v for v, _ in near]
    return found


def _named_first(found: list[_Recognised], step: Step) -> list[_Recognised]:
    """Return the variants, those first that have the name of the step: a relu and an absolute value of
    positive numbers are the same."""
    return sorted(found, key=lambda r: r.variant.family != step.operation)


def _unlike(a: Sequence[_Recognised], b: Sequence[_Recognised]) -> tuple[_Recognised, _Recognised] | None:
    """Return a variant of each side: of one family with other settings, else functions of elements."""
    for here in a:
        for there in b:
            alike = here.variant.family == there.variant.family
            if alike and here.variant.setting != there.variant.setting and _explain(here, there):
                return here, there
    simple = [[r for r in side if not any(k == "axis" for k, _ in r.variant.setting)] for side in (a, b)]
    if simple[0] and simple[1] and simple[0][0].variant.family != simple[1][0].variant.family:
        return (simple[0][0], simple[1][0]) if _explain(simple[0][0], simple[1][0]) else None
    return None


def _explain(here: _Recognised, there: _Recognised) -> bool:
    """Return whether two formulas differ as the two values do. Values that are nearer to each other than a
    formula is to its value fit either, and show nothing."""
    rows = zip(*map(_sums, (here.formula, there.formula, here.value, there.value)), strict=True)
    left = [
        (abs((formula - other) - (value - its)), abs(value - its), _ROUNDING * max(abs(value), abs(its)))
        for formula, other, value, its in rows
    ]
    return all(rest <= _MOST_LEFT * gap + noise for rest, gap, noise in left) and any(
        gap > noise for _, gap, noise in left
    )


def _sums(mark: Fingerprint) -> tuple[float, ...]:
    return mark.total, mark.absolute, mark.squares, mark.signed
