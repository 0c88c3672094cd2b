"""Measure what a guard watches, and let the core decide the step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import stablenum
from stablenum.formats import FLOAT32_MAX, SMALLEST_FLOAT16
from stablenum.guard.restored import check_made_for, follow_config, foreign_scale
from stablenum.rules.clipping import Units
from stablenum.wide import Wide, times_scale
from stablenum_jax._step.measure import AxisName, leaf_norms, norms_over_axis
from stablenum_jax._step.measure_elements import extremes, largest_element
from stablenum_jax._step.measure_units import leaf_and_unit_norms, unit_axes
from stablenum_jax._trees.names import Path, path_name

__all__ = ["Watched", "judge", "judge_finiteness"]

Array: TypeAlias = jax.Array


class Watched(NamedTuple):
    """The gradients and weights that a guard watches, one entry per parameter.

    Attributes:
        paths: the parameters' paths.
        gradients: None for a missing gradient.
        weights: the parameters; () if no rule compares gradients with them.
        others: gradients that the guard does not see; only their finiteness counts.
    """

    paths: tuple[Path, ...]
    gradients: tuple[Any, ...]
    weights: tuple[Any, ...] = ()
    others: tuple[Any, ...] = ()


def judge(
    config: stablenum.GuardConfig,
    state: stablenum.GuardState,
    watched: Watched,
    *,
    loss: Array | None,
    axis_name: AxisName | None = None,
    unscaled: bool = False,
) -> tuple[stablenum.Decision, stablenum.GuardState]:
    """Measure, then call :func:`stablenum.decide`; the decision is the same on all shards.

    Args:
        config: the guard's settings.
        state: the guard's state, which may have been restored from a guard with another loss scale.
        watched: the gradients.
        loss: the unscaled loss or None; with ``axis_name``, that of this shard, which is averaged.
        axis_name: mesh axes along which gradients are sharded.
        unscaled: whether the gradients have already been divided by the loss scale, so that the
            multipliers contain only clipping.

    Raises:
        ValueError: the state has the statistics of other rules than those of ``config``.
    """
    scale = state.loss_scale.scale if unscaled else None
    check_made_for(config, state, _first_state(config))
    seen = _observe(config, watched, loss=loss, axis_name=axis_name, scale=scale)
    decision, after = _decide(config, state, seen)
    if scale is not None:
        decision = decision._replace(
            multiplier=decision.multiplier * scale,
            unit_multipliers=tuple(part * scale for part in decision.unit_multipliers),
        )
    return decision, after


def judge_finiteness(
    config: stablenum.GuardConfig,
    state: stablenum.GuardState,
    watched: Watched,
    *,
    loss: Array | None,
    axis_name: AxisName | None = None,
) -> tuple[stablenum.Decision, stablenum.GuardState]:
    """Judge only whether gradients are finite, because the guard will get other gradients than these.

    The micro-batches of a ``MultiSteps`` around the guard are noisier than their mean, so rules fitted to the
    mean do not apply to them. The next state is used only if the step is skipped.
    """
    bare = dataclasses.replace(config, clip=None, spike=None)
    plain = state._replace(clip=(), spike=())
    seen = _observe(bare, watched, loss=loss, axis_name=axis_name, scale=None, measure_extremes=False)
    decision, after = _decide(bare, plain, seen)
    return decision, after._replace(clip=state.clip, spike=state.spike)


def _decide(
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
) -> stablenum.Observation:
    """Measure everything that the config's rules need. ``scale`` is what the gradients have already been
    divided by.

    Without ``measure_extremes`` the extremes are 0, which is enough for a step that is skipped.
    """
    norms, others, units = _norms(config, watched)
    if axis_name is not None:
        norms = norms_over_axis(norms, axis_name, watched.gradients)
        others = norms_over_axis(others, axis_name, watched.others) if others.value.size else others
        loss = None if loss is None else lax.psum(loss / lax.psum(1, axis_name), axis_name)
    amax = tiny = jnp.zeros((), jnp.float32)
    if measure_extremes and "tiny" in config.needs:
        bound = SMALLEST_FLOAT16 if scale is None else SMALLEST_FLOAT16 / scale
        amax, tiny = extremes(watched.gradients, bound, axis_name=axis_name)
    elif measure_extremes and "amax" in config.needs:
        amax = largest_element(watched.gradients, axis_name=axis_name)
    if scale is not None:
        norms = times_scale(norms, scale, xp=jnp)
        amax = jnp.minimum(amax * scale, FLOAT32_MAX)
        units = units and _times_scale(units, scale)
    return stablenum.Observation(
        norms=norms.value,
        exponents=norms.power,
        loss=loss,
        found_inf=~jnp.isfinite(others.value).all() if others.value.size else None,
        units=units,
        amax=amax if "amax" in config.needs else None,
        tiny=tiny if "tiny" in config.needs else None,
    )


def _norms(config: stablenum.GuardConfig, watched: Watched) -> tuple[Wide, Wide, Units | None]:
    """Return norms of the watched gradients and of the others, and of the units if a rule needs them."""
    n = len(watched.gradients)
    leaves: Sequence[Any] = [*watched.gradients, *watched.others]
    if config.unit_rule is None:
        norms = leaf_norms(leaves)
        return *_divided(norms, n), None
    names = [path_name(path) for path in watched.paths]
    axes = unit_axes(config.unit_rule, names, watched.gradients)
    extra = [None] * len(watched.others)
    norms, units = leaf_and_unit_norms(leaves, [*watched.weights, *extra], [*axes, *extra])
    return *_divided(norms, n), Units(*(part[:n] for part in units))


def _divided(norms: Wide, n: int) -> tuple[Wide, Wide]:
    return jax.tree.map(lambda part: part[:n], norms), jax.tree.map(lambda part: part[n:], norms)


def _times_scale(units: Units, scale: Array) -> Units:
    """Multiply the units' norms by the scale."""
    wide = [times_scale(Wide(*one), scale, xp=jnp) for one in zip(units.norms, units.exponents, strict=True)]
    return Units(tuple(one.value for one in wide), units.weights, tuple(one.power for one in wide))
