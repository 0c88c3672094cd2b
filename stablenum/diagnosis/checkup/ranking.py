"""From what was measured to what is shown: complaints in order, each with its consequences under it."""

from __future__ import annotations

from collections.abc import Iterable

from stablenum.diagnosis.checkup import (
    rules_data,
    rules_derivatives,
    rules_flow,
    rules_functions,
    rules_gradients,
    rules_losses,
    rules_normalisation,
    rules_state,
    rules_updates,
)
from stablenum.diagnosis.checkup.course import Course
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.symptoms import Complaint, Level, Symptom

__all__ = ["complaints", "ranked"]

_RULES = (
    *rules_derivatives.RULES,
    *rules_gradients.RULES,
    *rules_updates.RULES,
    *rules_flow.RULES,
    *rules_data.RULES,
    *rules_normalisation.RULES,
    *rules_state.RULES,
    *rules_functions.RULES,
    *rules_losses.RULES,
)
_ORDER = {symptom: i for i, symptom in enumerate(Symptom)}
S = Symptom
_BAD_SIGNAL = frozenset({
    S.DEAD_UNITS, S.SATURATED, S.ATTENTION_COLLAPSE, S.EXPLODING_GRADIENTS, S.VANISHING_GRADIENTS,
    S.ZERO_GRADIENT, S.CLIPPED_ALWAYS, S.STEPS_TOO_LARGE, S.STEPS_TOO_SMALL, S.CONSTANT_OUTPUT,
    S.LOSS_DIVERGES, S.LOSS_OSCILLATES,
    S.LOSS_CONSTANT, S.FLUSHED_GRADIENTS, S.EPS_DOMINATES, S.LOST_UPDATES,
})  # fmt: skip
_NOTHING_MOVES = frozenset({
    S.ZERO_GRADIENT, S.NO_GRADIENT, S.STEPS_TOO_SMALL, S.LOSS_CONSTANT, S.CONSTANT_OUTPUT, S.EPS_DOMINATES,
    S.LOST_UPDATES,
})  # fmt: skip
_WILD = frozenset({
    S.DEAD_UNITS, S.SATURATED, S.ATTENTION_COLLAPSE, S.ROUTER_COLLAPSE, S.CONSTANT_OUTPUT, S.ZERO_GRADIENT,
    S.LOSS_DIVERGES, S.LOSS_OSCILLATES,
    S.LOSS_CONSTANT, S.CLIPPED_ALWAYS, S.EXPLODING_GRADIENTS,
})  # fmt: skip
# What a symptom brings about. A note that explains a fault is its root.
_EXPLAINS: dict[Symptom, frozenset[Symptom]] = {
    S.NO_GRAPH: frozenset(Symptom),
    S.NOT_IN_MODEL: _NOTHING_MOVES,
    S.NOT_IN_OPTIMIZER: _NOTHING_MOVES | {S.LOSS_DIVERGES},
    S.RATE_ZERO: _NOTHING_MOVES,
    S.CAPTURED_PARAMETERS: frozenset(Symptom),
    S.INDEX_OUT_OF_RANGE: _NOTHING_MOVES,
    S.GRADIENTS_KEPT: _WILD | {S.STEPS_TOO_LARGE},
    S.OPTIMIZER_RENEWED: frozenset({S.STALE_STATE, S.STEPS_TOO_SMALL, S.LOSS_OSCILLATES, S.STEPS_TOO_LARGE}),
    S.WRONG_GRADIENT: _BAD_SIGNAL | _WILD | _NOTHING_MOVES | {S.UPHILL_UPDATES, S.STALE_STATE},
    S.UPHILL_UPDATES: _BAD_SIGNAL | _WILD | {S.WEIGHT_DECAY, S.STALE_STATE},
    S.FLUSHED_GRADIENTS: _NOTHING_MOVES,
    S.LOST_UPDATES: frozenset({S.STALE_STATE, S.STEPS_TOO_SMALL, S.LOSS_CONSTANT}),
    S.BROADCAST_LOSS: frozenset({S.CONSTANT_OUTPUT, S.DEAD_UNITS}),
    S.ACTIVATION_BEFORE_LOSS: frozenset({S.VANISHING_GRADIENTS, S.SATURATED, S.STEPS_TOO_SMALL}),
    S.UNSCALED_INPUT: _BAD_SIGNAL | {S.EXPLODING_ACTIVATIONS, S.VANISHING_ACTIVATIONS},
    S.UNSCALED_TARGET: _BAD_SIGNAL,
    S.ALIKE_UNITS: _BAD_SIGNAL,
    S.EXPLODING_ACTIVATIONS: _BAD_SIGNAL,
    S.VANISHING_ACTIVATIONS: _BAD_SIGNAL,
    S.BATCH_NORM: frozenset(
        {
            S.DEAD_UNITS,
            S.CONSTANT_OUTPUT,
            S.STEPS_TOO_SMALL,
            S.VANISHING_GRADIENTS,
            S.VANISHING_ACTIVATIONS,
            S.EXPLODING_ACTIVATIONS,
        }
    ),
    S.BAD_STATE: _WILD | {S.STALE_STATE, S.STEPS_TOO_LARGE, S.STEPS_TOO_SMALL},
    S.STILL_STATE: frozenset({S.BATCH_NORM}),
    S.STALE_STATE: _WILD | {S.STEPS_TOO_LARGE, S.STEPS_TOO_SMALL},
    S.EPS_DOMINATES: frozenset({S.STEPS_TOO_SMALL, S.LOSS_CONSTANT, S.VANISHING_GRADIENTS}),
    S.WEIGHT_DECAY: _WILD | {S.VANISHING_GRADIENTS, S.STEPS_TOO_LARGE},
    S.STEPS_TOO_LARGE: _WILD,
    S.NO_GRADIENT: frozenset({S.LOSS_CONSTANT}),
    S.DEAD_UNITS: _NOTHING_MOVES,
    S.SATURATED: _NOTHING_MOVES | {S.VANISHING_GRADIENTS},
    S.VANISHING_GRADIENTS: _NOTHING_MOVES,
    S.EXPLODING_GRADIENTS: _WILD | {S.STEPS_TOO_LARGE},
    S.CLIPPED_ALWAYS: frozenset({S.LOST_UPDATES, S.STEPS_TOO_SMALL, S.LOSS_CONSTANT}),
    S.ZERO_GRADIENT: frozenset({S.LOSS_CONSTANT, S.CONSTANT_OUTPUT}),
    S.LOSS_SCALE: _NOTHING_MOVES,
    S.STEPS_TOO_SMALL: frozenset({S.LOSS_CONSTANT}),
}
# What can make numbers that are not finite, if it was seen before them.
_BLOWS_UP = frozenset({
    S.BAD_STATE, S.EXPLODING_ACTIVATIONS, S.EXPLODING_GRADIENTS, S.GRADIENTS_KEPT, S.INDEX_OUT_OF_RANGE,
    S.NOT_FINITE, S.STEPS_TOO_LARGE, S.UNSCALED_INPUT, S.UPHILL_UPDATES,
})  # fmt: skip
_NOT_FINITE = (S.NOT_FINITE, S.LOSS_NOT_FINITE)
# What was counted, and is no matter of a threshold on a size or on the shape of a curve.
_FACTS = (
    *_NOT_FINITE, S.NO_GRAPH, S.NO_GRADIENT, S.ZERO_GRADIENT, S.LOSS_CONSTANT, S.LOST_UPDATES, S.RATE_ZERO,
    S.INDEX_OUT_OF_RANGE, S.NOT_IN_MODEL, S.CAPTURED_PARAMETERS, S.BAD_STATE, S.GRADIENTS_KEPT,
    S.OPTIMIZER_RENEWED, S.WRONG_GRADIENT, S.STILL_STATE,
)  # fmt: skip
# What has these cures follows from steps that are too large.
_BY_LARGE_STEPS = (rules_normalisation.LAGGING, rules_updates.BY_RATE)


def complaints(course: Course) -> tuple[Complaint, ...]:
    """Return what is wrong with a training, the root causes first, each with its consequences.

    Example:
        >>> complaints(Course(framework="torch"))
        ()
    """
    seen = [Reading(probe) for probe in course.probes]
    # Between the steps of two optimizers there may be no forward pass.
    readings = [reading for reading in seen if reading.first_use()] or seen
    return ranked(found for rule in _RULES for found in rule(course, readings))


def ranked(found: Iterable[Complaint]) -> tuple[Complaint, ...]:
    """Put each complaint under the first one that explains it; roots come with faults first, facts before
    what rests on a threshold, then in the order of the symptoms, but last what only an evaluation notices.

    A root is as serious as the worst of its consequences.
    """
    ordered = sorted(found, key=lambda c: _ORDER[c.symptom])
    above: dict[int, int] = {}  # the position of a complaint -> that of what explains it
    for i, one in enumerate(ordered):
        for j, other in enumerate(ordered):
            if _follows(one, other) and _root(above, j) != i:
                above[i] = j
                break
    roots = []
    for i, one in enumerate(ordered):
        if i not in above:
            below = tuple(c for j, c in enumerate(ordered) if j != i and _root(above, j) == i)
            level = max(c.level for c in (one, *below))
            roots.append(one.with_(consequences=below, level=level))
    return tuple(sorted(roots, key=lambda c: (-c.level, not _is_fact(c), _is_unfelt(c), _ORDER[c.symptom])))


def _is_fact(one: Complaint) -> bool:
    """Return whether a complaint, or what follows from it, was counted."""
    return one.symptom in _FACTS or any(map(_is_fact, one.consequences))


def _is_unfelt(one: Complaint) -> bool:
    """Return whether only an evaluation reads what is wrong."""
    return one.symptom is S.BATCH_NORM and one.cure in rules_normalisation.UNFELT


def _follows(one: Complaint, other: Complaint) -> bool:
    """Return whether the second complaint explains the first."""
    if _is_unfelt(other):
        return False
    if one.symptom in _NOT_FINITE:
        return other.symptom in _BLOWS_UP and other is not one and other.since <= one.since
    if other.symptom is S.STEPS_TOO_LARGE and one.cure in _BY_LARGE_STEPS:
        return True
    if one.symptom is S.STEPS_TOO_LARGE and other.cure in _BY_LARGE_STEPS:
        return False
    by_itself = one.symptom is S.EPS_DOMINATES and one.level is Level.FAULT  # the setting is to blame
    return one.symptom in _EXPLAINS.get(other.symptom, ()) and not by_itself


def _root(above: dict[int, int], i: int) -> int:
    while i in above:
        i = above[i]
    return i
