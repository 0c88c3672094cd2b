"""The shards of a mesh: their place, what each of them reads, and the array that their results make up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stablenum_jax._diagnosis.replay.flags import flags_of
from stablenum_jax._diagnosis.replay.processes import spans

__all__ = ["Layout", "Shard", "described", "holders", "layout_of", "number_of", "on_host"]

# jax.pmap without an axis name is a shard_map over an axis of this name, which the user does not know.
_UNNAMED = "_internal_pmap_axis_name"
# So many shards are named one by one.
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of a mesh, which runs the body of a ``shard_map`` for itself.

    Attributes:
        coordinates: its index along each axis, in the order of the mesh.
        devices: its devices; several if the ``shard_map`` leaves some axes of the mesh to the compiler.
    """

    coordinates: tuple[tuple[Any, int], ...]
    devices: tuple[Any, ...] = ()

    def along(self, axes: Sequence[Any]) -> tuple[int, ...]:
        """Return its indices along some axes."""
        at = dict(self.coordinates)
        return tuple(at[a] for a in axes)

    def within(self, outer: Shard) -> Shard:
        """Return the shard of a ``shard_map`` inside a shard of another one."""
        both = [d for d in self.devices if d in outer.devices] if outer.devices else list(self.devices)
        return Shard((*outer.coordinates, *self.coordinates), tuple(both or outer.devices))


@dataclass(frozen=True, slots=True)
class Layout:
    """The mesh of a ``shard_map``.

    Attributes:
        mesh: the mesh; it has devices, or is abstract.
        sizes: the size of each axis over which the body runs in shards.
    """

    mesh: Any
    sizes: Mapping[Any, int]

    def shards(self) -> list[Shard]:
        """Return all shards, the last axis first."""
        found = []
        for index in itertools.product(*map(range, self.sizes.values())):
            at = dict(zip(self.sizes, index, strict=True))
            found.append(Shard(tuple(at.items()), self._devices(at)))
        return found

    def _devices(self, at: Mapping[Any, int]) -> tuple[Any, ...]:
        grid = _grid(self.mesh)
        if grid is None:
            return ()
        chosen = grid[tuple(at.get(name, slice(None)) for name in self.mesh.axis_names)]
        return tuple(np.asarray(chosen, dtype=object).ravel().tolist())

    def parts(self, data: Any, spec: Any) -> dict[tuple[int, ...], Any]:
        """Return the different parts of an array, by index along the axes of its spec (:meth:`axes_of`)."""
        axes = self.axes_of(spec)
        whole = on_host(data)
        found = {}
        for index in itertools.product(*(range(self.sizes[a]) for a in axes)):
            found[index] = whole[self._window(np.shape(whole), spec, dict(zip(axes, index, strict=True)))]
        return found

    def whole(self, parts: Mapping[tuple[int, ...], Any], spec: Any, aval: Any) -> Any:
        """Return the array of which these are the parts: the inverse of :meth:`parts`."""
        axes = self.axes_of(spec)
        if not axes:
            return parts[()]
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            data = {i: jax.random.key_data(p) for i, p in parts.items()}
            shape = (*aval.shape, *next(iter(data.values())).shape[len(aval.shape) :])
            joined = self._joined(data, spec, axes, shape, np.uint32)
            return jax.random.wrap_key_data(
                jnp.asarray(joined), impl=jax.random.key_impl(parts[next(iter(parts))])
            )
        return self._joined(parts, spec, axes, aval.shape, aval.dtype)

    def _joined(self, parts: Mapping[Any, Any], spec: Any, axes: Any, shape: Any, dtype: Any) -> Any:
        made = np.empty(shape, dtype)
        for index, part in parts.items():
            made[self._window(shape, spec, dict(zip(axes, index, strict=True)))] = np.asarray(part)
        return made

    def axes_of(self, spec: Any) -> tuple[Any, ...]:
        """Return the axes over which an array with this spec is split."""
        return tuple(a for entry in spec for a in _names(entry) if a in self.sizes)

    def _window(self, shape: Sequence[int], spec: Any, at: Mapping[Any, int]) -> tuple[slice, ...]:
        windows = []
        for size, entry in zip(shape, spec, strict=False):
            axes = [a for a in _names(entry) if a in self.sizes]
            count = math.prod(self.sizes[a] for a in axes)
            number = number_of([at[a] for a in axes], [self.sizes[a] for a in axes])
            step = size // count
            windows.append(slice(number * step, (number + 1) * step))
        return tuple(windows)


def layout_of(params: Mapping[str, Any], inputs: Sequence[Any]) -> Layout:
    """Return the layout of a ``shard_map``, given the parameters of its equation and the arrays it reads.

    A ``shard_map`` that is called under ``jax.set_mesh`` has a mesh without devices, which the arrays know.
    """
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    if _grid(mesh) is None:
        meshes = [
            jax.sharding.get_mesh(),
            *(getattr(getattr(x, "sharding", None), "mesh", None) for x in inputs),
        ]
        known = (m for m in meshes if _grid(m) is not None and dict(m.shape) == dict(mesh.shape))
        mesh = next(known, mesh)
    return Layout(mesh, {name: int(mesh.shape[name]) for name in mesh.axis_names if name in manual})


def number_of(index: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the position of an index in row-major order."""
    number = 0
    for i, size in zip(index, sizes, strict=True):
        number = number * size + i
    return number


def holders(data: Any, sharding: Any = None) -> tuple[list[Shard], list[Shard]]:
    """Return the shards of an array whose parts are not finite, and all of its shards; none if the array is
    not spread over devices.

    Args:
        data: an array.
        sharding: that which it had before it was gathered.
    """
    sharding = sharding or getattr(data, "sharding", None)
    if sharding is None or len(sharding.device_set) < 2 or sharding.is_fully_replicated or spans(data):
        return [], []
    whole = np.asarray(data)
    devices: dict[Any, list[Any]] = {}
    for device, index in sharding.devices_indices_map(whole.shape).items():
        devices.setdefault(tuple((s.start, s.stop) for s in index), []).append(device)
    shards = {at: Shard(_coordinates(sharding, group), tuple(group)) for at, group in devices.items()}
    bad = [s for at, s in shards.items() if any(flags_of(whole[tuple(slice(*a) for a in at)]))]
    return bad, list(shards.values())


def _coordinates(sharding: Any, devices: Sequence[Any]) -> tuple[tuple[Any, int], ...]:
    """Return the index of some devices along the axes of their mesh that they have in common."""
    grid = _grid(getattr(sharding, "mesh", None))
    if grid is None:
        return ()
    at = [i for i, d in np.ndenumerate(grid) if d in devices]
    split = {a for entry in sharding.spec for a in _names(entry)}
    return tuple((n, at[0][k]) for k, n in enumerate(sharding.mesh.axis_names) if n in split)


def described(shards: Sequence[Shard], everywhere: Sequence[Shard]) -> str:
    """Name some shards of a mesh as reports do.

    Example:
        >>> all_of_them = [Shard((("data", i),)) for i in range(3)]
        >>> described(all_of_them[2:], all_of_them), described(all_of_them, all_of_them)
        ('the shard data=2', 'every shard')
    """
    if len(everywhere) > 1 and set(shards) == set(everywhere):
        return "every shard"
    if len(shards) == 1:
        return f"the shard {_named(shards[0])}"
    same = set(shards[0].coordinates).intersection(*(s.coordinates for s in shards[1:]))
    if same and set(shards) == {s for s in everywhere if same <= set(s.coordinates)}:
        common = tuple(c for c in shards[0].coordinates if c in same)
        return f"the shards {_named(Shard(common, tuple(d for s in shards for d in s.devices)))}"
    named = [_named(s) for s in shards[:_MOST_NAMED]]
    left = len(shards) - len(named)
    return f"the shards {'; '.join(named)}" + (f" and {left} more" if left else "")


def _named(shard: Shard) -> str:
    known = [(a, i) for a, i in shard.coordinates if a != _UNNAMED]
    place = ", ".join(f"{axis}={index}" for axis, index in known)
    devices = sorted({d.id for d in shard.devices})
    shown = ", ".join(map(str, devices[:_MOST_NAMED])) + (", ..." if len(devices) > _MOST_NAMED else "")
    on = f"device{'s' if len(devices) > 1 else ''} {shown}" if devices else ""
    processes = sorted({d.process_index for d in shard.devices})
    if on and jax.process_count() > 1:
        on += f", process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
    return f"{place} ({on})" if place and on else place or f"of {on}"


def _grid(mesh: Any) -> Any:
    """Return the devices of a mesh as an array; None if it has none."""
    return mesh.devices if isinstance(mesh, jax.sharding.Mesh) and mesh.size else None


def _names(entry: Any) -> tuple[Any, ...]:
    if entry is None or entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def on_host(data: Any) -> Any:
    """Return an array in host memory, where it is of no mesh."""
    if jnp.issubdtype(getattr(data, "dtype", np.float32), jax.dtypes.extended):
        raw = np.asarray(jax.random.key_data(data))
        return jax.random.wrap_key_data(jnp.asarray(raw), impl=jax.random.key_impl(data))
    return np.asarray(data)
