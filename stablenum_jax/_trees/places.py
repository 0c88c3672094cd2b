"""Where arrays are: beside parameters that are committed to a mesh, or where another array is.

A compiled step is compiled for arrays committed to certain devices, and once more for arrays that are not
committed: it returns the former, so what it is first called with should be committed too.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

__all__ = ["beside", "placed_like"]

PyTree: TypeAlias = Any


def beside(params: PyTree, state: PyTree) -> PyTree:
    """Return a state whose uncommitted arrays are on all devices of the mesh that the parameters are on.

    Without a mesh, or with several, it is returned unchanged: on a single device, an array that is not
    committed can be used beside arrays of any mesh.
    """
    meshes = {x.sharding.mesh for x in jax.tree.leaves(params) if _on_mesh(x)}
    if len(meshes) != 1:
        return state
    (mesh,) = meshes

    def put(x: Any) -> Any:
        if not _is_concrete(x) or x.committed or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return _put(x, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(put, state)


def placed_like(new: Any, like: Any) -> Any:
    """Return an array on the devices of another, and committed to them if the other is.

    Args:
        new: an array.
        like: an array, or the shape of one, which may have a sharding; if that is a single device, it is
            taken not to be committed.
    """
    sharding = getattr(like, "sharding", None)
    if new is like or sharding is None or not isinstance(new, jax.Array):
        return new
    alone = isinstance(sharding, SingleDeviceSharding)
    committed = like.committed if isinstance(like, jax.Array) else not alone
    if (new.committed, new.sharding) == (committed, sharding):
        return new
    if committed:
        return _put(new, sharding)
    (device,) = sharding.device_set
    with jax.default_device(device):
        return _uncommitted(new)


def _on_mesh(x: Any) -> bool:
    return _is_concrete(x) and x.committed and isinstance(x.sharding, NamedSharding)


def _is_concrete(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _put(x: jax.Array, sharding: Any) -> jax.Array:
    if sharding.is_fully_addressable or not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    # Without a collective: every process has the same numbers.
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _uncommitted(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_uncommitted(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    whole = np.asarray(x)
    # Of arrays, only what becomes of a number is weakly typed.
    return jnp.asarray(whole.item()) if x.weak_type and not whole.shape else jnp.array(whole)
