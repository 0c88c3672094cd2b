"""Name the cause of a difference: by what was tried and mended it, else by what the operations suggest."""

from __future__ import annotations

from dataclasses import replace

from stablenum.diagnosis.diff.causes.by_constant import by_constant, numbers_of_update
from stablenum.diagnosis.diff.causes.by_count import by_count
from stablenum.diagnosis.diff.causes.by_gradient import by_gradient, by_hand, by_rows
from stablenum.diagnosis.diff.causes.by_input import by_entries, by_input
from stablenum.diagnosis.diff.causes.by_moment import cause_of_moments
from stablenum.diagnosis.diff.causes.by_norm import by_normalisation, is_of_batch
from stablenum.diagnosis.diff.causes.by_number import by_number
from stablenum.diagnosis.diff.causes.by_operand import (
    by_exchange,
    by_flip,
    by_order,
    by_repetition,
    by_transposition,
)
from stablenum.diagnosis.diff.causes.by_pair import by_loss, by_pair
from stablenum.diagnosis.diff.causes.by_structure import by_lack, by_structure
from stablenum.diagnosis.diff.causes.by_target import by_targets
from stablenum.diagnosis.diff.causes.by_update import ONE_FACTOR, cause_of_updates, epsilon_like
from stablenum.diagnosis.diff.causes.by_variant import by_variant
from stablenum.diagnosis.diff.causes.by_weight import by_absence, by_weight
from stablenum.diagnosis.diff.causes.by_window import by_window
from stablenum.diagnosis.diff.causes.remedies import EPSILON_OF_BATCH_NORM
from stablenum.diagnosis.diff.causes.scene import Scene, cause
from stablenum.diagnosis.diff.differences import Cause
from stablenum.diagnosis.diff.places.flow import size
from stablenum.diagnosis.diff.sides.kinds import kind

__all__ = ["causes_of"]

# The operations of an update whose names tell what it does. Chosen, not measured.
_MOST_STEPS = 20
# So many entries have to follow from a formula beyond the one in each parameter that its factor may be fitted
# to. Chosen, not measured.
_LEAST_ENTRIES = 3


def causes_of(scene: Scene) -> tuple[Cause, ...]:
    """Return the first cause that is confirmed; without one, those that are likely, the most likely first."""
    found: list[Cause] = []
    for rule in _RULES:
        known = _fitting(scene, rule(scene))
        if known is not None and known.confirmed:
            return (known,)
        if known is not None:
            found.append(known)
    return tuple(c for c in found if c.code != "other_function" or len(found) == 1)


def _fitting(scene: Scene, known: Cause | None) -> Cause | None:
    """Return a cause with the remedy that fits the norm: the epsilons of batch norms have other defaults."""
    of_norm = known is not None and known.code == "epsilon_value" and scene.group.kind != "updated"
    if known is None or not of_norm or not is_of_batch(scene):
        return known
    return replace(known, remedy=EPSILON_OF_BATCH_NORM)


def _by_update(scene: Scene) -> Cause | None:
    if scene.group.kind != "updated":
        return None
    names = [
        s.library or s.operation
        for region in (scene.found.region_left, scene.found.region_right)
        for s in region[:_MOST_STEPS]
    ]
    own, clips = (numbers_of_update(scene.left), numbers_of_update(scene.right)), _clips(scene)
    of_moments = cause_of_moments(scene.comparison.updates_so_far(scene.group), own, clips)
    if of_moments is not None:
        return cause(*of_moments, confirmed=True, update=True)
    updates = scene.comparison.updates(scene.group)
    found = cause_of_updates(updates, names, own, clips)
    if found is None or found[0] in _FACTORS:
        counted = by_count(scene)
        if counted is not None:
            return counted
    if found is None:
        guess = epsilon_like(updates)
        return None if guess is None else cause(*guess, confirmed=False, update=True)
    # One factor fits any two numbers.
    enough = sum(u.left.size - 1 for u in updates if u.differs) >= _LEAST_ENTRIES
    return cause(*found, confirmed=enough and found[1] != ONE_FACTOR, update=True)


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
_RULES = (
    _by_update, by_absence, by_weight, by_targets, by_variant, by_normalisation, by_window, by_rows, by_hand,
    by_number, by_order, by_pair, by_loss, by_constant, by_lack, by_transposition, by_flip, by_exchange,
    by_entries, by_input, by_repetition, by_gradient, by_structure,
)  # fmt: skip
