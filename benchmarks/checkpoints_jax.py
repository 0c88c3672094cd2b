"""How the formats of JAX's checkpoints are saved and loaded, for :mod:`benchmarks.checkpoints`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import safetensors.numpy

import stablenum_jax
from benchmarks.checkpoints import Plain
from stablenum_jax._recovery.finiteness import nonfinite

__all__ = ["plain"]

Values = Mapping[str, np.ndarray[Any, Any]]


def plain(form: str, values: Values) -> Plain:
    """Return how ``"npz"``, ``"safetensors"`` or ``"orbax"`` saves some values."""
    state = {name: jnp.asarray(value) for name, value in values.items()}
    write, read = _WAYS[form]
    return Plain(
        state,
        lambda folder: write(folder, state),
        read,
        lambda folder: stablenum_jax.Checkpoints(folder, keep=1, format=form),  # type: ignore[arg-type]
        lambda checkpoints: jax.block_until_ready(checkpoints.load(state)[1]),
        lambda: nonfinite(state),
    )


def _write_npz(folder: Path, state: Any) -> None:
    np.savez(folder / "arrays.npz", allow_pickle=False, **{name: np.asarray(x) for name, x in state.items()})


def _read_npz(folder: Path) -> object:
    with np.load(folder / "arrays.npz") as archive:
        return jax.block_until_ready({name: jnp.asarray(archive[name]) for name in archive.files})


def _write_safetensors(folder: Path, state: Any) -> None:
    host = {name: np.asarray(x) for name, x in state.items()}
    safetensors.numpy.save_file(host, folder / "arrays.safetensors")


def _read_safetensors(folder: Path) -> object:
    found = safetensors.numpy.load_file(folder / "arrays.safetensors")
    return jax.block_until_ready({name: jnp.asarray(x) for name, x in found.items()})


def _write_orbax(folder: Path, state: Any) -> None:
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "arrays", args=orbax.args.PyTreeSave(state))


def _read_orbax(folder: Path) -> object:
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        return jax.block_until_ready(checkpointer.restore(folder / "arrays"))


_WAYS: dict[str, tuple[Callable[[Path, Any], object], Callable[[Path], object]]] = {
    "npz": (_write_npz, _read_npz),
    "safetensors": (_write_safetensors, _read_safetensors),
    "orbax": (_write_orbax, _read_orbax),
}
