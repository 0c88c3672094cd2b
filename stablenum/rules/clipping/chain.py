"""Several clip rules applied in order, each to the norms that result from the rules before it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from stablenum.arrays import combine_norms
from stablenum.rules.clipping.adaptive import AdaptiveGradClip
from stablenum.rules.clipping.common import floored

__all__ = ["Clipped", "FlatUnits", "Units", "clip_in_order"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


class Units(NamedTuple):
    """The norms that :class:`AdaptiveGradClip` needs, one array per parameter.

    Attributes:
        norms: (u_i,) float32, the L2 norm of the gradient of each unit of the parameter, as the optimizer
            gets the gradient; (0,) for a parameter that the rule leaves unchanged.
        weights: (u_i,) float32, the L2 norm of each unit's weights.
    """

    norms: tuple[Array, ...]
    weights: tuple[Array, ...]


class FlatUnits(NamedTuple):
    """The units of all parameters in one vector.

    Attributes:
        norms, weights: (u,) float32, the norms of the unscaled gradients and of the weights.
        sizes: the number of units of each parameter, as Python integers (static under tracing).
    """

    norms: Array
    weights: Array
    sizes: tuple[int, ...]

    def spread(self, values: Array, *, xp: Namespace) -> Array:
        """Repeat (n,) values, one per parameter, to (u,), one per unit; return a () value unchanged."""
        if values.ndim == 0 or not self.sizes:
            return values
        return xp.concat([xp.broadcast_to(values[i], (size,)) for i, size in enumerate(self.sizes)])

    def split(self, values: Array) -> tuple[Array, ...]:
        """Split (u,) values into one array per parameter."""
        ends = list(itertools.accumulate(self.sizes))
        return tuple(values[end - size : end] for end, size in zip(ends, self.sizes, strict=True))


class Clipped(NamedTuple):
    """The outcome of all rules.

    Attributes:
        coefficient: () or (n,) float32, the factor on each parameter's gradient, without the unit factors.
        unit_factors: (u,) float32, the total factor on each unit, with the units of all parameters in one
            vector; None without :class:`AdaptiveGradClip`.
        smallest: () float32, the smallest factor on any element.
        states: the rules' next states.
    """

    coefficient: Array
    unit_factors: Array | None
    smallest: Array
    states: tuple[Any, ...]


def clip_in_order(
    rules: Sequence[Any],
    states: Sequence[Any],
    norms: Array,
    total: Array,
    units: FlatUnits | None,
    *,
    start: Array | None,
    applied: Array,
    per_tensor: bool,
    xp: Namespace,
) -> Clipped:
    """Apply the rules in order and combine their factors.

    Args:
        rules, states: the clip rules and the state of each.
        norms: (n,) float32, the norms of the unscaled gradients.
        total: () float32, their joint norm.
        units: needed for :class:`AdaptiveGradClip` only; also None if there are no parameters.
        start: () float32, a factor to apply before all rules, or None for 1.
        applied: () bool, whether the step enters the rules' statistics.
        per_tensor: whether there is one factor per parameter instead of one for all.
        xp: the array namespace.
    """
    coefficient, left, after = xp.ones_like(norms if per_tensor else total), norms, []
    if start is not None:
        start = floored(start, xp=xp)
        coefficient, left, total = coefficient * start, left * start, total * start
    shrink: Array | None = None  # (u,) the factors of AdaptiveGradClip
    for i, (rule, state) in enumerate(zip(rules, states, strict=True)):
        if i > 0:  # the norms after the rules so far; the first rule gets those in the arguments
            left = norms if shrink is None or units is None else _left_of_units(norms, units, shrink, xp=xp)
            left = left * coefficient
            total = combine_norms(left, xp=xp)
        if isinstance(rule, AdaptiveGradClip):
            if units is not None:
                seen = units.norms * units.spread(coefficient, xp=xp)
                shrink = floored(rule.unit_factors(seen, units.weights, xp=xp), xp=xp)
        else:
            factor, state = rule.multiplier(state, left, total, applied=applied, xp=xp)
            # The factor is floored after each rule, so that the next rule gets the norms that actually
            # result.
            coefficient = floored(coefficient * floored(factor, xp=xp), xp=xp)
        after.append(state)
    if coefficient.ndim == 0:
        smallest = coefficient
    else:
        smallest = xp.min(coefficient) if coefficient.shape[0] else xp.ones_like(total)
    if shrink is None or units is None:
        return Clipped(coefficient, None, smallest, tuple(after))
    unit_factors = floored(shrink * units.spread(coefficient, xp=xp), xp=xp)
    if unit_factors.shape[0]:
        smallest = xp.minimum(smallest, xp.min(unit_factors))
    return Clipped(coefficient, unit_factors, smallest, tuple(after))


def _left_of_units(norms: Array, units: FlatUnits, shrink: Array, *, xp: Namespace) -> Array:
    """Return (n,) float32, the norms of the gradients after their units have been shrunk."""
    if not units.sizes:
        return norms
    parts = units.split(units.norms * shrink)
    kept = [combine_norms(part, xp=xp) if part.shape[0] else norms[i] for i, part in enumerate(parts)]
    return xp.stack(kept)
