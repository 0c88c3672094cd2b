"""Several clip rules applied in order, each to the norms that result from the rules before it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from stablenum.arrays import at_least
from stablenum.formats import FLOAT32_TINY
from stablenum.norms.wide import Wide, join, lower, multiply, shrink
from stablenum.rules.clipping.adaptive import AdaptiveGradClip
from stablenum.rules.clipping.common import no_change

__all__ = ["Clipped", "FlatUnits", "Units", "clip_in_order"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


class Units(NamedTuple):
    """The norms that :class:`AdaptiveGradClip` needs, one array per parameter.

    Attributes:
        norms: (u_i,) float32, the L2 norm of the gradient of each unit of the parameter, as the optimizer
            gets the gradient; (0,) for a parameter that the rule leaves unchanged.
        weights: (u_i,) float32, the L2 norm of each unit's weights.
        exponents: (u_i,) int32, the powers of two of the norms, as ``Observation.exponents``; () if that is
            None.
    """

    norms: tuple[Array, ...]
    weights: tuple[Array, ...]
    exponents: tuple[Array, ...] = ()


class FlatUnits(NamedTuple):
    """The units of all parameters in one vector.

    Attributes:
        norms: (u,), the norms of the unscaled gradients.
        weights: (u,) float32, the norms of the weights.
        sizes: the number of units of each parameter, as Python integers (static under tracing).
    """

    norms: Wide
    weights: Array
    sizes: tuple[int, ...]

    def spread(self, values: Wide, *, xp: Namespace) -> Wide:
        """Repeat (n,) values, one per parameter, to (u,), one per unit; return a () value unchanged."""

        def each(array: Array) -> Array:
            return xp.concat([xp.broadcast_to(array[i], (size,)) for i, size in enumerate(self.sizes)])

        if values.value.ndim == 0 or not self.sizes:
            return values
        return Wide(each(values.value), None if values.power is None else each(values.power))

    def split(self, values: Array) -> tuple[Array, ...]:
        """Split (u,) values into one array per parameter."""
        ends = list(itertools.accumulate(self.sizes))
        return tuple(values[end - size : end] for end, size in zip(ends, self.sizes, strict=True))


class Clipped(NamedTuple):
    """The outcome of all rules.

    Attributes:
        coefficient: () or (n,), the factor on each parameter's gradient, without the unit factors.
        unit_factors: (u,), the total factor on each unit, with the units of all parameters in one
            vector; None without :class:`AdaptiveGradClip`.
        smallest: () float32, the smallest factor on any element; at least the smallest normal number.
        states: the rules' next states.
    """

    coefficient: Wide
    unit_factors: Wide | None
    smallest: Array
    states: tuple[Any, ...]


def clip_in_order(
    rules: Sequence[Any],
    states: Sequence[Any],
    norms: Wide,
    total: Wide,
    units: FlatUnits | None,
    *,
    start: Wide | None,
    applied: Array,
    per_tensor: bool,
    partial: bool = False,
    xp: Namespace,
) -> Clipped:
    """Apply the rules in order and combine their factors.

    Args:
        rules, states: the clip rules and the state of each.
        norms: (n,), the norms of the unscaled gradients.
        total: (), their joint norm.
        units: needed for :class:`AdaptiveGradClip` only; also None if there are no parameters.
        start: (), a factor to apply before all rules, or None for 1.
        applied: () bool, whether the step enters the rules' statistics.
        per_tensor: whether there is one factor per parameter instead of one for all.
        partial: whether ``total`` may be that of more than ``norms``, of which other ranks have others.
            Behind a rule with several factors, ``norms`` must be those of all parameters even so.
        xp: the array namespace.
    """
    coefficient, left, after = no_change(norms if per_tensor else total, xp=xp), norms, []
    whole, common = total, no_change(total, xp=xp)
    if start is not None:
        start = multiply(no_change(start, xp=xp), start, xp=xp)
        coefficient, common = multiply(coefficient, start, xp=xp), start
        left, total = shrink(left, start, xp=xp), shrink(total, start, xp=xp)
    shrinking: Wide | None = None  # (u,) the factors of AdaptiveGradClip
    alike = partial  # and all parameters have had one factor so far, `common`
    for i, (rule, state) in enumerate(zip(rules, states, strict=True)):
        if i > 0:  # the norms after the rules so far; the first rule gets those in the arguments
            left = norms
            if shrinking is not None and units is not None:
                left = _left_of_units(norms, units, shrinking, xp=xp)
            left = shrink(left, coefficient, xp=xp)
            total = shrink(whole, common, xp=xp) if alike else join(left, xp=xp)
        if isinstance(rule, AdaptiveGradClip):
            if units is not None:
                seen = shrink(units.norms, units.spread(coefficient, xp=xp), xp=xp)
                factors = rule.unit_factors(seen, units.weights, xp=xp)
                shrinking = multiply(no_change(factors, xp=xp), factors, xp=xp)
        else:
            factor, state = rule.multiplier(state, left, total, applied=applied, xp=xp)
            coefficient = multiply(coefficient, factor, xp=xp)
            common = multiply(common, factor, xp=xp) if alike and not rule.per_tensor else common
        alike = alike and not rule.per_tensor and shrinking is None
        after.append(state)
    if coefficient.value.ndim == 0:
        smallest = _plain(coefficient, xp=xp)
    elif coefficient.value.shape[0]:
        smallest = xp.min(_plain(coefficient, xp=xp))
    else:
        smallest = xp.ones_like(total.value)
    if shrinking is None or units is None:
        return Clipped(coefficient, None, smallest, tuple(after))
    unit_factors = multiply(shrinking, units.spread(coefficient, xp=xp), xp=xp)
    if unit_factors.value.shape[0]:
        smallest = xp.minimum(smallest, xp.min(_plain(unit_factors, xp=xp)))
    return Clipped(coefficient, unit_factors, smallest, tuple(after))


def _plain(factor: Wide, *, xp: Namespace) -> Array:
    """Return the factor as float32, at least its smallest normal number."""
    value = factor.value if factor.power is None else lower(factor.value, factor.power, xp=xp)
    return at_least(value, FLOAT32_TINY, xp=xp)


def _left_of_units(norms: Wide, units: FlatUnits, factors: Wide, *, xp: Namespace) -> Wide:
    """Return (n,), the norms of the gradients after their units have been shrunk."""
    if not units.sizes:
        return norms
    left = shrink(units.norms, factors, xp=xp)
    values = units.split(left.value)
    if left.power is None or norms.power is None:
        kept = [
            join(Wide(part), xp=xp).value if part.shape[0] else norms.value[i]
            for i, part in enumerate(values)
        ]
        return Wide(xp.stack(kept))
    joined = [
        join(Wide(part, power), xp=xp) if part.shape[0] else Wide(norms.value[i], norms.power[i])
        for i, (part, power) in enumerate(zip(values, units.split(left.power), strict=True))
    ]
    return Wide(xp.stack([one.value for one in joined]), xp.stack([one.power for one in joined]))
