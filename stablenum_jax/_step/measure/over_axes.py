"""Mesh axes of ``shard_map`` and ``pmap``: what all devices along them measured, in one collective.

Each device writes a row of numbers into its own slot of an array of zeros. The sum over the axes then holds
the rows of all devices, bit for bit, because every slot has one number and zeros, and NaN and inf survive it.
A sum (and not a gather) is what ``shard_map`` knows to be the same on all devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from stablenum.guard.ranks import MAX_RANKS
from stablenum.norms.wide import Wide, join
from stablenum_jax._step.measure.specs import axes_of
from stablenum_jax._trees.leaves import varying_axes

__all__ = [
    "AxisName",
    "check_bound",
    "contributions",
    "gathered",
    "is_copied",
    "is_first_copy",
    "joint_columns",
    "names_of",
    "norms_over_axes",
]

Array: TypeAlias = jax.Array
AxisName: TypeAlias = Hashable | tuple[Hashable, ...]


def check_bound(axis_name: AxisName) -> None:
    """Check that ``shard_map``, ``pmap`` or ``vmap`` binds the axes.

    Raises:
        ValueError: it does not, or the axes have more devices than a record can tell apart.
    """
    try:
        devices = lax.psum(1, axis_name)
    except NameError as error:
        raise ValueError(
            "axis_name must name axes that shard_map or pmap binds around the training step; got "
            f"{axis_name!r}, which is not bound here. Under plain jit, leave axis_name out of guard(...): "
            "norms of sharded arrays are global there. Inside shard_map, pass the names of the mesh axes "
            "along which gradients are sharded; inside pmap, the axis_name that pmap was given."
        ) from error
    if devices > MAX_RANKS:
        raise ValueError(f"axis_name must span at most {MAX_RANKS} devices; got {axis_name!r}, {devices}.")


def gathered(row: Array, axis_name: AxisName) -> Array:
    """Return (devices, k) from the (k,) float32 of each device: one collective of as many numbers.

    The rows are in the order of the devices along the axes; of several axes, the last one counts fastest.
    """
    devices = lax.psum(1, axis_name)
    mine = jnp.arange(devices)[:, None] == lax.axis_index(axis_name)
    return lax.psum(jnp.where(mine, row, jnp.zeros_like(row)), axis_name)


def norms_over_axes(norms: Wide, axis_name: AxisName) -> Wide:
    """Return (n,) norms of vectors that lie along mesh axes, from the (n,) norms of each device's part.

    This is one collective of two numbers per norm and device.
    """
    assert norms.power is not None
    rows = gathered(jnp.concatenate([norms.value, norms.power.astype(jnp.float32)]), axis_name)
    return joint_columns(*jnp.split(rows, 2, axis=1))


def joint_columns(values: Array, powers: Array) -> Wide:
    """Return (n,) norms from the (devices, n) norms of their parts and the powers of two of these."""
    by_column = jax.vmap(functools.partial(join, xp=jnp), in_axes=1)
    return by_column(Wide(values, powers.astype(jnp.int32)))


def contributions(leaves: Sequence[Any], axis_name: AxisName, specs: Sequence[PartitionSpec] = ()) -> Array:
    """Return, for each leaf, what a norm is multiplied by such that the devices' parts join to one leaf's.

    It is 1, or 1 / sqrt(c) for a leaf of which c devices have copies. Without specs, only ``shard_map`` with
    its ``check_vma`` knows which leaves vary over an axis; elsewhere all are taken to be sharded.

    Args:
        leaves: the leaves.
        axis_name: the axes.
        specs: the spec of each leaf; () if they are not known.

    Returns:
        (n,) float32.
    """
    copied = _all_copied(leaves, axis_name, specs)
    copies = [math.prod(lax.psum(1, name) for name in names) for names in copied]
    return jnp.asarray([c**-0.5 for c in copies], jnp.float32)


def is_first_copy(
    leaves: Sequence[Any], axis_name: AxisName, specs: Sequence[PartitionSpec] = ()
) -> list[Array]:
    """Return, for each leaf, () bool: whether this device has the first of its copies, or a shard of it."""

    def first(copied: Sequence[Hashable]) -> Array:
        at_origin = [lax.axis_index(name) == 0 for name in copied]
        return functools.reduce(jnp.logical_and, at_origin, jnp.asarray(True))

    return [first(copied) for copied in _all_copied(leaves, axis_name, specs)]


def is_copied(leaf: Any, axis_name: AxisName) -> bool:
    """Return whether all devices along the axes are known to hold the same leaf."""
    return len(_copied(leaf, axis_name)) == len(names_of(axis_name))


def names_of(axis_name: AxisName | None) -> tuple[Hashable, ...]:
    """Return the axes that were given as one name, as several or as none."""
    return axis_name if isinstance(axis_name, tuple) else () if axis_name is None else (axis_name,)


def _all_copied(
    leaves: Sequence[Any], axis_name: AxisName, specs: Sequence[PartitionSpec]
) -> list[list[Hashable]]:
    """Return, for each leaf, the axes along which all devices hold the same leaf."""
    if not specs:
        return [_copied(leaf, axis_name) for leaf in leaves]
    return [[name for name in names_of(axis_name) if name not in axes_of(spec)] for spec in specs]


def _copied(leaf: Any, axis_name: AxisName) -> list[Hashable]:
    """Return the axes along which all devices are known to hold the same leaf."""
    known = [name for name in names_of(axis_name) if name in varying_axes(lax.axis_index(name))]
    varies = frozenset() if leaf is None else varying_axes(leaf)
    return [name for name in known if name not in varies]
