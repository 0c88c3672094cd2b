"""Copies of arrays in host memory, from which the same arrays are made again as often as needed.

A copy is made without a wait. It stays valid when the array's buffer is donated to a later step. An array
that is made again has the dtype, weak type, sharding and commitment of the old one, so that a compiled step
takes it without being compiled again. Of an array that is spread over several processes, each keeps what its
own devices hold.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from stablenum_jax._recovery.blocks import Block, Index, index_of, region

__all__ = ["Copy", "copies_of", "copy_from", "is_data"]

_HOST = "pinned_host"
_PLAIN = (bool, int, float, complex, str, bytes)


class Copy(Protocol):
    """A copy of a leaf."""

    def again(self) -> Any:
        """Return the leaf again, in memory of its own."""

    def to_plain(self) -> Any:
        """Return plain values and NumPy arrays, for the disk; None for what is no data."""


def is_data(leaf: object) -> bool:
    """Return whether a leaf is data, as opposed to a function or another object."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, *_PLAIN))


def copies_of(leaves: Iterable[Any]) -> list[Copy]:
    """Start copying the leaves of a state: arrays, and anything else, which is kept as it is."""
    going = _Going()
    copies = [_copy_of(leaf, going) for leaf in leaves]
    going.start()
    return copies


def _copy_of(leaf: Any, going: _Going) -> Copy:
    if isinstance(leaf, np.ndarray):
        return _InNumPy(leaf.copy())
    if not isinstance(leaf, jax.Array):
        return _Kept(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _Key(_copy_of(jax.random.key_data(leaf), going), jax.random.key_impl(leaf))
    if leaf.weak_type or not _has_host_memory(leaf):
        return _OnDevice(jnp.copy(leaf))  # weakly typed arrays are numbers, mostly
    return _OnHost(_Layout.of(leaf), going.blocks_of(leaf))


def copy_from(plain: Any, like: Any) -> Copy:
    """Return the copy that :meth:`Copy.to_plain` described.

    Args:
        plain: what it returned.
        like: the leaf in whose place the copy is, of the same shape and dtype. It gives the sharding, which
            may be another one. A number or a NumPy array becomes what a compiled step returned for it.

    Raises:
        ValueError: the copy does not fit; the message says what is there, and what was expected.
    """
    if isinstance(like, jax.Array) and jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return _Key(copy_from(plain, jax.random.key_data(like)), jax.random.key_impl(like))
    if isinstance(like, jax.Array):
        return _array_from(plain, like)
    if _is_array(plain) and is_data(like):
        return _array_from(plain, _became(like, plain))
    if isinstance(like, np.ndarray):
        _check_fit(np.shape(plain), getattr(plain, "dtype", None), like)
        return _InNumPy(plain)
    if isinstance(like, np.generic):
        return _Kept(np.asarray(plain)[()])
    return _Kept(plain if is_data(like) else like)


class _Kept(NamedTuple):
    value: Any

    def again(self) -> Any:
        return self.value

    def to_plain(self) -> Any:
        if isinstance(self.value, np.generic):
            return np.asarray(self.value)
        return self.value if is_data(self.value) else None


class _InNumPy(NamedTuple):
    value: np.ndarray

    def again(self) -> np.ndarray:
        return self.value.copy()

    def to_plain(self) -> np.ndarray:
        return self.value


class _Key(NamedTuple):
    data: Copy
    impl: Any

    def again(self) -> jax.Array:
        return jax.random.wrap_key_data(self.data.again(), impl=self.impl)

    def to_plain(self) -> Any:
        return self.data.to_plain()


class _OnDevice(NamedTuple):
    array: jax.Array

    def again(self) -> jax.Array:
        return jnp.copy(self.array)

    def to_plain(self) -> Any:
        blocks = {
            index_of(shard.index, self.array.shape): shard.data for shard in self.array.addressable_shards
        }
        return _plain(self.array.shape, blocks)


class _Layout(NamedTuple):
    """What an array is, apart from its elements."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    is_committed: bool
    devices: Mapping[Index, list[Any]]  # of this process, by the shard that they hold

    @classmethod
    def of(cls, array: jax.Array) -> _Layout:
        devices: dict[Index, list[Any]] = {}
        for shard in array.addressable_shards:
            devices.setdefault(index_of(shard.index, array.shape), []).append(shard.device)
        return cls(array.shape, array.dtype, array.sharding, array.committed, devices)


class _OnHost(NamedTuple):
    """The shards of this process, each of them once."""

    layout: _Layout
    blocks: Mapping[Index, Any]

    def again(self) -> jax.Array:
        layout = self.layout
        if not layout.is_committed:
            ((index, (device,)),) = layout.devices.items()
            with jax.default_device(device):
                return jnp.array(np.asarray(self.blocks[index]))  # which is not committed to it either
        kind = layout.sharding.memory_kind
        shards = [
            _moved(self.blocks[index], device, kind)
            for index, devices in layout.devices.items()
            for device in devices
        ]
        return jax.make_array_from_single_device_arrays(
            layout.shape, layout.sharding, shards, dtype=layout.dtype
        )

    def to_plain(self) -> Any:
        return _plain(self.layout.shape, self.blocks)


def _has_host_memory(array: jax.Array) -> bool:
    return all(map(_can_pin, array.sharding.addressable_devices))


@functools.cache
def _can_pin(device: jax.Device) -> bool:
    return any(memory.kind == _HOST for memory in device.addressable_memories())


class _Going:
    """Shards that are on their way to host memory, all in one call."""

    def __init__(self) -> None:
        self._arrays: list[Any] = []
        self._shardings: list[Any] = []
        self._places: list[tuple[dict[Index, Any], Index]] = []

    def blocks_of(self, array: jax.Array) -> dict[Index, Any]:
        """Return what will hold the shards of this process when they have been started."""
        blocks: dict[Index, Any] = {}
        for shard in array.addressable_shards:
            index = index_of(shard.index, array.shape)
            if index not in blocks:
                blocks[index] = None
                self._arrays.append(shard.data)
                self._shardings.append(SingleDeviceSharding(shard.device, memory_kind=_HOST))
                self._places.append((blocks, index))
        return blocks

    def start(self) -> None:
        """Start them."""
        moved = jax.device_put(self._arrays, self._shardings, may_alias=False)
        for (blocks, index), array in zip(self._places, moved, strict=True):
            blocks[index] = array


def _moved(array: Any, device: jax.Device, kind: str | None) -> jax.Array:
    # Without may_alias=False, an array that is there already would not be copied, and could be donated.
    return jax.device_put(array, SingleDeviceSharding(device, memory_kind=kind), may_alias=False)


# --- on the disk -------------------------------------------------------------------------------


def _plain(shape: tuple[int, ...], blocks: Mapping[Index, Any]) -> dict[str, Any]:
    found = [{"at": [start for start, _ in index], "array": np.asarray(b)} for index, b in blocks.items()]
    return {"shape": list(shape), "blocks": found}


def _is_array(plain: Any) -> bool:
    return isinstance(plain, dict) and set(plain) == {"shape", "blocks"}


def _became(like: Any, plain: Any) -> jax.Array:
    """Return the array that a step makes of a number or of a NumPy array, as of ``TrainState.step``."""
    array = jnp.asarray(like)  # a number is weakly typed, as it is in the step
    if isinstance(like, np.ndarray):
        return array
    dtype = plain["blocks"][0]["array"].dtype
    return array if dtype == array.dtype else array.astype(dtype)


def _array_from(plain: Any, like: jax.Array) -> Copy:
    try:
        blocks = [Block(tuple(block["at"]), block["array"]) for block in plain["blocks"]]
        shape = tuple(plain["shape"])
    except (TypeError, KeyError):
        raise ValueError("there is no array there, and one is expected") from None
    layout = _Layout.of(like)
    for block in blocks:
        _check_fit(shape, block.array.dtype, like)
    copy = _OnHost(layout, {index: region(blocks, index, layout.dtype) for index in layout.devices})
    # Only what is set in a weakly typed array is weakly typed.
    return _OnDevice(like.at[...].set(copy.again())) if like.weak_type else copy


def _check_fit(shape: tuple[int, ...], dtype: Any, like: Any) -> None:
    if shape != np.shape(like) or dtype != like.dtype:
        raise ValueError(f"it is {dtype}{list(shape)} there, and {like.dtype}{list(np.shape(like))} here")
