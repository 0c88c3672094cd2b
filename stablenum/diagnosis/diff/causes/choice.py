"""Name the cause of a difference: by what was tried and mended it, else by what the operations suggest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from stablenum.diagnosis.diff.causes.by_array import by_array
from stablenum.diagnosis.diff.causes.by_constant import by_constant, numbers_of_update
from stablenum.diagnosis.diff.causes.by_count import by_count
from stablenum.diagnosis.diff.causes.by_gradient import by_gradient, by_hand, by_rows
from stablenum.diagnosis.diff.causes.by_input import by_input
from stablenum.diagnosis.diff.causes.by_moment import cause_of_moments
from stablenum.diagnosis.diff.causes.by_norm import by_normalisation, is_of_batch
from stablenum.diagnosis.diff.causes.by_operand import (
    by_exchange,
    by_flip,
    by_order,
    by_repetition,
    by_transposition,
)
from stablenum.diagnosis.diff.causes.by_pair import by_loss, by_pair
from stablenum.diagnosis.diff.causes.by_setting import by_setting
from stablenum.diagnosis.diff.causes.by_structure import by_lack, by_structure, unexplained
from stablenum.diagnosis.diff.causes.by_target import by_targets
from stablenum.diagnosis.diff.causes.by_update import Told, cause_of_updates, epsilon_like
from stablenum.diagnosis.diff.causes.by_variant import by_variant
from stablenum.diagnosis.diff.causes.by_weight import by_absence, by_weight
from stablenum.diagnosis.diff.causes.by_window import by_window
from stablenum.diagnosis.diff.causes.judge import Edit, Proposal, judged
from stablenum.diagnosis.diff.causes.remedies import EPSILON_OF_BATCH_NORM
from stablenum.diagnosis.diff.causes.scene import Scene
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.flow import size
from stablenum.diagnosis.diff.places.results import Update
from stablenum.diagnosis.diff.sides.kinds import kind
from stablenum.diagnosis.diff.sides.play import if_recorded

__all__ = ["causes_of"]

# The operations of an update whose names tell what it does. Chosen, not measured.
_MOST_STEPS = 20
# So many entries have to follow from a formula beyond the one in each parameter that its factor may be fitted
# to. Chosen, not measured.
_LEAST_ENTRIES = 3


def causes_of(scene: Scene) -> tuple[Cause, ...]:
    """Return the causes of the first rule that is confirmed; without one, those that are likely, the most
    likely first."""
    likely: list[Cause] = []
    for what, rule in _RULES:
        if likely and rule is by_structure:
            break
        verdict = judged(scene, what, if_recorded(partial(rule, scene), ()))
        if verdict.confirmed:
            return tuple(_fitting(scene, c) for c in verdict.confirmed)
        likely += verdict.likely
    rest = None if likely else if_recorded(lambda: unexplained(scene), None)
    return tuple(_fitting(scene, c) for c in likely) if rest is None else (rest,)


def _fitting(scene: Scene, known: Cause) -> Cause:
    """Return a cause with the remedy that fits the norm: the epsilons of batch norms have other defaults."""
    of_norm = known.code == "epsilon_value" and scene.group.kind != "updated"
    return replace(known, remedy=EPSILON_OF_BATCH_NORM) if of_norm and is_of_batch(scene) else known


def _by_update(scene: Scene) -> Iterator[Proposal]:
    if scene.group.kind != "updated":
        return
    names = [
        s.library or s.operation
        for region in (scene.found.region_left, scene.found.region_right)
        for s in region[:_MOST_STEPS]
    ]
    own, clips = (numbers_of_update(scene.left), numbers_of_update(scene.right)), _clips(scene)
    steps = scene.comparison.updates_so_far(scene.group)
    of_moments = cause_of_moments(steps, own, clips)
    if of_moments is not None:
        yield _of(of_moments, steps[-1])
    found = cause_of_updates(steps[-1], names, own, clips)
    if found is None or found.code in _FACTORS:
        yield from by_count(scene)
    if found is not None:
        yield _of(found, steps[-1])
    guess = epsilon_like(steps[-1]) if found is None and of_moments is None else None
    if guess is not None:
        yield _of(guess, steps[-1])


def _of(found: Told, updates: Sequence[Update]) -> Proposal:
    """Propose the left side's way for the right side's updates. One factor fits any two numbers."""
    enough = sum(u.left.size - 1 for u in updates if u.differs) >= _LEAST_ENTRIES
    rows = list(zip(updates, found.made or (), strict=False)) if enough else []
    values = {u.result: u.rest + made for u, made in rows if made is not None}
    # What is done to a parameter whose gradient is 0 but for rounding tells nothing.
    values |= {u.result: u.rest for u, made in rows if made is None and not u.told} if values else {}
    trials = [(Edit("right", values),)] if values else None
    change = "With the left side's formula on the right" if trials else ""
    return Proposal(found.code, found.sentence, trials, change, found.evidence, likely=True)


def _clips(scene: Scene) -> tuple[int, int]:
    """Return how many single numbers each side limits in its update."""
    left, right = (
        sum(
            s.phase == "update" and kind(s) in _LIMITS and all(size(side, o) == 1 for o in s.outputs)
            for s in side.trace.steps
        )
        for side in (scene.left, scene.right)
    )
    return left, right


# What one factor between all updates may come from; two rates of a schedule are another such factor.
_FACTORS = {"clip_missing", "momentum_dampening", "nesterov", "scale"}
_LIMITS = {"clamp", "clip", "max", "maximum", "min", "minimum"}
_RULES: tuple[tuple[str, Callable[[Scene], Iterable[Proposal]]], ...] = (
    ("update laws", _by_update),
    ("parameters that only one side has", by_absence),
    ("the other side's parameters", by_weight),
    ("targets of the loss", by_targets),
    ("indices, flags and numbers of the other side", by_array),
    ("known functions and their settings", by_variant),
    ("statistics of a norm", by_normalisation),
    ("settings of convolutions, pooling and resizing", by_window),
    ("sums of gradients", by_rows),
    ("derivatives defined by hand", by_hand),
    ("images in another order", by_order),
    ("masks, factors and orders of entries", by_pair),
    ("factors of the loss", by_loss),
    ("the other side's constants", by_constant),
    ("settings of an operation", by_setting),
    ("operations that one side lacks", by_lack),
    ("transposed matrices", by_transposition),
    ("flipped kernels", by_flip),
    ("exchanged operands", by_exchange),
    ("other values that are read", by_input),
    ("repeated entries", by_repetition),
    ("gradients", by_gradient),
    ("structure", by_structure),
)
