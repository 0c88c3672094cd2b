"""Check whether the numbers of a step are finite, and choose the step's reason code."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from stablenum.guard.reasons import Reason
from stablenum.norms.wide import Wide
from stablenum.rules.spikes import Verdict

__all__ = ["Finiteness", "finiteness", "reason_code", "worst_index"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


class Finiteness(NamedTuple):
    """Which parts of a step are finite: three () bool."""

    gradients: Array
    loss: Array
    others: Array


def finiteness(total: Array, loss: Array | None, found_inf: Array | None, *, xp: Namespace) -> Finiteness:
    """Return whether the joint norm, the loss and the values that others report on are finite. None counts as
    finite."""
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
    fault: Array | None,
    xp: Namespace,
) -> Array:
    """Return the () int32 reason code. If several causes hold, the last one in the list determines the code.

    The list is ordered from the weakest cause to the root cause; a bad loss, for example, makes bad
    gradients.

    Args:
        finite: which parts of the step are finite.
        total: () float32, the joint norm of the gradients before unscaling and clipping.
        clip_coefficient: () float32, the smallest factor that the clip rules ask for.
        spike: the spike rule's verdict; None without a spike rule.
        shrinks_spikes: whether the spike rule shrinks spikes instead of skipping them.
        stuck_at_floor: () bool, whether the loss scale is at its smallest value and the previous step
            overflowed at that value too; None for a scale without a smallest value.
        fault: () int32, the reason that the adapter knows, 0 for none; None if it does not look.
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
    return reason if fault is None else xp.where(fault == 0, reason, fault)


def worst_index(norms: Wide, like: Array, *, xp: Namespace) -> Array:
    """Return the index of the first non-finite norm, otherwise of the first largest one; -1 if there are no
    norms."""
    values, powers = norms
    if values.shape[0] == 0:
        return xp.full_like(like, -1)
    infinite = xp.full_like(values, float("inf"))
    finite = xp.isfinite(values)
    if powers is not None:
        # Norms with a lower power are smaller.
        values = xp.where(powers < xp.max(powers), xp.zeros_like(values), values)
    return xp.astype(xp.argmax(xp.where(finite, values, infinite)), xp.int32)
