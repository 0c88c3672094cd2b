"""Read a folder of ``torch.distributed.checkpoint`` without running any code of it.

torch's own reader unpickles ``.metadata`` and plain values without restriction. Here the metadata are read
into stand-ins of our own, and so is every value.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stablenum.commands.verify.contents import Contents, Entry, Gathered, NotCheckedError
from stablenum.commands.verify.contents import Path as Keys
from stablenum.commands.verify.counts import is_measured
from stablenum.commands.verify.formats.boxes import cover
from stablenum.commands.verify.formats.metadata_pickles import load_metadata
from stablenum.commands.verify.formats.restricted_pickles import Record, text_of
from stablenum.commands.verify.formats.torch_files import as_numpy, entries_in, load, torch_module
from stablenum.commands.verify.leaves import name_of
from stablenum.commands.verify.limits import Limits

__all__ = ["METADATA", "read"]

METADATA = ".metadata"


def read(folder: Path, limits: Limits) -> Contents:
    """Return what is in a folder of ``torch.distributed.checkpoint``.

    Raises:
        NotCheckedError: it needs code of its own, a part is missing or damaged, or torch is not installed.
    """
    torch = torch_module()
    stored = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    reader = _Reader(torch, folder, _metadata(torch, folder, limits), limits, stored)
    try:
        found = reader.read()
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise NotCheckedError(
            "corrupt", f"{METADATA} does not describe a checkpoint ({error!r:.200})"
        ) from error
    return Contents(
        format="torch.distributed.checkpoint",
        arrays=tuple(found.arrays),
        values=found.values,
        notes=tuple(found.notes),
        stored=stored,
    )


def _metadata(torch: Any, folder: Path, limits: Limits) -> Record:
    file = folder / METADATA
    limits.check("description", file.stat().st_size, f"the bytes of {METADATA}")
    try:
        found = load_metadata(file.read_bytes(), torch, limits)
    except NotCheckedError:
        raise
    except Exception as error:
        raise NotCheckedError("corrupt", f"{METADATA}: {type(error).__name__}: {error!s:.200}") from error
    if not all(isinstance(found.get(name), Mapping) for name in ("state_dict_metadata", "storage_data")):
        raise NotCheckedError("unknown", f"{METADATA} is not that of torch.distributed.checkpoint")
    return found


class _Reader:
    """Reads what the metadata describe."""

    def __init__(self, torch: Any, folder: Path, metadata: Record, limits: Limits, stored: int) -> None:
        self._torch, self._folder, self._metadata, self._limits = torch, folder, metadata, limits
        self._places = _places(metadata.get("storage_data"))
        limits.check("parts", len(self._places), "its arrays and plain values are many")
        limits.check_bytes(sum(_count(place.get("length")) for place in self._places.values()), stored)

    def read(self) -> Gathered:
        """Return arrays, plain values and notes."""
        gathered = Gathered()
        planned = self._metadata.get("planner_data")
        paths: Mapping[str, Any] = planned if isinstance(planned, Mapping) else {}
        for name, described in self._metadata.get("state_dict_metadata").items():
            path = tuple(name_of(key) for key in paths.get(name, ())) or (name_of(name),)
            if described.get("chunks") is not None:
                gathered.add(self._entry(path, name, described))
                continue
            value = load(self._torch, self._bytes(name, self._places[name, None]), self._limits)
            for found in entries_in(self._torch, value, path, gathered.notes, self._limits):
                gathered.add(found)
        return gathered

    def _bytes(self, name: str, place: Record) -> bytes:
        """Return the bytes of a chunk.

        Raises:
            NotCheckedError: the file is missing or too short, or the bytes were transformed by an extension.
        """
        if transforms := place.get("transform_descriptors"):
            through = ", ".join(name_of(transform) for transform in transforms[:3])
            raise NotCheckedError("unreadable", f"{name} is stored through {through}")
        relative, offset, length = (
            text_of(place.get("relative_path")),
            place.get("offset"),
            place.get("length"),
        )
        file = self._folder / relative
        if file.resolve().parent != self._folder.resolve():
            raise NotCheckedError("corrupt", f"{name} should be in {relative}, outside the folder")
        if not file.is_file():
            raise NotCheckedError("corrupt", f"{relative} is missing, which holds {name}")
        with file.open("rb") as stream:
            stream.seek(_count(offset))
            found: bytes = stream.read(_count(length))
        if len(found) != length:
            raise NotCheckedError("corrupt", f"{relative} is too short for {name}")
        return found

    def _entry(self, path: Keys, name: str, described: Record) -> Entry:
        shape = _shape(described.get("size"))
        properties = described.get("properties")
        dtype = text_of(properties.get("dtype") or properties.get(0))  # torch saves them as a tuple
        chunks = [(_shape(c.get("offsets")), _shape(c.get("sizes"))) for c in described.get("chunks")]
        if not cover(chunks, shape):
            raise NotCheckedError("corrupt", f"the parts of {name} do not make up the shape {shape}")

        def assembled() -> Any:
            whole: Any = None
            for offsets, sizes in chunks:
                part = self._part(name, offsets, sizes, dtype)
                if part.shape == shape:
                    return part
                whole = np.zeros(shape, part.dtype) if whole is None else whole
                whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = part
            if whole is None:
                raise NotCheckedError("corrupt", f"{name} has no data")
            return whole

        if not is_measured(dtype):  # nobody reads them later
            for offsets, sizes in chunks:
                self._part(name, offsets, sizes, dtype)
        return Entry(path=path, dtype=dtype, shape=shape, read=assembled)

    def _part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: str) -> Any:
        place = self._places.get((name, offsets))
        if place is None:
            raise NotCheckedError("corrupt", f"{name} has no data at {offsets}")
        tensor = load(self._torch, self._bytes(name, place), self._limits)
        if not isinstance(tensor, self._torch.Tensor) or tuple(tensor.shape) != sizes:
            found = tuple(getattr(tensor, "shape", ()))
            raise NotCheckedError("corrupt", f"a part of {name} has shape {found}, not {sizes}")
        if (held := str(tensor.dtype).removeprefix("torch.")) != dtype:
            raise NotCheckedError("corrupt", f"a part of {name} is of {held}, not of {dtype}")
        self._limits.check_bytes(tensor.numel() * tensor.element_size(), _count(place.get("length")))
        return as_numpy(self._torch, tensor)


def _places(storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Record]:
    """Return where each chunk is, by its name and its offset; plain values have no offset."""
    return {
        (index.get("fqn"), None if index.get("offset") is None else _shape(index.get("offset"))): place
        for index, place in storage.items()
        if isinstance(place, Record)
    }


def _shape(numbers: Any) -> tuple[int, ...]:
    return tuple(map(_count, numbers))


def _count(number: Any) -> int:
    """Return a number of elements or bytes.

    Raises:
        TypeError: it is none.
    """
    if type(number) is not int or not 0 <= number < 2**63:
        raise TypeError(f"a value of type {type(number).__name__} is not a number of elements or bytes")
    return number
