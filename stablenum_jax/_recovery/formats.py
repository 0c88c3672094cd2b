"""How arrays are written, by name: as NumPy, safetensors or Orbax do."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stablenum._support.partners import imported
from stablenum.errors import CheckpointError
from stablenum_jax._recovery.files import Arrays

__all__ = ["FORMATS"]


class _Npz:
    """A ``.npz`` archive. A format that NumPy does not have is written as integers, and named in the name."""

    name = "npz"
    on_all_ranks = False
    _file = "arrays.npz"

    def versions(self) -> Mapping[str, str]:
        return {"numpy": np.__version__}

    def write(self, folder: Path, arrays: Mapping[str, Any]) -> None:
        # numpy.savez takes names as keyword arguments, among which "file" is its own.
        with zipfile.ZipFile(folder / self._file, "w", allowZip64=True) as archive:
            for name, x in arrays.items():
                shown, array = _as_builtin(name, x)
                with archive.open(f"{shown}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)

    def read(self, folder: Path, like: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            with np.load(folder / self._file, allow_pickle=False) as archive:
                return dict(_as_named(name, archive[name]) for name in archive.files)
        except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{self._file} cannot be read: {error}") from error


def _as_builtin(name: str, x: Any) -> tuple[str, np.ndarray]:
    array = np.asarray(x)
    if array.dtype.isbuiltin == 1:
        return name, array
    return f"{name}#{array.dtype.name}", array.view(f"u{array.dtype.itemsize}")


def _as_named(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    of, mark, dtype = name.rpartition("#")
    # A name may have the mark by itself; what it marks is written as integers without a sign.
    if not mark or array.dtype.kind != "u" or not hasattr(importlib.import_module("ml_dtypes"), dtype):
        return name, array
    return of, array.view(_dtype(dtype))


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(importlib.import_module("ml_dtypes"), name))


class _Safetensors:
    """One file, in which other programs find the arrays under their names."""

    name = "safetensors"
    on_all_ranks = False
    _file = "arrays.safetensors"
    _dtypes: Mapping[str, str] = {
        "BF16": "bfloat16",
        "BOOL": "bool",
        "C64": "complex64",
        "F16": "float16",
        "F32": "float32",
        "F64": "float64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
        **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    }

    def __init__(self) -> None:
        needed_by = 'stablenum_jax.Checkpoints(format="safetensors")'
        self._library = imported(needed_by, {"safetensors": "safetensors"}, "0.6")

    def versions(self) -> Mapping[str, str]:
        return {"safetensors": self._library.__version__}

    def write(self, folder: Path, arrays: Mapping[str, Any]) -> None:
        host = {name: np.ascontiguousarray(x).reshape(np.shape(x)) for name, x in arrays.items()}
        for name, array in host.items():
            if array.dtype.name not in self._dtypes.values():
                raise ValueError(f'{name} is {array.dtype}, which safetensors cannot hold. Use format="npz".')
        try:
            importlib.import_module("safetensors.numpy").save_file(host, folder / self._file)
        except self._library.SafetensorError as error:
            if "I/O error" not in str(error):
                raise ValueError(f"safetensors cannot hold the state: {error}") from error
            raise OSError(f"{self._file} cannot be written: {error}") from error

    def read(self, folder: Path, like: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            found = self._library.deserialize((folder / self._file).read_bytes())
            return {name: self._array(described) for name, described in found}
        except (self._library.SafetensorError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{self._file} cannot be read: {error}") from error

    def _array(self, described: Mapping[str, Any]) -> np.ndarray:
        name = self._dtypes[described["dtype"]]
        dtype = np.dtype(name) if hasattr(np, name) else _dtype(name)
        return np.frombuffer(described["data"], dtype).reshape(described["shape"])


class _Orbax:
    """A checkpoint of Orbax, where every process writes its part of an array."""

    name = "orbax"
    on_all_ranks = True
    _folder = "arrays"

    def __init__(self) -> None:
        needed_by = 'stablenum_jax.Checkpoints(format="orbax")'
        self._orbax = imported(needed_by, {"orbax.checkpoint": "orbax-checkpoint"}, "0.12.8")

    def versions(self) -> Mapping[str, str]:
        return {"orbax-checkpoint": self._orbax.__version__}

    def write(self, folder: Path, arrays: Mapping[str, Any]) -> None:
        if not arrays:  # Orbax does not write an empty tree
            return
        with self._orbax.Checkpointer(self._orbax.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder / self._folder, args=self._orbax.args.PyTreeSave(dict(arrays)))

    def read(self, folder: Path, like: Mapping[str, Any]) -> Mapping[str, Any]:
        if not (folder / self._folder).is_dir():
            return {}
        try:
            with self._orbax.Checkpointer(self._orbax.PyTreeCheckpointHandler()) as checkpointer:
                there = checkpointer.metadata(folder / self._folder)
                there = getattr(there, "item_metadata", there)
                there = getattr(there, "tree", there)
                how = {name: self._as(like.get(name)) for name in there}
                args = self._orbax.args.PyTreeRestore(restore_args=how)
                found: Mapping[str, Any] = checkpointer.restore(folder / self._folder, args=args)
                return found
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{self._folder} cannot be read by Orbax: {error}") from error

    def _as(self, like: Any) -> Any:
        sharding = getattr(like, "sharding", None)
        if sharding is None or isinstance(sharding, jax.sharding.SingleDeviceSharding):
            return self._orbax.RestoreArgs(restore_type=np.ndarray)
        return self._orbax.ArrayRestoreArgs(sharding=sharding)


FORMATS: dict[str, Callable[[], Arrays]] = {
    "npz": _Npz,
    "safetensors": _Safetensors,
    "orbax": _Orbax,
}
