"""Several devices decide together: what each measured, sent to all of them in one collective."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import stablenum
from stablenum.formats import NO_LOSS
from stablenum.guard.finiteness import worst_index
from stablenum.guard.ranks import Ranks
from stablenum.guard.recorder import recorded_loss
from stablenum.norms.exact_sums import COLUMNS, Sums, add, as_columns, counted_once, from_columns
from stablenum.norms.exact_sums import norms as exact_norms
from stablenum.norms.wide import Wide, join
from stablenum.rules.clipping import Units
from stablenum_jax._step.derivatives import refuse_derivative, with_finite_slopes
from stablenum_jax._step.measure.elements import Elements
from stablenum_jax._step.measure.over_axes import (
    AxisName,
    contributions,
    gathered,
    is_first_copy,
    joint_columns,
)
from stablenum_jax._step.measure.together_units import UnitLayout, joined_units, units_row

__all__ = ["Measured", "exact_total", "over_devices"]

Array: TypeAlias = jax.Array


class Measured(NamedTuple):
    """What was measured of one step.

    Attributes:
        norms: (n,), the norms of the parameters' gradients.
        finite: () bool, whether all gradients that the guard does not see are finite; None if there are none.
        loss: () float32, or None.
        units: the norms of units, or None.
        elements: what was counted of the elements, or None.
        sums: n rows, the exact sums of squares, or None.
        ranks: what each device measured, if several decide together.
        total: the exact joint norm, or None.
    """

    norms: Wide
    finite: Array | None = None
    loss: Array | None = None
    units: Units | None = None
    elements: Elements | None = None
    sums: Sums | None = None
    ranks: Ranks | None = None
    total: Wide | None = None


_EXACT_OVER_AXES = (
    "exact_norms=True cannot be differentiated over the mesh axes of axis_name with a rule for single "
    "tensors (ClipByNorm, AdaGC, or a rule after AdaptiveGradClip): their norms are joined as whole numbers. "
    "Inside jax.grad and jax.jvp, write guard(exact_norms=False)."
)


def exact_total(norms: Wide, sums: Sums) -> Wide:
    """Return the joint norm from exact sums of squares, with the derivative of the one from norms."""

    def exact(_: Wide, sums: Sums) -> Wide:
        return exact_norms(add(sums, xp=jnp), xp=jnp)

    return with_finite_slopes(exact, like=lambda norms, _: join(norms, xp=jnp))(norms, sums)


def over_devices(
    config: stablenum.GuardConfig,
    seen: Measured,
    leaves: Sequence[Any],
    axis_name: AxisName,
    *,
    specs: Sequence[PartitionSpec] = (),
    layouts: Sequence[UnitLayout | None] = (),
) -> Measured:
    """Return what all devices along the axes measured together, the same on each of them.

    This is one collective of float32 numbers from each device: its norm (two numbers), its worst parameter,
    its loss, and whether something else is not finite; three more for what is counted of elements,
    ``COLUMNS`` more for exact norms; if a rule needs the norms of single parameters, two per parameter, or
    ``COLUMNS`` with exact norms; and if a rule clips units, three per unit of the device's part of a divided
    gradient.

    Args:
        config: the guard's settings.
        seen: what this device measured.
        leaves: the gradients, of which :func:`jax.shard_map` may know that several devices have copies.
        axis_name: the axes.
        specs: the gradients' specs; () if they are not known.
        layouts: how the units of each gradient lie, if a rule needs them.
    """
    joined = functools.partial(
        _over_devices, config, leaves=leaves, axis_name=axis_name, specs=specs, layouts=layouts
    )
    return with_finite_slopes(joined)(seen)


def _over_devices(
    config: stablenum.GuardConfig,
    seen: Measured,
    *,
    leaves: Sequence[Any],
    axis_name: AxisName,
    specs: Sequence[PartitionSpec],
    layouts: Sequence[UnitLayout | None],
) -> Measured:
    each = config.needs_single_norms
    parts = Wide(seen.norms.value * contributions(leaves, axis_name, specs), seen.norms.power)
    row = {"own": _own(seen, parts)}
    if seen.elements is not None:
        row["elements"] = jnp.stack(seen.elements)
    if seen.sums is not None:
        sums = counted_once(seen.sums, jnp.stack(is_first_copy(leaves, axis_name, specs)), xp=jnp)
        row["sums"] = as_columns(sums if each else add(sums, xp=jnp), xp=jnp).ravel()
    elif each:
        row["norms"] = jnp.concatenate([parts.value, _float32(parts.power)])
    of_units = None if seen.units is None else units_row(seen.units, layouts)
    if of_units is not None:
        row["units"] = of_units
    rows = _gathered(row, axis_name)
    joint = _joint(rows, seen.norms, zeros=jnp.zeros(parts.value.shape, jnp.float32))
    if seen.units is None or of_units is None:
        return joint._replace(units=seen.units)  # whole, and the same on all devices
    return joint._replace(units=joined_units(rows["units"], seen.units, layouts, axis_name))


def _own(seen: Measured, parts: Wide) -> Array:
    """Return the numbers of a device that decides with others."""
    norm = join(parts, xp=jnp)
    worst = worst_index(parts, jnp.zeros((), jnp.int32), xp=jnp)
    loss = jnp.float32(NO_LOSS) if seen.loss is None else recorded_loss(seen.loss, seen.loss, xp=jnp)
    bad = jnp.float32(0) if seen.finite is None else _float32(~seen.finite)
    return jnp.stack([norm.value, _float32(norm.power), _float32(worst), loss, bad])


def _float32(x: Array | None) -> Array:
    assert x is not None
    return x.astype(jnp.float32)


def _gathered(row: dict[str, Array], axis_name: AxisName) -> dict[str, Array]:
    """Return (devices, k) for each part of the row, from one collective."""
    ends = np.cumsum([part.shape[0] for part in row.values()])
    rows = gathered(jnp.concatenate(list(row.values())), axis_name)
    return dict(zip(row, jnp.split(rows, ends[:-1], axis=1), strict=True))


def _joint(rows: dict[str, Array], own: Wide, *, zeros: Array) -> Measured:
    """Return what the devices measured together. The norms are 0 where no rule needs those of parameters.

    Raises:
        TypeError: differentiated, where there is no derivative; ``own`` are the norms of this device.
    """
    norm, power, worst, loss, bad = rows["own"].T
    joint = Measured(
        norms=Wide(zeros, zeros.astype(jnp.int32)),
        ranks=Ranks(norm, worst, loss, bad, exponents=power.astype(jnp.int32)),
    )
    if "elements" in rows:
        largest, *counts = rows["elements"].T
        joint = joint._replace(elements=Elements(jnp.max(largest), *(jnp.sum(count) for count in counts)))
    if "norms" in rows:
        joint = joint._replace(norms=joint_columns(*jnp.split(rows["norms"], 2, axis=1)))
    if "sums" in rows:
        columns = rows["sums"].reshape(rows["sums"].shape[0], -1, COLUMNS)
        sums = add(from_columns(columns, xp=jnp), xp=jnp)
        one_row = sums.window.shape[0] != zeros.shape[0]  # the sum over all parameters
        joint = joint._replace(total=exact_total(Wide(norm, power.astype(jnp.int32)), sums))
        if not one_row:
            joint = joint._replace(norms=refuse_derivative(exact_norms(sums, xp=jnp), own, _EXACT_OVER_AXES))
    return joint
