"""Compare the bits of arrays among the devices that hold copies of them."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stablenum.errors import bad_type
from stablenum.guard.replicas import (
    BLOCK,
    PARAMETER,
    Parted,
    block_sums,
    checksum,
    key_of_places,
    odd_ones,
    parted_error,
)
from stablenum_jax._trees.names import path_name
from stablenum_jax._trees.state import guards_in

__all__ = ["check_replicas"]

PyTree: TypeAlias = Any

_logger = logging.getLogger("stablenum")

_REMEDY = (
    "Load the last good checkpoint; or, if each device holds the whole array x, replace it by "
    "jax.device_put(np.asarray(shard.data), x.sharding), with the shard in x.addressable_shards that is on "
    "device {good}."
)


class _Leaf(NamedTuple):
    parameter: str
    tensor: str
    array: jax.Array


def check_replicas(params: PyTree, opt_state: PyTree = None) -> int:
    """Check that all devices that hold copies of an array hold the same bits; return how many arrays have
    copies.

    Call it on the host after every so many steps, as a check is one pass over the arrays and one wait::

        if step % 100 == 0:
            stablenum_jax.check_replicas(params, opt_state)

    Each device computes a 64-bit checksum of its own shards, and the checksums of all devices are gathered,
    also those of other processes, which all have to call this at the same time. Copies are arrays with a
    ``NamedSharding`` that leaves out an axis of its mesh; other arrays and numbers are not compared. Values
    are equal if their bits are: 0.0 and -0.0 are not, nor are two NaNs with other payloads.

    If nothing has copies, as on one device, nothing is done, and that is logged once.

    Args:
        params: a pytree of arrays.
        opt_state: another one. If it has a guard, messages give the number of its last step.

    Raises:
        ReplicasPartedError: the copies of an array differ; on all processes alike. ``parted`` has the ids of
            devices.
        TypeError: ``params`` or ``opt_state`` holds no arrays at all.
        ValueError: an array is traced: this function cannot be called under jit.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> params = jax.device_put({"w": jnp.ones(3)}, NamedSharding(mesh, P()))
        >>> check_replicas(params)  # one device has no copies
        0
    """
    _check_tree("params", params)
    _check_tree("opt_state", opt_state)
    leaves = [leaf for leaf in _leaves(params, opt_state) if _copies(leaf.array) > 1]
    if not leaves:
        _tell_of_no_copies()
        return 0
    by_mesh: dict[Mesh, list[_Leaf]] = {}
    for leaf in leaves:
        by_mesh.setdefault(leaf.array.sharding.mesh, []).append(leaf)
    found = [part for mesh, some in by_mesh.items() for part in _parted(mesh, some)]
    if found:
        raise parted_error(
            found,
            step=_last_step(opt_state),
            kind="device",
            parameters=len({part.parameter for part in found}),
            compared=len({leaf.parameter for leaf in leaves}),
            remedy=_REMEDY,
        )
    return len(leaves)


@functools.cache  # once in a process
def _tell_of_no_copies() -> None:
    _logger.warning("check_replicas has nothing to compare: no two devices hold copies of an array.")


def _last_step(opt_state: PyTree) -> int | None:
    guards = [found.guard for found in guards_in(opt_state)]
    steps = int(guards[0].step) if len(guards) == 1 and not guards[0].step.ndim else 0
    return steps - 1 if steps else None


# --- what is compared ------------------------------------------------------------------------------


def _check_tree(name: str, tree: PyTree) -> None:
    """Check that an argument holds arrays, if it holds anything.

    Raises:
        TypeError: it does not.
    """
    leaves = jax.tree.leaves(tree)
    if leaves and not any(hasattr(leaf, "dtype") for leaf in leaves):
        raise bad_type(name, "a pytree of arrays", leaves[0] if len(leaves) == 1 else tree)


def _leaves(params: PyTree, opt_state: PyTree) -> Iterator[_Leaf]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, jax.Array):
            yield _Leaf(path_name(path), PARAMETER, _concrete(leaf, "params", path))
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        if isinstance(leaf, jax.Array):
            name = f"opt_state{jax.tree_util.keystr(path)}"
            yield _Leaf(name, PARAMETER, _concrete(leaf, "opt_state", path))


def _concrete(leaf: jax.Array, name: str, path: Any) -> jax.Array:
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            f"{name} must hold concrete arrays; got a traced one at {name}{jax.tree_util.keystr(path)}. Call "
            "check_replicas outside jit, on what the jitted step returned."
        )
    return leaf


def _copies(array: jax.Array) -> int:
    """Return how many devices hold the same part of an array; 1 if that is not known."""
    if not isinstance(array.sharding, NamedSharding) or not array.size:
        return 1
    shape = array.sharding.mesh.shape
    return math.prod(shape[axis] for axis in _copied_axes(array.sharding))


def _copied_axes(sharding: NamedSharding) -> list[Any]:
    """Return the axes of the mesh along which devices hold the same part."""
    used: set[Any] = set(getattr(sharding.spec, "unreduced", ()))  # parts of a sum, which differ
    for entry in sharding.spec:
        used.update(entry if isinstance(entry, tuple) else (entry,))
    return [axis for axis in sharding.mesh.axis_names if axis not in used]


# --- comparing -------------------------------------------------------------------------------------


def _parted(mesh: Mesh, leaves: Sequence[_Leaf]) -> Iterator[Parted]:
    """Yield the arrays on a mesh whose copies differ, once for each part."""
    specs = tuple(leaf.array.sharding.spec for leaf in leaves)
    arrays = [_plain(leaf.array) for leaf in leaves]
    # Checksums have 64 bits, whatever the user's arrays have; and the user's mesh may be another one.
    with jax.enable_x64(True), jax.set_mesh(mesh):
        table = np.asarray(_checksums_on(mesh, specs)(arrays))
    ids = np.vectorize(lambda device: device.id)(mesh.devices)
    for leaf, column in zip(leaves, table.T, strict=True):
        for devices, sums in _parts(leaf.array.sharding, ids, column.reshape(ids.shape)):
            held = dict(zip(devices.tolist(), map(str, sums.tolist()), strict=True))
            if odd_ones(held):
                yield Parted(leaf.parameter, leaf.tensor, held)


def _parts(
    sharding: NamedSharding, ids: np.ndarray, sums: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the devices that hold each part of an array, and their checksums."""
    copied = [sharding.mesh.axis_names.index(axis) for axis in _copied_axes(sharding)]
    last = list(range(-len(copied), 0))
    by_part = (
        np.moveaxis(x, copied, last).reshape(-1, math.prod(x.shape[axis] for axis in copied))
        for x in (ids, sums)
    )
    yield from zip(*by_part, strict=True)


@functools.lru_cache(maxsize=64)
def _checksums_on(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """Return a function that computes (devices, arrays) int64: the checksum of each device's part."""

    def local(arrays: Sequence[jax.Array]) -> jax.Array:
        own = jnp.stack([_checksum(x) for x in arrays])
        return jax.lax.all_gather(own, mesh.axis_names)

    # Without check_vma, as the copies are not taken to be equal.
    over = {"mesh": mesh, "in_specs": (list(specs),), "out_specs": PartitionSpec(), "check_vma": False}
    return jax.jit(jax.shard_map(local, **over))


def _checksum(array: jax.Array) -> jax.Array:
    words = _words(array)
    keys = key_of_places(min(BLOCK, len(words)), xp=jnp)
    whole = len(words) // BLOCK * BLOCK
    sums = [block_sums(words[:whole].reshape(-1, BLOCK), keys, xp=jnp)] if whole else []
    if whole < len(words):
        sums.append(block_sums(words[whole:], keys, xp=jnp)[None])
    joined = jnp.concatenate(sums)
    return checksum(joined, key_of_places(len(joined), xp=jnp, first=BLOCK), xp=jnp)


def _words(array: jax.Array) -> jax.Array:
    """Return the bits of an array as a vector of integers of at most 32 bits."""
    if jnp.iscomplexobj(array):
        return jnp.concatenate([_words(array.real), _words(array.imag)])
    if array.dtype == jnp.bool_:
        return array.reshape(-1).astype(jnp.int8)
    bits = jax.dtypes.itemsize_bits(array.dtype)
    return jax.lax.bitcast_convert_type(array, _WORDS.get(bits, jnp.int32)).reshape(-1)


_WORDS = {2: jnp.int2, 4: jnp.int4, 8: jnp.int8, 16: jnp.int16}


def _plain(array: jax.Array) -> jax.Array:
    """Return the array with the same bits in the devices' own memory, and keys as integers."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    own = array.sharding.mesh.devices.flat[0].default_memory().kind
    if array.sharding.memory_kind in (None, own):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(own))
