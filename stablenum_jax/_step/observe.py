"""Measure what a guard watches, and let the core decide the step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

import stablenum
from stablenum.formats import FLOAT32_MAX, SMALLEST_FLOAT16
from stablenum.guard.decide import after_fault
from stablenum.guard.observation import Fault
from stablenum.guard.restored import check_made_for, follow_config, foreign_scale
from stablenum.norms.exact_sums import norms
from stablenum.norms.wide import Wide, times_scale
from stablenum.rules.clipping import Units
from stablenum_jax._step.derivatives import undefined_beyond, with_finite_slopes, with_tangents
from stablenum_jax._step.measure.elements import Elements, elements, largest_element
from stablenum_jax._step.measure.exactly import leaf_sums
from stablenum_jax._step.measure.norms import leaf_norms, norm_tangent
from stablenum_jax._step.measure.over_axes import AxisName, check_bound, is_first_copy, names_of
from stablenum_jax._step.measure.specs import check_axes, whole_shape
from stablenum_jax._step.measure.together import Measured, exact_total, over_devices
from stablenum_jax._step.measure.together_units import UnitLayout, own_factors, unit_layouts
from stablenum_jax._step.measure.units import leaf_and_unit_norms
from stablenum_jax._trees.names import Path, path_name

__all__ = ["Judged", "Watched", "judge", "judge_finiteness"]

Array: TypeAlias = jax.Array


class Judged(NamedTuple):
    """A decision, and what follows from it.

    Attributes:
        decision: whether the step is applied.
        after: the guard's next state.
        after_found: returns the next state of a step that is skipped, given a fault that is found later; it
            has the reason 0 where the step was skipped for a fault already.
    """

    decision: stablenum.Decision
    after: stablenum.GuardState
    after_found: Callable[[Fault], stablenum.GuardState]


class Watched(NamedTuple):
    """The gradients and weights that a guard watches, one entry per parameter.

    Attributes:
        paths: the parameters' paths.
        gradients: None for a missing gradient.
        weights: the parameters; () if no rule compares gradients with them.
        others: gradients that the guard does not see; only their finiteness counts.
        specs: how gradient and weights of each parameter are divided over mesh axes; () if it is not known.
    """

    paths: tuple[Path, ...]
    gradients: tuple[Any, ...]
    weights: tuple[Any, ...] = ()
    others: tuple[Any, ...] = ()
    specs: tuple[PartitionSpec, ...] = ()

    @property
    def names(self) -> list[str]:
        """The parameters' names."""
        return [path_name(path) for path in self.paths]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the whole gradients, of which this device may have parts; () for a missing one."""
        shapes = [() if leaf is None else jnp.shape(leaf) for leaf in self.gradients]
        if not self.specs:
            return shapes
        return [
            () if leaf is None else whole_shape(shape, spec)
            for leaf, shape, spec in zip(self.gradients, shapes, self.specs, strict=True)
        ]


def judge(
    config: stablenum.GuardConfig,
    state: stablenum.GuardState,
    watched: Watched,
    *,
    loss: Array | None,
    axis_name: AxisName | None = None,
    unscaled: bool = False,
    fault: Fault | None = None,
) -> Judged:
    """Measure, then call :func:`stablenum.decide`; the decision is the same on all shards.

    Args:
        config: the guard's settings.
        state: the guard's state, which may have been restored from a guard with another loss scale.
        watched: the gradients.
        loss: the unscaled loss or None; with ``axis_name``, that of this device, and the decision is about
            the mean.
        axis_name: mesh axes along which gradients are sharded.
        unscaled: whether the gradients have already been divided by the loss scale, so that the
            multipliers contain only clipping.
        fault: what else forbids the step, the same on all shards.

    Raises:
        ValueError: the state has the statistics of other rules than those of ``config``; ``axis_name`` or a
            spec names axes that are not bound; units are to be clipped of which it is not known where they
            are.
    """
    scale = state.loss_scale.scale if unscaled else None
    check_made_for(config, state, _first_state(config))
    layouts = _layouts(config, watched, axis_name)
    seen = _observe(config, watched, loss=loss, axis_name=axis_name, scale=scale, layouts=layouts)
    decision, after = _decide(config, state, seen._replace(fault=fault))
    decision = _own_part(decision, layouts)
    if scale is not None:
        decision = decision._replace(
            multiplier=decision.multiplier * scale,
            unit_multipliers=tuple(part * scale for part in decision.unit_multipliers),
        )

    def after_found(found: Fault) -> stablenum.GuardState:
        return after_fault(config, state, after, found, xp=jnp)

    return Judged(decision, after, after_found)


def judge_finiteness(
    config: stablenum.GuardConfig,
    state: stablenum.GuardState,
    watched: Watched,
    *,
    loss: Array | None,
    axis_name: AxisName | None = None,
    fault: Fault | None = None,
) -> tuple[stablenum.Decision, stablenum.GuardState]:
    """Judge only whether gradients are finite, because the guard will get other gradients than these.

    The micro-batches of a ``MultiSteps`` around the guard are noisier than their mean, so rules fitted to the
    mean do not apply to them. The next state is used only if the step is skipped.
    """
    if axis_name is not None:
        check_bound(axis_name)
    watched = watched._replace(specs=())  # they are those of the gradients that the guard will get
    bare = dataclasses.replace(config, clip=None, spike=None)
    plain = state._replace(clip=(), spike=())
    seen = _observe(bare, watched, loss=loss, axis_name=axis_name, scale=None, measure_extremes=False)
    decision, after = _decide(bare, plain, seen._replace(fault=fault))
    return decision, after._replace(clip=state.clip, spike=state.spike)


def _layouts(
    config: stablenum.GuardConfig, watched: Watched, axis_name: AxisName | None
) -> list[UnitLayout | None]:
    """Check axes and specs, and return how the units of each gradient lie; [] if no rule clips units."""
    if axis_name is not None:
        check_bound(axis_name)
        seen = (watched.gradients, watched.weights) if watched.specs else ()
        check_axes(watched.names if seen else (), watched.specs, *seen, joined=names_of(axis_name))
    if config.unit_rule is None:
        return []
    return unit_layouts(config.unit_rule, watched.names, watched.gradients, watched.specs, axis_name)


def _own_part(decision: stablenum.Decision, layouts: Sequence[UnitLayout | None]) -> stablenum.Decision:
    """Return the decision with the factors on the units of this device only."""
    if not any(layout is not None and layout.is_divided for layout in layouts):
        return decision
    own = [
        tuple(own_factors(*one) for one in zip(factors, layouts, strict=True))
        for factors in (decision.unit_multipliers, decision.unit_shifts)
    ]
    return decision._replace(unit_multipliers=own[0], unit_shifts=own[1])


def _decide(
    config: stablenum.GuardConfig, state: stablenum.GuardState, seen: stablenum.Observation
) -> tuple[stablenum.Decision, stablenum.GuardState]:
    decision, after = with_finite_slopes(functools.partial(_decided, config))(state, seen)

    def sloped(factor: Array, norm: Array) -> Array:
        return undefined_beyond(factor, norm, decision.grad_norm, state.loss_scale.scale)

    norm = seen.norms if config.per_tensor else decision.grad_norm
    units = seen.units.norms if seen.units else ()
    return decision._replace(
        multiplier=sloped(decision.multiplier, norm),
        unit_multipliers=tuple(map(sloped, decision.unit_multipliers, units)),
    ), after


def _decided(
    config: stablenum.GuardConfig, state: stablenum.GuardState, seen: stablenum.Observation
) -> tuple[stablenum.Decision, stablenum.GuardState]:
    # XLA must not know that a number is a constant, as the norm of a constant gradient is: it reorders
    # products of constants, and then a product that the core keeps in range overflows.
    state, seen = lax.optimization_barrier((state, seen))
    foreign = foreign_scale(config, state)
    if foreign is not None:
        seen = seen._replace(found_inf=foreign if seen.found_inf is None else seen.found_inf | foreign)
    decision, after = stablenum.decide(config, state, seen, xp=jnp)
    return decision, follow_config(config, _first_state(config).loss_scale, state, after, xp=jnp)


@functools.lru_cache(maxsize=64)
def _first_state(config: stablenum.GuardConfig) -> stablenum.GuardState:
    """Return the state before the first step, without parameters, in NumPy. It is only read."""
    return stablenum.init_guard(config, 0, xp=np)


def _observe(
    config: stablenum.GuardConfig,
    watched: Watched,
    *,
    loss: Array | None,
    axis_name: AxisName | None,
    scale: Array | None,
    measure_extremes: bool = True,
    layouts: Sequence[UnitLayout | None] = (),
) -> stablenum.Observation:
    """Measure everything that the config's rules need. ``scale`` is what the gradients have already been
    divided by.

    Without ``measure_extremes`` the extremes are 0, which is enough for a step that is skipped.
    """
    seen = _norms(config, watched, layouts, axis_name)._replace(loss=loss)
    if measure_extremes and config.needs:
        seen = seen._replace(elements=_elements(config, watched, axis_name, scale))
    if axis_name is not None:
        seen = over_devices(config, seen, watched.gradients, axis_name, specs=watched.specs, layouts=layouts)
    elif seen.sums is not None:
        seen = seen._replace(total=exact_total(seen.norms, seen.sums))
    elements = seen.elements or Elements(*[jnp.zeros((), jnp.float32)] * 3)
    amax = elements.largest
    if scale is not None:
        seen = with_finite_slopes(_scaled)(seen, scale)
        amax = jnp.minimum(amax * scale, FLOAT32_MAX)
    return stablenum.Observation(
        norms=seen.norms.value,
        exponents=seen.norms.power,
        loss=seen.loss,
        found_inf=None if seen.finite is None else ~seen.finite,
        units=seen.units,
        amax=amax if "amax" in config.needs else None,
        tiny=elements.tiny if "tiny" in config.needs else None,
        ranks=seen.ranks,
        total=seen.total,
    )


def _norms(
    config: stablenum.GuardConfig,
    watched: Watched,
    layouts: Sequence[UnitLayout | None],
    axis_name: AxisName | None,
) -> Measured:
    """Measure the norms of all gradients, and those of units if a rule needs them.

    The derivative of each is that of the root of a sum of squares, however it was computed.
    """
    gradients, weights, others = lax.stop_gradient((watched.gradients, watched.weights, watched.others))
    still = watched._replace(gradients=gradients, weights=weights, others=others)
    seen = _measured_norms(config, still, layouts, axis_name)
    axes = [None if layout is None else layout.axes for layout in layouts]
    units = seen.units or Units((), (), ())

    def rule(norms: Any, args: Any, tangents: Any) -> Any:
        gradients, weights, power, exponents = args
        changes, weight_changes, *_ = tangents
        whole, parts, of_weights = norms
        each = _tangents(whole, power, gradients, changes, [None] * len(gradients))
        return (
            jnp.stack(each) if each else whole,
            _tangents(parts, exponents, gradients, changes, axes),
            _tangents(of_weights, map(jnp.zeros_like, exponents), weights, weight_changes, axes),
        )

    values = seen.norms.value, units.norms, units.weights
    given = watched.gradients, watched.weights, seen.norms.power, units.exponents
    whole, parts, of_weights = with_tangents(values, given, rule)
    return seen._replace(
        norms=Wide(whole, seen.norms.power), units=seen.units and Units(parts, of_weights, units.exponents)
    )


def _tangents(
    norms: Any, powers: Any, xs: Sequence[Any], changes: Sequence[Any], axes: Sequence[Any]
) -> tuple[Array, ...]:
    """Return the tangents of the norms of tensors, or of the units of each."""
    return tuple(
        norm_tangent(Wide(norm, power), x, change, axis)
        if x is not None and jnp.size(x) and jnp.size(norm)
        else jnp.zeros_like(norm)
        for norm, power, x, change, axis in zip(norms, powers, xs, changes, axes, strict=False)
    )


def _measured_norms(
    config: stablenum.GuardConfig,
    watched: Watched,
    layouts: Sequence[UnitLayout | None],
    axis_name: AxisName | None,
) -> Measured:
    n = len(watched.gradients)
    exact = config.exact_norms and n > 0
    leaves: Sequence[Any] = [*watched.gradients, *watched.others]
    units = None
    if config.unit_rule is not None:
        extra = [None] * len(watched.others)
        found, by_unit = _with_units(leaves, [*watched.weights, *extra], [*layouts, *extra], axis_name)
        units = Units(*(part[:n] for part in by_unit))
    else:
        found = leaf_norms(watched.others if exact else leaves)
    others = found.value[len(found.value) - len(watched.others) :]
    seen = Measured(
        norms=jax.tree.map(lambda part: part[:n], found),
        finite=jnp.isfinite(others).all() if watched.others else None,
        units=units,
    )
    if not exact:
        return seen
    sums = leaf_sums(watched.gradients)
    return seen._replace(norms=norms(sums, xp=jnp), sums=sums)


def _with_units(
    leaves: Sequence[Any],
    weights: Sequence[Any],
    layouts: Sequence[UnitLayout | None],
    axis_name: AxisName | None,
) -> tuple[Wide, Units]:
    """Return the norms of leaves and of units.

    Over mesh axes, leaves that may be sharded are measured by themselves: they make the condition under which
    all are measured again, and so all norms, vary over the axes, and those of copies must not.
    """
    axes = [None if layout is None else layout.axes for layout in layouts]
    if axis_name is None:
        return leaf_and_unit_norms(leaves, weights, axes)
    kinds = [None if layout is None else layout.is_divided for layout in layouts]
    copied, divided, rest = (
        [leaf if of_leaf is kind else None for leaf, of_leaf in zip(leaves, kinds, strict=True)]
        for kind in (False, True, None)
    )
    whole, units = leaf_and_unit_norms(copied, weights, axes)
    parts, of_parts = leaf_and_unit_norms(divided, weights, axes)
    found = jax.tree.map(lambda *norms: functools.reduce(jnp.add, norms), whole, parts, leaf_norms(rest))
    chosen = [
        [one if kind else other for kind, one, other in zip(kinds, *pair, strict=True)]
        for pair in zip(of_parts, units, strict=True)
    ]
    return found, Units(*map(tuple, chosen))


def _elements(
    config: stablenum.GuardConfig, watched: Watched, axis_name: AxisName | None, scale: Array | None
) -> Elements:
    """Measure what loss-scale rules need of the elements.

    They choose one of several powers of two, and that is divided out again: all derivatives are 0.
    """
    gradients, scale = lax.stop_gradient((watched.gradients, scale))
    if "tiny" not in config.needs:
        zero = jnp.zeros((), jnp.float32)
        return Elements(largest_element(gradients), zero, zero)
    return elements(
        gradients,
        SMALLEST_FLOAT16 if scale is None else SMALLEST_FLOAT16 / scale,
        counted=None if axis_name is None else is_first_copy(watched.gradients, axis_name, watched.specs),
    )


def _scaled(seen: Measured, scale: Array) -> Measured:
    """Return what would have been measured before the gradients were divided by the scale."""
    ranks = seen.ranks
    if ranks is not None:
        wide = times_scale(Wide(ranks.norms, ranks.exponents), scale, xp=jnp)
        ranks = ranks._replace(norms=wide.value, exponents=wide.power)
    return seen._replace(
        norms=times_scale(seen.norms, scale, xp=jnp),
        units=seen.units and _times_scale(seen.units, scale),
        ranks=ranks,
        total=seen.total and times_scale(seen.total, scale, xp=jnp),
    )


def _times_scale(units: Units, scale: Array) -> Units:
    """Multiply the units' norms by the scale."""
    wide = [times_scale(Wide(*one), scale, xp=jnp) for one in zip(units.norms, units.exponents, strict=True)]
    return Units(tuple(one.value for one in wide), units.weights, tuple(one.power for one in wide))
