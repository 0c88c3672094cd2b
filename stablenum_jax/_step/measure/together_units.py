"""The units of gradients that are divided over mesh axes: joined over all devices, and cut again.

A device measures its part of each unit. In the one collective of a step it sends the norms of its parts, and
all devices compute those of whole units from them, and decide from these; each then applies the factors of
its own units. Units of which every device has a copy are not sent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import stablenum
from stablenum.norms.wide import Wide
from stablenum.rules.clipping import Units
from stablenum_jax._step.measure.over_axes import AxisName, is_copied, joint_columns, names_of
from stablenum_jax._step.measure.specs import entries, whole_shape

__all__ = ["UnitLayout", "joined_units", "own_factors", "unit_layouts", "units_row"]

Array: TypeAlias = jax.Array


class UnitLayout(NamedTuple):
    """How the units of a gradient lie.

    Attributes:
        shape: the shape of this device's part of the gradient.
        axes: the dimensions that a unit extends over.
        divided: for each dimension, the axes among those of ``axis_name`` along which it is divided.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    divided: tuple[tuple[Hashable, ...], ...]

    @property
    def is_divided(self) -> bool:
        """Whether devices have different units, or parts of units."""
        return any(self.divided)

    @property
    def outputs(self) -> list[int]:
        """The dimensions that number the units."""
        return [d for d in range(len(self.shape)) if d not in self.axes]


def unit_layouts(
    rule: stablenum.AdaptiveGradClip,
    names: Sequence[str],
    leaves: Sequence[Any],
    specs: Sequence[PartitionSpec],
    axis_name: AxisName | None,
) -> list[UnitLayout | None]:
    """Return how the units of each gradient lie; None for one that the rule leaves unchanged.

    Args:
        rule: says what a unit is.
        names: the parameters' names.
        leaves: their gradients.
        specs: their specs; () if they are not known.
        axis_name: the axes along which devices decide together.

    Raises:
        ValueError: a unit may lie on devices of which this device does not know what they have; a pattern of
            the rule matches no name.
    """
    included = rule.included(names)
    found: list[UnitLayout | None] = []
    for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        if not included[i] or leaf is None or not jnp.size(leaf):
            found.append(None)
            continue
        shape = jnp.shape(leaf)
        if not specs:
            _check_copied(name, leaf, axis_name)
        spec = specs[i] if specs else PartitionSpec()
        # Of the whole shape, because a part with one row would be a vector.
        axes = rule.unit_axes(whole_shape(shape, spec), default="last")
        divided = entries(spec, len(shape))
        _check_joined(name, spec, [a for d in axes for a in divided[d]], axis_name)
        joined = tuple(tuple(a for a in part if a in names_of(axis_name)) for part in divided)
        found.append(UnitLayout(shape, axes, joined))
    return found


def _check_copied(name: str, leaf: Any, axis_name: AxisName | None) -> None:
    """Check that every device has all of a gradient of which nobody said how it is divided.

    Inside ``shard_map`` a gradient's type says over which mesh axes it varies, but not which of its
    dimensions they divide.
    """
    if axis_name is not None and not is_copied(leaf, axis_name):
        raise ValueError(
            f"specs must be given with AdaptiveGradClip and axis_name for a gradient that may be sharded; "
            f"got specs=None and axis_name={axis_name!r}, and {name!r} is not known to be the same on all "
            "devices. The rule needs the norm of each whole unit, and which dimension is divided decides "
            "where its parts are: pass guard(specs=...), the in_specs of the parameters. With sharded arrays "
            "under jit, leave axis_name out: norms are global there. Or name the parameter in "
            "AdaptiveGradClip(exclude=...)."
        )


def _check_joined(
    name: str, spec: PartitionSpec, divided: Sequence[Hashable], axis_name: AxisName | None
) -> None:
    """Check that the devices that have parts of a unit decide together."""
    missing = [axis for axis in divided if axis not in names_of(axis_name)]
    if missing:
        raise ValueError(
            f"specs must divide a unit of AdaptiveGradClip along axis_name only; got {spec} for {name!r}, "
            f"whose units are divided along {missing[0]!r}, which is not in axis_name={axis_name!r}. Add it "
            "to axis_name, so that the devices along it decide together, or name the parameter in "
            "AdaptiveGradClip(exclude=...)."
        )


# --- joining -----------------------------------------------------------------------------------


def units_row(units: Units, layouts: Sequence[UnitLayout | None]) -> Array | None:
    """Return what this device sends of its units, three numbers for each; None if it has nothing to send."""
    parts = [
        part
        for i, layout in enumerate(layouts)
        if layout is not None and layout.is_divided
        for part in (units.norms[i], units.exponents[i].astype(jnp.float32), units.weights[i])
    ]
    return jnp.concatenate(parts) if parts else None


def joined_units(rows: Array, own: Units, layouts: Sequence[UnitLayout | None], axis_name: AxisName) -> Units:
    """Return the norms of whole units, of the whole gradients.

    Args:
        rows: (devices, k), what each device sent.
        own: what this device measured.
        layouts: how the units lie.
        axis_name: the axes.
    """
    norms, weights, powers = (list(part) for part in (own.norms, own.weights, own.exponents))
    start = 0
    for i, layout in enumerate(layouts):
        if layout is None or not layout.is_divided:
            continue
        end = start + 3 * own.norms[i].shape[0]
        value, power, weight = (
            _by_piece(part, layout, axis_name) for part in jnp.split(rows[:, start:end], 3, axis=1)
        )
        norms[i], powers[i] = _joined(value, power)
        weights[i] = _joined(weight, jnp.zeros_like(weight)).value
        start = end
    return Units(tuple(norms), tuple(weights), tuple(powers))


def _joined(values: Array, powers: Array) -> Wide:
    """Return (u,) norms from the (pieces, u) norms of their parts."""
    if len(values) == 1:
        return Wide(values[0], powers[0].astype(jnp.int32))
    return joint_columns(values, powers)


def _by_piece(values: Array, layout: UnitLayout, axis_name: AxisName) -> Array:
    """Return (pieces, units of the whole gradient), from the (devices, units) of each device's part."""
    names = names_of(axis_name)
    used = [name for name in names if any(name in part for part in layout.divided)]
    grid = values.reshape(*(lax.psum(1, name) for name in names), *(layout.shape[d] for d in layout.outputs))
    grid = grid[tuple(slice(None) if name in used else 0 for name in names)]  # the first of copies
    pieces = [used.index(name) for d in layout.axes for name in layout.divided[d]]
    order = list(pieces)
    for k, d in enumerate(layout.outputs):
        order += [*(used.index(name) for name in layout.divided[d]), len(used) + k]
    count = math.prod(grid.shape[at] for at in pieces)
    return grid.transpose(order).reshape(count, -1)


def own_factors(factors: Array, layout: UnitLayout | None) -> Array:
    """Return the (u,) factors on the units of this device, from those on all units of the whole gradient."""
    if layout is None or not any(layout.divided[d] for d in layout.outputs):
        return factors
    sizes = [layout.shape[d] * math.prod(lax.psum(1, n) for n in layout.divided[d]) for d in layout.outputs]
    grid = factors.reshape(sizes)
    for k, d in enumerate(layout.outputs):
        if layout.divided[d]:
            at = lax.axis_index(layout.divided[d]) * layout.shape[d]
            grid = lax.dynamic_slice_in_dim(grid, at, layout.shape[d], k)
    return grid.ravel()
