"""The pickle ``.metadata`` of ``torch.distributed.checkpoint``, read into stand-ins."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from stablenum.commands.verify.formats.restricted_pickles import (
    Function,
    Record,
    RestrictedUnpickler,
    Sealed,
    text_of,
)
from stablenum.commands.verify.limits import Limits

__all__ = ["load_metadata"]

_TORCH = "torch.distributed.checkpoint."
_RECORDS = {
    (f"{_TORCH}filesystem", "_StorageInfo"),
    *(
        (f"{_TORCH}metadata", name)
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
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in (
    "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"
)}  # fmt: skip


class _Reader(RestrictedUnpickler):
    """Makes stand-ins for the classes of the metadata, and nothing else."""

    def __init__(self, data: bytes, torch: Any, limits: Limits) -> None:
        super().__init__(io.BytesIO(data), limits, len(data))
        self._torch = torch

    def stand_in(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return Sealed(name, (Record,), {"__slots__": ()})
        if (module, name) in _PATHS:
            return Function(self._path)
        if module == "torch" and isinstance(getattr(self._torch, name, None), self._torch.dtype):
            return name
        known: dict[tuple[str, str], Callable[..., Any]] = {
            # A member of an enumeration, in Python 3.11.
            ("builtins", "getattr"): lambda owner, member: member,
            ("torch", "Size"): lambda sizes=(): tuple(self.keys(sizes)),
            ("torch.serialization", "_get_layout"): lambda layout: layout,
        }
        if (module, name) in known:
            return Function(known[module, name])
        return super().stand_in(module, name)

    def _path(self, *parts: Any) -> str:
        self.charge(sum(len(text_of(part)) for part in parts))
        return "/".join(parts)


def load_metadata(data: bytes, torch: Any, limits: Limits) -> Record:
    """Return what a pickle says, without changing anything of this process.

    Raises:
        NotCheckedError: it names something that no such pickle needs.
        Exception: it is damaged.
    """
    found = _Reader(data, torch, limits).load()
    if not isinstance(found, Record):
        raise TypeError(f"it is of {type(found).__name__}")
    return found
