"""The pickle ``.metadata`` of ``torch.distributed.checkpoint``, read into objects of our own.

A pickle may not only call what ``find_class`` returns: it may also set attributes of it, and the attribute of
a class stays changed for the whole process. So none of the classes that it names is handed out. Each has a
stand-in of its own for every file, which keeps what it is given, and lets nothing be set.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from stablenum.commands.verify.contents import NotCheckedError

__all__ = ["Record", "load_metadata"]

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


class _Sealed(type):
    """A class of which nothing can be set."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a stand-in cannot be set")


class Record(metaclass=_Sealed):
    """What stands for an object of a class of torch: its state, by the names of the fields."""

    __slots__ = ("_fields",)
    _fields: Mapping[Any, Any]

    def __new__(cls, *arguments: object) -> Record:
        made = super().__new__(cls)
        object.__setattr__(made, "_fields", dict(enumerate(arguments)))
        return made

    def __setstate__(self, state: object) -> None:
        """Take a state: fields by name, or in their order."""
        known = (
            state if isinstance(state, dict) else dict(enumerate(state if isinstance(state, tuple) else ()))
        )
        object.__setattr__(self, "_fields", known)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a stand-in cannot be set")

    def get(self, name: Any) -> Any:
        """Return a field; None if there is none of this name."""
        return self._fields.get(name)


class _Function:
    """What stands for a callable."""

    __slots__ = ("_made",)

    def __init__(self, made: Callable[..., Any]) -> None:
        object.__setattr__(self, "_made", made)

    def __call__(self, *arguments: Any) -> Any:
        return self._made(*arguments)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} of a stand-in cannot be set")


class _Reader(pickle.Unpickler):
    """Makes stand-ins for the classes of the metadata, and nothing else."""

    def __init__(self, file: io.BytesIO, torch: Any) -> None:
        super().__init__(file)
        self._torch = torch
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._made:
            self._made[module, name] = self._stand_in(module, name)
        return self._made[module, name]

    def _stand_in(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _Sealed(name, (Record,), {"__slots__": ()})
        if (module, name) in _PATHS:
            return _Function(lambda *parts: "/".join(map(str, parts)))
        if module == "torch" and isinstance(getattr(self._torch, name, None), self._torch.dtype):
            return name
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("builtins", "getattr"): lambda owner, member: (
                member
            ),  # a member of an enumeration, in Python 3.11
            ("collections", "OrderedDict"): lambda *items: dict(*items),
            ("torch", "Size"): lambda *sizes: tuple(*sizes),
            ("torch.serialization", "_get_layout"): lambda layout: layout,
        }
        if (module, name) in known:
            return _Function(known[module, name])
        raise NotCheckedError("unreadable", f"needs arbitrary code ({module}.{name}); it was not run")

    def persistent_load(self, pid: object) -> Any:
        raise NotCheckedError("unreadable", "it refers to something outside the file")


def load_metadata(data: bytes, torch: Any) -> Record:
    """Return what a pickle says, without changing anything of this process.

    Raises:
        NotCheckedError: it names something that no such pickle needs.
        Exception: it is damaged.
    """
    found = _Reader(io.BytesIO(data), torch).load()
    if not isinstance(found, Record):
        raise TypeError(f"it is of {type(found).__name__}")
    return found
