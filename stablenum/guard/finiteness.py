"""Whether the numbers of a step are finite, and which reason code the step gets."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from stablenum.guard.reasons import Reason
from stablenum.rules.spikes import Verdict

__all__ = ["Finiteness", "finiteness", "reason_code", "worst_index"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


class Finiteness(NamedTuple):
    """What is finite: three () bool."""

    gradients: Array
    loss: Array
    others: Array


def finiteness(total: Array, loss: Array | None, found_inf: Array | None, *, xp: Namespace) -> Finiteness:
    """Of the joint gradient norm, the loss and what others reported; what is not known counts as finite."""
    gradients = xp.isfinite(total)
    yes = xp.ones_like(gradients)
    return Finiteness(
        gradients=gradients,
        loss=yes if loss is None else xp.isfinite(loss),
        others=yes if found_inf is None else xp.logical_not(found_inf),
    )


def reason_code(
    finite: Finiteness,
    total: Array,
    clip_coefficient: Array,
    spike: Verdict | None,
    *,
    shrinks_spikes: bool,
    stuck_at_floor: Array | None,
    xp: Namespace,
) -> Array:
    """The () int32 code. The list goes from the weakest cause to the first: a bad loss makes bad gradients.

    Args:
        finite: what is finite.
        total: () float32, the joint norm of the gradients as they came.
        clip_coefficient: () float32, the smallest factor that clipping asks for.
        spike: what the spike rule says, None without one.
        shrinks_spikes: the spike rule shrinks steps instead of refusing them.
        stuck_at_floor: () bool, the loss scale can go no lower and the step before overflowed there too;
            None for a scale without a floor.
        xp: the array namespace.
    """
    bad = xp.logical_not(finite.gradients)
    causes = [(clip_coefficient < 1, Reason.CLIPPED)]
    if spike is not None and shrinks_spikes:
        causes += [(spike.any, Reason.SPIKE_CLIPPED)]
    elif spike is not None:
        causes += [(spike.grad_norm, Reason.SPIKE_GRAD_NORM), (spike.loss, Reason.SPIKE_LOSS)]
    causes += [
        (xp.logical_not(finite.others), Reason.FOUND_INF),
        (bad, Reason.INF_GRADIENT),
        (xp.isnan(total), Reason.NAN_GRADIENT),
    ]
    if stuck_at_floor is not None:
        causes += [(bad & stuck_at_floor, Reason.NOT_A_SCALE_PROBLEM)]
    causes += [(xp.logical_not(finite.loss), Reason.NONFINITE_LOSS)]
    reason = xp.full_like(finite.gradients, int(Reason.OK), dtype=xp.int32)
    for condition, code in causes:
        reason = xp.where(condition, xp.full_like(reason, int(code)), reason)
    return reason


def worst_index(norms: Array, like: Array, *, xp: Namespace) -> Array:
    """Index of the first non-finite norm, else of the largest (the first of equals); -1 for no norms."""
    if norms.shape[0] == 0:
        return xp.full_like(like, -1)
    infinite = xp.full_like(norms, float("inf"))
    return xp.astype(xp.argmax(xp.where(xp.isfinite(norms), norms, infinite)), xp.int32)
