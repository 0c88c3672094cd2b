"""Name the cause of a difference by trying: which change makes the two sides agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.fingerprints import Fingerprint, distance, fingerprint
from stablenum.diagnosis.diff.frontier import Frontier, Start, same_line
from stablenum.diagnosis.diff.remedies import REMEDIES
from stablenum.diagnosis.diff.results import Group
from stablenum.diagnosis.diff.sides import Side
from stablenum.diagnosis.diff.update_causes import Update, cause_of_updates
from stablenum.diagnosis.diff.variants import Variant, variants_of
from stablenum.diagnosis.replay.trace import Step

__all__ = ["Scene", "causes_of"]

# A formula of NumPy and an operation agree up to so much.
_SAME = 1e-7
_MOST_TRIALS = 16
_MOST_ELEMENTS = 2**17
_NORMS = ("norm", "normalize", "standard", "sqrt", "var", "std")


@dataclass(frozen=True, slots=True)
class Scene:
    """What is known where two programs part.

    Attributes:
        left, right: the sides.
        found: where each begins to differ.
        group: the results that differ.
        shared: value of the right side -> values of the left side that are equal to it.
        arrays: of the right side: returns the arrays of some values.
        agrees: evaluates a side with some values replaced, and returns whether the results agree.
        updates: returns what both sides make of each parameter.
    """

    left: Side
    right: Side
    found: Frontier
    group: Group
    shared: Mapping[int, Iterable[int]]
    arrays: Callable[[Iterable[int]], Mapping[int, Any]]
    agrees: Callable[[str, Mapping[int, Any]], bool]
    updates: Callable[[], Sequence[Update]]


def causes_of(scene: Scene) -> tuple[Cause, ...]:
    """Return the causes, the most likely first."""
    for rule in (_of_updates, _by_variant, _by_constant, _by_structure):
        cause = rule(scene)
        if cause is not None:
            return (cause,)
    return ()


def _cause(code: str, sentence: str, evidence: str, *, confirmed: bool) -> Cause:
    return Cause(code=code, sentence=sentence, evidence=evidence, remedy=REMEDIES[code], confirmed=confirmed)


# --- a known function ------------------------------------------------------------------------------------


def _by_variant(scene: Scene) -> Cause | None:
    """Find two variants of what the right side reads, one of which gives its value and one the left one's."""
    here, there = scene.found.left, scene.found.right
    if here is None or there is None or scene.group.kind not in ("loss", "output"):
        return None
    mine = _prints(scene.left, scene.found.region_left, here)
    theirs = _prints(scene.right, scene.found.region_right, there)
    read = [i for i in there.step.inputs if not scene.right.neutral(i) and i in scene.shared]
    if there.missing:
        read = [o for o in there.step.outputs if not scene.right.neutral(o)]
    for array in scene.arrays(read).values():
        if array.size > _MOST_ELEMENTS:
            continue
        # Hundreds of variants: only their fingerprints are kept.
        tried = [(v._replace(values=None), fingerprint(v.values)) for v in variants_of(array)]
        a = [tried[0][0]] if here.missing else _recognised(tried, mine)
        b = [tried[0][0]] if there.missing else _recognised(tried, theirs)
        pair = _unlike(a, b)
        if pair is not None:
            return _cause(
                _code_of(*pair),
                f"the left program computes {pair[0]}, the right one {pair[1]}.",
                "Both formulas were evaluated on what the operation reads; each gives its side's value.",
                confirmed=True,
            )
    return None


def _prints(side: Side, region: Iterable[Step], start: Start) -> list[Fingerprint]:
    """Return the fingerprints of what the function that a step belongs to computes."""
    place, operation = start.step.place, start.step.operation
    near = [s for s in region if s.place == place or s.operation == operation][:40]
    return [side.prints[o] for s in near for o in s.outputs if side.prints[o].entries]


def _recognised(tried: list[tuple[Variant, Fingerprint]], wanted: list[Fingerprint]) -> list[Variant]:
    """Return the variants that give one of the values, the last value first."""
    return [
        variant
        for mark in reversed(wanted)
        for variant, own in tried[1:]
        if own.entries and not own.simple and distance(own, mark) < _SAME
    ]


def _unlike(a: Sequence[Variant], b: Sequence[Variant]) -> tuple[Variant, Variant] | None:
    """Return a variant of each side: of one family with other settings, else functions of elements."""
    for here in a:
        for there in b:
            if here.family == there.family and here.setting != there.setting:
                return here, there
    simple = [[v for v in side if not any(k == "axis" for k, _ in v.setting)] for side in (a, b)]
    if simple[0] and simple[1] and simple[0][0].family != simple[1][0].family:
        return simple[0][0], simple[1][0]
    return None


def _code_of(a: Variant, b: Variant) -> str:
    if "identity" in (a.family, b.family):
        return "missing_operation" if b.family == "identity" else "extra_operation"
    if a.family != b.family:
        return "other_function"
    unlike = {k for k, v in a.setting if dict(b.setting).get(k) != v} | {k for k, _ in b.setting} - {
        k for k, _ in a.setting
    }
    if a.family in ("gelu", "silu"):
        return f"{a.family}_variant"
    if "epsilon" in unlike:
        return "epsilon_value"
    if "placed" in unlike:
        return "epsilon_placement"
    if "correction" in unlike:
        return "variance_correction"
    if "axis" in unlike:
        return "softmax_axis" if "softmax" in a.family else "norm_axis"
    return "reduction" if a.family == "reduction" else "other_function"


# --- a constant --------------------------------------------------------------------------------------------


def _by_constant(scene: Scene) -> Cause | None:
    """Give one side a constant of the other side, and see whether the results agree then."""
    mine, theirs = _numbers(scene, "left"), _numbers(scene, "right")
    trials = sorted(
        (_strangeness(number, new), side, value, number, new, step.index, step)
        for side, own, other in (("right", theirs, mine), ("left", mine, theirs))
        for value, (number, step) in own.items()
        for new in {n for n, _ in other.values()} - {n for n, _ in own.values()}
        if value >= 0 and number not in {n for n, _ in other.values()}
    )
    for *_, side, value, number, new, _, step in trials[:_MOST_TRIALS]:
        if scene.agrees(side, {value: np.float64(new)}):
            left, right = (new, number) if side == "right" else (number, new)
            return _cause(
                _code_of_constant(step, scene.group),
                f"the left program uses {left:g}, the right one {right:g} in {step.operation}.",
                f"With {new:g} in place of {number:g} on the {side}, the results agree.",
                confirmed=True,
            )
    return None


def _strangeness(number: float, new: float) -> float:
    """Return how unlikely it is that one number was meant to be the other: small ones are epsilons, and whole
    ones are axes and sizes."""
    if 0 < number < 1e-2 and 0 < new < 1e-2:
        return 0.0
    whole = (number == round(number)) + (new == round(new))
    return 1.0 + whole + (number * new <= 0)


def _numbers(scene: Scene, name: str) -> dict[int, tuple[float, Step]]:
    """Return the numbers near the difference: by the value that holds each, or by a negative number for one
    that is part of a call and cannot be replaced."""
    side: Side = getattr(scene, name)
    start = getattr(scene.found, name)
    region = getattr(scene.found, f"region_{name}")
    if start is None:
        return {}
    near = region[:200] if scene.group.kind == "updated" else same_line(start, region)
    found: dict[int, tuple[float, Step]] = {}
    for step in near:
        for value in step.inputs:
            known = side.trace.values[value]
            mark = side.prints[value]
            if known.role == "constant" and mark.entries == 1:
                found[value] = (mark.total, step)
        for number in step.scalars:
            if side.program.framework != "jax" and number == number and abs(number) < 1e30:
                found[-len(found) - 1] = (number, step)
    return found


def _code_of_constant(step: Step, group: Group) -> str:
    if group.kind == "updated":
        return "epsilon_value" if step.primitive == "add" else "scale"
    if "cross_entropy" in step.operation:
        return "label_smoothing"
    if any(n in step.operation for n in _NORMS) or step.primitive == "add":
        return "epsilon_value"
    return "scale"


# --- an update -------------------------------------------------------------------------------------------


def _of_updates(scene: Scene) -> Cause | None:
    if scene.group.kind != "updated":
        return None
    names = [
        s.library or s.operation
        for region in (scene.found.region_left, scene.found.region_right)
        for s in region[:20]
    ]
    found = cause_of_updates(scene.updates(), names)
    return None if found is None else _cause(*found, confirmed=True)


# --- what is missing -------------------------------------------------------------------------------------


def _by_structure(scene: Scene) -> Cause | None:
    here, there = scene.found.left, scene.found.right
    if scene.group.kind == "gradient":
        return _of_gradient(scene)
    if here is None or there is None:
        return None
    if here.missing or there.missing:
        return _of_missing(here, there)
    names = {here.step.operation, there.step.operation}
    moving = {"reshape", "transpose"}
    if {here.step.primitive, there.step.primitive} & moving and names & moving:
        return _cause(
            "head_split_order",
            "the same numbers are put in another order.",
            "Both sides read equal numbers; afterwards no axis of the one corresponds to one of the other.",
            confirmed=False,
        )
    for words, code in _BY_OPERATION:
        if names & words:
            return _cause(code, _SENTENCES.get(code, "the two operations differ."), "", confirmed=False)
    return None


_BY_OPERATION: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"avg_pool", "max_pool"}), "pooling_count"),
    (frozenset({"upsample_bilinear2d", "upsample_nearest2d"}), "resize_mode"),
    (frozenset({"conv"}), "padding"),
    (frozenset({"dropout"}), "dropout"),
    (frozenset({"batch_norm"}), "running_statistics"),
    (frozenset({"where", "masked_fill", "attention"}), "mask_missing"),
    (frozenset({"cross_entropy"}), "ignored_labels"),
    (frozenset({"matmul"}), "transposed_weight"),
)
_SENTENCES = {
    "pooling_count": "the two sides pool differently: the padding is counted, or the windows lie elsewhere.",
    "resize_mode": "the two sides resize differently.",
    "padding": "the two convolutions pad or stride differently.",
    "dropout": "one side drops units.",
    "running_statistics": "one side normalises by the batch, the other one by running statistics.",
    "mask_missing": "the two sides mask differently.",
    "ignored_labels": "the two losses weight or ignore labels differently.",
    "transposed_weight": "the two products read equal numbers in another arrangement.",
}


def _of_missing(here: Start, there: Start) -> Cause:
    side, step = ("right", here.step) if there.missing else ("left", there.step)
    masks = ("where", "masked_fill")
    code = (
        "mask_missing"
        if step.operation in masks
        else "scale"
        if step.operation in ("mul", "div")
        else "dropout"
        if step.operation == "dropout"
        else "missing_operation"
        if side == "right"
        else "extra_operation"
    )
    return _cause(
        code,
        f"the {side} program has no {step.operation} here.",
        "Both sides compute the same up to this operation, and go on with the same one after it.",
        confirmed=False,
    )


def _of_gradient(scene: Scene) -> Cause | None:
    """Say which side has no gradient, or only a part of it."""
    pairs = scene.group.differing
    zero = {"left": 0, "right": 0}
    for pair in pairs:
        for name, side, result in (("left", scene.left, pair.left), ("right", scene.right, pair.right)):
            zero[name] += not np.any(side.arrays[result.value])
    who = next((n for n, count in zero.items() if count), None)
    said = (
        f"the {who} program gives no gradient at all to {zero[who]} of them."
        if who
        else "a part of the gradient is missing or added on one side."
    )
    return _cause(
        "stopped_gradient",
        f"the losses agree, and {len(pairs)} gradients do not: {said}",
        "The same loss with other gradients: something is detached, or a derivative is written by hand.",
        confirmed=bool(who),
    )
