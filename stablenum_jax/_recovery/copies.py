"""Copies of arrays in host memory, from which the same arrays are made again as often as needed.

A copy is made without a wait. It stays valid when the array's buffer is donated to a later step. An array
that is made again has the dtype, weak type, sharding and commitment of the old one, so that a compiled step
takes it without being compiled again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

__all__ = ["Copy", "copy_of"]

_HOST = "pinned_host"


class Copy(Protocol):
    """A copy of a leaf."""

    def again(self) -> Any:
        """Return the leaf again, in memory of its own."""


def copy_of(leaf: Any) -> Copy:
    """Start copying a leaf of a state: an array, or anything else, which is kept as it is."""
    if isinstance(leaf, np.ndarray):
        return _InNumPy(leaf.copy())
    if not isinstance(leaf, jax.Array):
        return _Kept(leaf)
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    if is_key or leaf.weak_type or not _has_host_memory(leaf):
        return _OnDevice(jnp.copy(leaf))  # keys and weakly typed numbers are small
    return _OnHost(leaf)


def _has_host_memory(array: jax.Array) -> bool:
    return all(
        any(memory.kind == _HOST for memory in device.addressable_memories())
        for device in array.sharding.addressable_devices
    )


class _Kept(NamedTuple):
    value: Any

    def again(self) -> Any:
        return self.value


class _InNumPy(NamedTuple):
    value: np.ndarray

    def again(self) -> np.ndarray:
        return self.value.copy()


class _OnDevice(NamedTuple):
    array: jax.Array

    def again(self) -> jax.Array:
        return jnp.copy(self.array)


class _Part(NamedTuple):
    """A shard in host memory, and the devices of this process that hold it."""

    array: jax.Array
    devices: list[jax.Device]


class _OnHost:
    """The shards of this process, each of them once."""

    def __init__(self, array: jax.Array) -> None:
        self._shape, self._dtype, self._sharding = array.shape, array.dtype, array.sharding
        self._is_committed = array.committed
        parts: dict[Any, _Part] = {}
        for shard in array.addressable_shards:
            index = tuple((part.start, part.stop) for part in shard.index)
            if index not in parts:
                parts[index] = _Part(_moved(shard.data, shard.device, _HOST), [])
            parts[index].devices.append(shard.device)
        self._parts = list(parts.values())

    def again(self) -> jax.Array:
        if not self._is_committed:
            (part,) = self._parts
            with jax.default_device(part.devices[0]):
                return jnp.array(np.asarray(part.array))  # which is not committed to its device either
        kind = self._sharding.memory_kind
        pieces = [_moved(part.array, device, kind) for part in self._parts for device in part.devices]
        return jax.make_array_from_single_device_arrays(
            self._shape, self._sharding, pieces, dtype=self._dtype
        )


def _moved(array: jax.Array, device: jax.Device, kind: str | None) -> jax.Array:
    # Without may_alias=False, an array that is there already would not be copied, and could be donated.
    return jax.device_put(array, SingleDeviceSharding(device, memory_kind=kind), may_alias=False)
