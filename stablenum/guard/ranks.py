"""What several ranks or devices measured, and what it comes to: one loss, one norm, one worst parameter.

Each rank measures its own part of the gradients. One collective gives every rank the rows of all, and from
here on all of them compute the same numbers in the same order, so they decide alike to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from stablenum.arrays import at_least
from stablenum.formats import NO_LOSS

__all__ = [
    "MAX_PARAMETERS",
    "MAX_RANKS",
    "Ranks",
    "joint_found_inf",
    "joint_loss",
    "parameter_of",
    "rank_of",
    "worst_of_ranks",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

# The place of the worst parameter is one int32: its index, and above it the rank + 1, 0 for no rank.
MAX_PARAMETERS = 2**18
MAX_RANKS = 2**13 - 1


class Ranks(NamedTuple):
    """The measurements of one step on each of p ranks (or devices).

    Attributes:
        norms: (p,) float32, the L2 norm of what each rank contributes to the joint gradient, so that the
            norm of this vector is the joint norm. Of a gradient that c ranks hold alike, each contributes the
            norm divided by sqrt(c). It is not finite if and only if an element on that rank is not.
        worst: (p,) float32, the index of the worst parameter on each rank, among those of the rank; -1 for
            none.
        losses: (p,) float32, each rank's unscaled loss, or ``NO_LOSS`` where it has none.
        found_inf: (p,) float32, 1 if the rank found something else not finite; otherwise 0.
        exponents: (p,) int32, as in :class:`stablenum.Observation`, for ``norms``.
    """

    norms: Array
    worst: Array
    losses: Array
    found_inf: Array
    exponents: Array | None = None


def joint_loss(ranks: Ranks, *, xp: Namespace) -> Array:
    """Return the mean of the losses over the ranks that have one: () float32; ``NO_LOSS`` if none has.

    A loss that is not finite makes the mean NaN or inf.
    """
    given = ranks.losses != NO_LOSS
    count = xp.sum(xp.astype(given, xp.float32))
    # Divided before they are added up: the sum of finite losses may overflow.
    parts = ranks.losses / at_least(count, 1.0, xp=xp)
    mean = xp.sum(xp.where(given, parts, xp.zeros_like(parts)))
    return xp.where(count > 0, mean, xp.full_like(mean, NO_LOSS))


def joint_found_inf(ranks: Ranks, *, xp: Namespace) -> Array:
    """Return whether a rank found something not finite: () bool."""
    return xp.max(ranks.found_inf) > 0


def worst_of_ranks(ranks: Ranks, *, xp: Namespace) -> Array:
    """Return the place of the worst parameter: () int32, see :func:`rank_of` and :func:`parameter_of`.

    It is on the first rank whose loss is not finite, unless no rank's loss is finite, as after an average
    that has given one bad loss to all of them; otherwise on the first whose gradient is not finite; otherwise
    on the first with the largest norm. If the losses do not settle it, and all ranks have the same worst
    parameter and a gradient that is not finite, as after a reduction, the place has no rank.
    """
    top = xp.full_like(ranks.norms, float("inf"))
    values = ranks.norms
    if ranks.exponents is not None:
        values = xp.where(ranks.exponents < xp.max(ranks.exponents), xp.zeros_like(values), values)
    count = ranks.norms.shape[0]
    bad_loss = xp.logical_not(xp.isfinite(ranks.losses))
    bad_losses = xp.sum(xp.astype(bad_loss, xp.int32))
    by_loss = (bad_losses > 0) & (bad_losses < count)
    values = xp.where(xp.isfinite(values), values, top)
    values = xp.where(by_loss, xp.where(bad_loss, top, -top), values)
    rank = xp.astype(xp.argmax(values), xp.int32)
    same = xp.sum(xp.astype(ranks.worst == ranks.worst[0], xp.int32)) == count
    bad = xp.sum(xp.astype(xp.isfinite(ranks.norms), xp.int32)) == 0
    nowhere = same & bad & xp.logical_not(by_loss)
    # Taken, because an array used as an index would make the host wait in torch.
    index = xp.take(ranks.worst, xp.reshape(rank, (1,)))[0]
    first = (rank + 1) * MAX_PARAMETERS
    place = xp.where(nowhere, xp.zeros_like(first), first) if count > 1 else first
    return place + xp.astype(at_least(index, 0.0, xp=xp), xp.int32)


def rank_of(place: int) -> int | None:
    """Return the rank in a place, or None if it has none.

    Example:
        >>> rank_of(3), rank_of(5 * MAX_PARAMETERS + 3), rank_of(-1)
        (None, 4, None)
    """
    return None if place < MAX_PARAMETERS else place // MAX_PARAMETERS - 1


def parameter_of(place: int) -> int:
    """Return the parameter's index in a place; -1 if there is no parameter.

    Example:
        >>> parameter_of(3), parameter_of(5 * MAX_PARAMETERS + 3), parameter_of(-1)
        (3, 3, -1)
    """
    return place % MAX_PARAMETERS if place >= 0 else place
