"""Checkpoints of small JAX trainings in every format, good ones and such with poison planted in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from safetensors.numpy import save_file

import stablenum
import stablenum_jax
from stablenum_jax.integrations.orbax import GuardedSave

__all__ = ["OPTIMIZERS", "POISONS", "WRITERS", "plant", "started"]

RULES: dict[str, Any] = {"clip": [stablenum.AutoClip(), 1.0], "loss_scale": "dynamic", "spike": "skip"}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "guarded": lambda: optax.chain(stablenum_jax.guard(**RULES), optax.adamw(1e-2)),
    "around": lambda: stablenum_jax.guard(optax.adamw(1e-2), **RULES),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.5),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "plateau": lambda: optax.chain(
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-2), optax.contrib.reduce_on_plateau()
    ),
}


def started(kind: str) -> dict[str, Any]:
    """A state whose moments are positive numbers, with values beside it that are inf on purpose."""
    rng = np.random.default_rng(0)
    params = {
        "dense": {"kernel": jnp.asarray(rng.normal(size=(6, 5)), jnp.float32), "bias": jnp.zeros(5)},
        "gain": jnp.ones(()),
        "narrow": jnp.ones(4, jnp.bfloat16),
        "head": {"kernel": jnp.ones((5, 2)), "bias": jnp.zeros(2)},
    }

    def moved(node: Any) -> Any:
        grown = isinstance(node, jax.Array) and node.ndim and jnp.issubdtype(node.dtype, jnp.floating)
        return jnp.abs(jnp.asarray(rng.normal(size=node.shape), node.dtype)) if grown else node

    is_guard = lambda node: isinstance(node, stablenum_jax.typing.GuardOptState)  # noqa: E731
    opt_state = jax.tree.map(moved, OPTIMIZERS[kind]().init(params), is_leaf=is_guard)
    return {
        "params": params,
        "batch_stats": {"mean": jnp.zeros(5), "var": jnp.ones(5)},
        "masks": {"causal": jnp.where(jnp.tri(4, dtype=bool), jnp.zeros((4, 4)), -jnp.inf)},
        "opt_state": opt_state,
        "key": jax.random.PRNGKey(0),
        "step": jnp.asarray(3),
        "best": jnp.asarray(np.inf, jnp.float32),
    }


def _last_moment(name: str) -> bool:
    inside = "guard" not in name and "names_id" not in name and name.endswith("head.kernel")
    return name.startswith("opt_state") and inside


POISONS: dict[str, tuple[float, Callable[[str], bool]]] = {
    "NaN in a matrix": (np.nan, lambda name: name == "params.head.kernel"),
    "inf in a bias": (np.inf, lambda name: name == "params.dense.bias"),
    "-inf in a bias": (-np.inf, lambda name: name == "params.dense.bias"),
    "NaN in a scalar": (np.nan, lambda name: name == "params.gain"),
    "NaN in 16 bits": (np.nan, lambda name: name == "params.narrow"),
    "NaN in statistics": (np.nan, lambda name: name == "batch_stats.mean"),
    "inf in statistics": (np.inf, lambda name: name == "batch_stats.var"),
    "NaN in a mask": (np.nan, lambda name: name == "masks.causal"),
    "inf in a moment": (np.inf, _last_moment),
    "NaN in a moment": (np.nan, _last_moment),
    "negative": (-1e-3, lambda name: _last_moment(name) and ".nu." in name),
}


def plant(state: dict[str, Any], poison: str) -> tuple[dict[str, Any], set[str]]:
    """Return a state with poison in one element of each entry that it is for, and the names of these."""
    value, chosen = POISONS[poison]
    found: set[str] = set()

    def spoilt(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not (chosen(name) and leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating)):
            return leaf
        found.add(name)
        return leaf.at[(-1,) * leaf.ndim].set(value)

    return jax.tree_util.tree_map_with_path(spoilt, state), found


def _flat(state: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}


def _as_npz(state: Any, folder: Path) -> Path:
    np.savez(folder / "state.npz", **_flat(state))
    return folder / "state.npz"


def _as_safetensors(state: Any, folder: Path) -> Path:
    save_file(_flat(state), folder / "state.safetensors")
    return folder / "state.safetensors"


def _as_pytree(state: Any, folder: Path) -> Path:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "tree", state)
    return folder / "tree"


def _as_single_files(state: Any, folder: Path) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder / "single", args=ocp.args.PyTreeSave(state))
    return folder / "single"


def _as_manager(state: Any, folder: Path) -> Path:
    guarded = any(
        isinstance(x, stablenum_jax.typing.GuardOptState)
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, stablenum_jax.typing.GuardOptState))
    )
    save = GuardedSave if guarded else ocp.args.StandardSave
    with ocp.CheckpointManager(folder / "run") as manager:
        manager.save(3, args=save(state))
        manager.wait_until_finished()
    return folder / "run" / "3"


def _ours(kind: str) -> Callable[[Any, Path], Path]:
    def write(state: Any, folder: Path) -> Path:
        found = stablenum_jax.Checkpoints(folder, format=kind, on_poisoned="set aside").save(3, state)
        assert found is not None
        return found

    return write


WRITERS: dict[str, Callable[[Any, Path], Path]] = {
    "npz": _as_npz,
    "safetensors": _as_safetensors,
    "orbax": _as_pytree,
    "orbax, files": _as_single_files,
    "orbax, manager": _as_manager,
    "ours, npz": _ours("npz"),
    "ours, safetensors": _ours("safetensors"),
    "ours, orbax": _ours("orbax"),
}
