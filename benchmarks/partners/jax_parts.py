"""What the loops of JAX share: the model in flax linen, the optimizer, the names of the state, and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import stablenum_jax
from benchmarks.partners.batches import HIDDEN, Batch, batches, guard_config
from benchmarks.partners.outcome import Fault, Row, State
from stablenum_jax.integrations.orbax import GuardedRestore, GuardedSave

__all__ = [
    "Net",
    "adamw",
    "dtype_of",
    "guard_of",
    "load_flax",
    "load_orbax",
    "loss_of",
    "named",
    "row",
    "save_flax",
    "save_orbax",
    "schedule_count",
    "unscaled",
    "variables",
]


class Net(nn.Module):
    """The model of :mod:`benchmarks.partners.batches`."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, z: jax.Array) -> jax.Array:
        h = nn.Dense(HIDDEN, dtype=self.dtype)(x)
        h = nn.BatchNorm(use_running_average=False, momentum=0.9)(h.astype(jnp.float32))
        u = nn.Dense(HIDDEN, use_bias=False, dtype=self.dtype)(z).astype(jnp.float32)
        u = u * jax.lax.rsqrt(jnp.mean(u * u, -1, keepdims=True))
        return nn.Dense(1, dtype=self.dtype)(nn.relu(h) + u).astype(jnp.float32)


def dtype_of(fault: Fault | None) -> Any:
    """Return the dtype in which the dense layers compute."""
    return jnp.float16 if fault is Fault.FP16_OVERFLOW else jnp.float32


def variables(net: Net) -> tuple[Any, Any]:
    """Return the first parameters and running statistics."""
    first = batches(None)[0]
    made = net.init(jax.random.key(0), first.x, first.z)
    return made["params"], made["batch_stats"]


def loss_of(net: Net, params: Any, stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
    """Return the loss and the next running statistics."""
    out, changed = net.apply(
        {"params": params, "batch_stats": stats}, batch.x, batch.z, mutable=["batch_stats"]
    )
    return jnp.mean((out - batch.y) ** 2), changed["batch_stats"]


def adamw() -> optax.GradientTransformation:
    """Return AdamW with a learning rate that falls step by step."""
    return optax.adamw(optax.exponential_decay(1e-2, 4, 0.5))


def guard_of(fault: Fault | None, inner: Any = None) -> Any:
    """Return the guard, alone or around an optimizer."""
    return stablenum_jax.guard(inner, guard_config(fault))


def unscaled(fault: Fault | None) -> Fault | None:
    """Return a fault for which the guard leaves the scaling to the partner."""
    return None if fault is Fault.FP16_OVERFLOW else fault


def named(**trees: Any) -> State:
    """Return the arrays of several trees by path, without a guard's own state."""
    is_guard = lambda node: isinstance(node, stablenum_jax.typing.GuardOptState)  # noqa: E731
    bare = jax.tree.map(lambda x: None if is_guard(x) else x, trees, is_leaf=is_guard)
    return {jax.tree_util.keystr(p): np.array(x) for p, x in jax.tree_util.tree_leaves_with_path(bare)}


def row(loss: Any, guarded: Any = None, **more: Any) -> Row:
    """Return a row of the log: the loss and more, or what the guard in a tree tells a logger."""
    if guarded is not None:
        return stablenum_jax.scalars(guarded)
    return {"loss": float(loss), **{name: float(value) for name, value in more.items()}}


def schedule_count(opt_state: Any) -> float:
    """Return how many steps the schedule inside an optax state has taken."""
    is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
    (found,) = [x for x in jax.tree.leaves(opt_state, is_leaf=is_schedule) if is_schedule(x)]
    return float(found.count)


def save_flax(state: Any, folder: Path) -> None:
    """Save a pytree with flax's serialization."""
    (folder / "state.msgpack").write_bytes(flax.serialization.to_bytes(state))


def load_flax(like: Any, folder: Path) -> Any:
    """Load what :func:`save_flax` saved."""
    return flax.serialization.from_bytes(like, (folder / "state.msgpack").read_bytes())


def save_orbax(state: Any, folder: Path, *, guarded: bool) -> None:
    """Save a pytree with Orbax' manager."""
    with ocp.CheckpointManager(folder) as manager:
        manager.save(0, args=GuardedSave(state) if guarded else ocp.args.StandardSave(state))


def load_orbax(like: Any, folder: Path, *, guarded: bool) -> Any:
    """Load what :func:`save_orbax` saved."""
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(0, args=GuardedRestore(like) if guarded else ocp.args.StandardRestore(like))
