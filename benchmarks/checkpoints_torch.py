"""How PyTorch's formats are saved and loaded, for :mod:`benchmarks.checkpoints`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch.distributed import checkpoint

import stablenum_torch
from benchmarks.checkpoints import Plain
from stablenum_torch._recovery.entries import nonfinite

__all__ = ["plain"]


def plain(form: str, values: Mapping[str, np.ndarray[Any, Any]]) -> Plain:
    """Return how ``"torch"``, ``"safetensors"`` or ``"dcp"`` saves some values."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    state = {"model": {name: torch.from_numpy(value) for name, value in values.items()}}
    write, read = _WAYS[form]
    return Plain(
        state,
        lambda folder: write(folder, state),
        lambda folder: read(folder, state),
        lambda folder: stablenum_torch.Checkpoints(folder, keep=1, format=form),  # type: ignore[arg-type]
        lambda checkpoints: checkpoints.load({"model": None}),
        functools.partial(nonfinite, state),
    )


def _write_torch(folder: Path, state: Any) -> None:
    torch.save(state, folder / "state.pt")


def _read_torch(folder: Path, state: Any) -> None:
    torch.load(folder / "state.pt")


def _write_safetensors(folder: Path, state: Any) -> None:
    safetensors.torch.save_file(state["model"], folder / "tensors.safetensors")


def _read_safetensors(folder: Path, state: Any) -> list[Any]:
    # The library maps the file; only a copy is read.
    return [t.clone() for t in safetensors.torch.load_file(folder / "tensors.safetensors").values()]


def _write_dcp(folder: Path, state: Any) -> None:
    writer = checkpoint.FileSystemWriter(folder, sync_files=False)
    checkpoint.save(state, storage_writer=writer, no_dist=True)


def _read_dcp(folder: Path, state: Any) -> None:
    into = {"model": {key: torch.empty_like(value) for key, value in state["model"].items()}}
    checkpoint.load(into, checkpoint_id=folder, no_dist=True)


_WAYS: dict[str, tuple[Callable[[Path, Any], object], Callable[[Path, Any], object]]] = {
    "torch": (_write_torch, _read_torch),
    "safetensors": (_write_safetensors, _read_safetensors),
    "dcp": (_write_dcp, _read_dcp),
}
