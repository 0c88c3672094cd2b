"""Write a snapshot: nested plain values as JSON, and the arrays beside them as NumPy writes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import stablenum
from stablenum.checkpoints.finiteness import NonFinite
from stablenum.checkpoints.structure import put_together, taken_apart
from stablenum.errors import CheckpointError
from stablenum_jax._recovery.finiteness import nonfinite
from stablenum_jax._recovery.formats import FORMATS

__all__ = ["SnapshotFolder"]

_FILE = "state.json"
_TENSOR = "tensor of torch"


class SnapshotFolder:
    """The format of snapshots, which is that of ``Checkpoints(format="npz")``."""

    name = "npz"

    def __init__(self) -> None:
        self._arrays = FORMATS[self.name]()

    def versions(self) -> Mapping[str, str]:
        own = {"stablenum": stablenum.__version__, "jax": jax.__version__}
        return own | dict(self._arrays.versions())

    def write(self, folder: Path, state: Any) -> None:
        plain, arrays = taken_apart(_without_tensors(state), lambda value: isinstance(value, np.ndarray))
        (folder / _FILE).write_text(json.dumps(plain, allow_nan=False), encoding="utf-8")
        self._arrays.write(folder, arrays)

    def read(self, folder: Path, like: object) -> Any:
        arrays = self._arrays.read(folder, {})
        try:
            plain = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            return _with_tensors(put_together(plain, arrays))
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{_FILE} cannot be read: {error!r}") from error

    def nonfinite(self, state: Any) -> list[NonFinite]:
        return nonfinite(state)


def _without_tensors(value: Any) -> Any:
    """Return the values with arrays in place of tensors: the state of a ``DataLoader`` may have some."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return {_TENSOR: value.numpy()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without_tensors(part) for part in value)
    return {k: _without_tensors(v) for k, v in value.items()} if isinstance(value, dict) else value


def _with_tensors(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(part) for part in value)
    if not isinstance(value, dict):
        return value
    if set(value) != {_TENSOR}:
        return {k: _with_tensors(v) for k, v in value.items()}
    torch = sys.modules.get("torch")
    return value[_TENSOR] if torch is None else torch.from_numpy(value[_TENSOR].copy())
