"""Read a folder of ``torch.distributed.checkpoint`` without running any code of it.

torch's own reader unpickles ``.metadata`` and plain values without restriction. Here only the classes that
make up the metadata are made, and every value is loaded with ``weights_only=True``.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stablenum.commands.verify.contents import Contents, Entry, NotCheckedError, Plain
from stablenum.commands.verify.contents import Path as Keys
from stablenum.commands.verify.formats.torch_files import as_numpy, entries_in, load, torch_module

__all__ = ["METADATA", "read"]

METADATA = ".metadata"

_MODULE = "torch.distributed.checkpoint."
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_MODULE}filesystem", "_StorageInfo"),
    *(
        (f"{_MODULE}metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def _member(owner: Any, name: str) -> Any:
    """Return a member of an enumeration, as which some versions of Python 3.11 pickle ``getattr``."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum):
        return owner[name]
    raise NotCheckedError("unreadable", "needs arbitrary code (builtins.getattr); it was not run")


class _Metadata(pickle.Unpickler):
    """Makes the classes of the metadata, dtypes, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = super().find_class(module, name) if (module, name) in _ALLOWED else None
        if found is None and module == "torch":
            torch = torch_module()
            found = (
                getattr(torch, name, None) if isinstance(getattr(torch, name, None), torch.dtype) else None
            )
        if found is None:
            raise NotCheckedError("unreadable", f"needs arbitrary code ({module}.{name}); it was not run")
        return found


def read(folder: Path) -> Contents:
    """Return what is in a folder of ``torch.distributed.checkpoint``.

    Raises:
        NotCheckedError: it needs code of its own, a part is missing or damaged, or torch is not installed.
    """
    torch = torch_module()
    metadata = _metadata(folder)
    arrays: list[Entry] = []
    values: dict[Keys, Plain] = {}
    notes: list[str] = []
    paths: Mapping[str, Any] = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    places = _places(metadata.storage_data)
    for name, described in metadata.state_dict_metadata.items():
        path = tuple(str(key) for key in paths.get(name, ())) or (name,)
        if hasattr(described, "chunks"):
            arrays.append(_entry(torch, folder, path, name, described, places))
            continue
        value = load(torch, io.BytesIO(_bytes(folder, name, places[name, None])))
        for found in entries_in(torch, value, path, notes):
            if isinstance(found, Entry):
                arrays.append(found)
            else:
                values[found[0]] = found[1]
    return Contents(
        format="torch.distributed.checkpoint", arrays=tuple(arrays), values=values, notes=tuple(notes)
    )


def _metadata(folder: Path) -> Any:
    try:
        with (folder / METADATA).open("rb") as file:
            found = _Metadata(file).load()
    except NotCheckedError:
        raise
    except Exception as error:
        raise NotCheckedError("corrupt", f"{METADATA}: {type(error).__name__}: {error}") from error
    if not hasattr(found, "state_dict_metadata") or not isinstance(found.storage_data, Mapping):
        raise NotCheckedError("unknown", f"{METADATA} is not that of torch.distributed.checkpoint")
    return found


def _places(storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Any]:
    """Return where each chunk is, by its name and its offset; plain values have no offset."""
    return {
        (index.fqn, None if index.offset is None else tuple(index.offset)): place
        for index, place in storage.items()
    }


def _bytes(folder: Path, name: str, place: Any) -> bytes:
    """Return the bytes of a chunk.

    Raises:
        NotCheckedError: the file is missing or too short, or the bytes were transformed by an extension.
    """
    if getattr(place, "transform_descriptors", None):
        raise NotCheckedError(
            "unreadable", f"{name} is stored through {', '.join(place.transform_descriptors)}"
        )
    file = folder / place.relative_path
    if file.resolve().parent != folder.resolve():
        raise NotCheckedError("corrupt", f"{name} should be in {place.relative_path}, outside the folder")
    try:
        with file.open("rb") as stream:
            stream.seek(place.offset)
            found: bytes = stream.read(place.length)
    except FileNotFoundError as error:
        raise NotCheckedError("corrupt", f"{place.relative_path} is missing, which holds {name}") from error
    if len(found) != place.length:
        raise NotCheckedError("corrupt", f"{place.relative_path} is too short for {name}")
    return found


def _entry(
    torch: Any, folder: Path, path: Keys, name: str, described: Any, places: Mapping[Any, Any]
) -> Entry:
    shape = tuple(described.size)
    dtype = str(described.properties.dtype).removeprefix("torch.")

    def assembled() -> Any:
        whole: Any = None
        for chunk in described.chunks:
            place = places.get((name, tuple(chunk.offsets)))
            if place is None:
                raise NotCheckedError("corrupt", f"{name} has no data at {tuple(chunk.offsets)}")
            part = as_numpy(torch, load(torch, io.BytesIO(_bytes(folder, name, place))))
            if part.shape != tuple(chunk.sizes):
                raise NotCheckedError(
                    "corrupt", f"a part of {name} has shape {part.shape}, not {tuple(chunk.sizes)}"
                )
            if part.shape == shape:
                return part
            whole = np.zeros(shape, part.dtype) if whole is None else whole
            whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = part
        if whole is None:
            raise NotCheckedError("corrupt", f"{name} has no data")
        return whole

    return Entry(path=path, dtype=dtype, shape=shape, read=assembled)
